"""Nodes on which no job is, and what their daemons' checks of them have found.

A node with a failed check is chosen last, for as long as the check stands and nobody has removed
it. The failure is also noted in the record of nodes, once, so that it counts for some days after
that. What counts is decided in `holdfast_core.idle_checks`. Nothing waits for any of this, and it
needs no right that the operator has not: events are about the daemon's pod, in the namespace of the
release.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from holdfast_core.idle_checks import FailedCheck, in_words, nodes_to_avoid
from holdfast_core.node_failures import (
    CLEAN,
    FailureKind,
    NodeFailure,
    Rating,
    with_problem,
)
from holdfast_core.quantities import format_count
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.cluster.daemons import DaemonPod
from holdfast_operator.kube.cluster.node_record import NodeRecord
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.reconciler.observe.views import Event, NodeView

_log = logging.getLogger(__name__)

ROUND_S = 10.0
"""Pause between two looks at what daemons report, and before the first: by then they have
connected, so that it shows whether most of them report the same."""


class IdleNodes:
    """What is known of idle nodes. `run` it as a task while the operator leads.

    Args:
        namespace: of the daemons' pods.
        nodes: the daemons, by node, as they have last reported.
        pods: the daemons' pods.
        record: the failures of nodes; None when none are remembered.
        post: posts an event about an object.
        wall: seconds since the Unix epoch.
    """

    def __init__(
        self,
        namespace: str,
        record: NodeRecord | None,
        *,
        nodes: Callable[[], Mapping[str, NodeView]],
        pods: Callable[[], Iterable[DaemonPod]],
        post: Callable[[Object, Event], None],
        metrics: OperatorMetrics,
        wall: Callable[[], float],
    ) -> None:
        self._namespace, self._record, self._wall = namespace, record, wall
        self._nodes, self._pods, self._post, self._metrics = nodes, pods, post, metrics
        self._failed: Mapping[str, tuple[FailedCheck, ...]] = {}
        self._in_common = False

    def rating(self, node: str) -> Rating:
        """How a node has done lately, as its record and the checks that stand against it say."""
        recorded = CLEAN if self._record is None else self._record.rating(node)
        return with_problem(recorded, in_words(self._failed.get(node, ())))

    async def run(self) -> None:
        """Look at what daemons report now and then, until cancelled."""
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                self.look()
            except Exception:  # what is only a preference must not end the operator
                _log.exception("checks of idle nodes are not looked at")

    def look(self) -> None:
        """Take in what daemons report now."""
        reports = {
            name: view.failed_checks
            for name, view in self._nodes().items()
            if view.connected and view.failed_checks is not None
        }
        failing = {name: failed for name, failed in reports.items() if failed}
        avoided = nodes_to_avoid(reports)
        in_common = bool(failing) and not avoided
        if in_common and not self._in_common:
            _log.warning(
                "%d of %s without a job fail their checks, so this is no matter of a node: "
                "nothing counts against any",
                len(failing),
                format_count(len(reports), "node"),
            )
        begun = {
            name: tuple(each for each in failed if each.check not in self._checks_of(name))
            for name, failed in avoided.items()
        }
        ended = self._failed.keys() - avoided.keys()
        self._failed, self._in_common = avoided, in_common
        for name, new in begun.items():
            if new:
                self._note(name, new)
        for name in sorted(ended):
            _log.info("node %s: no check of it has failed any more", name)
        self._metrics.replace_all("idle_node_failed", {(name,): 1.0 for name in avoided})

    def _checks_of(self, node: str) -> frozenset[str]:
        """Checks of a node that had failed at the last look."""
        return frozenset(each.check for each in self._failed.get(node, ()))

    def _note(self, node: str, failed: tuple[FailedCheck, ...]) -> None:
        """Record checks that have failed, and report them."""
        text = in_words(failed)
        _log.warning("node %s: %s", node, text)
        self._metrics.add("node_failures", kind=FailureKind.FAILED_CHECK.value)
        if self._record is not None:
            # Since when it has failed, so that another replica finds its own failure recorded.
            now = self._wall()
            self._record.note(
                (
                    node,
                    NodeFailure(
                        kind=FailureKind.FAILED_CHECK,
                        job="",
                        epoch=0,
                        at=max(0.0, now - each.failing_s),
                        check=each.check,
                    ),
                )
                for each in failed
            )
        for pod in self._pods():
            if pod.node == node and not pod.ending:
                metadata = {"name": pod.name, "uid": pod.uid, "namespace": self._namespace}
                about = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
                what = f"node {node}, which has no job: {text}; it is chosen last"
                self._post(about, Event(reason="NodeCheckFailed", message=what, warning=True))
