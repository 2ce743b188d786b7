"""The parts that the control loops of all jobs share. `operating` makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from holdfast_core.job.locations import Locations
from holdfast_operator.control.server import ControlServer
from holdfast_operator.kube.client.api import KubeApi
from holdfast_operator.kube.client.events import Recorder
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.kube.cluster.attention import Attention
from holdfast_operator.kube.cluster.candidates import CandidateNodes
from holdfast_operator.kube.cluster.node_record import NodeRecord
from holdfast_operator.kube.kueue.queueing import Queues
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.pods.placeholders import Placeholders
from holdfast_operator.kube.pods.trainers import PodIndex, Trainers
from holdfast_operator.reconciler.observe.views import Condition


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopContext:
    """The rest of the operator, as the control loop of one job sees it."""

    api: KubeApi
    server: ControlServer
    attention: Attention
    candidate_nodes: CandidateNodes
    pods: PodIndex
    trainers: Trainers
    placeholders: Placeholders
    recorder: Recorder
    metrics: OperatorMetrics
    clock: Callable[[], float]
    """Monotonic seconds."""
    worked_s: Callable[[], float]
    """Processor time that this thread has used: on a busy machine, much less than has passed."""
    clocks: ClockPair
    locations: Locations
    """Locations that jobs may persist to."""
    queues: Queues | None = None
    """Kueue; None when the operator works without."""
    node_record: NodeRecord | None = None
    """Failures of nodes; None when they are not remembered."""
    insecure: bool = False
    """Whether daemons and operator run without certificates."""
    watch_namespaces: Collection[str] = ()
    """Namespace of the jobs; empty for all."""
    outdated: Callable[[Iterable[str]], Condition | None] = lambda nodes: None
    """Condition about daemons of an older version on these nodes; None when there are none."""
    status_s: Callable[[], float]
    """Seconds for which status changes that can wait are held back: the more jobs, the longer."""
