"""Nodes on which no job is, and what their daemons' checks of them have found.

A node with a failed check is chosen last, for as long as the check stands and nobody has removed
it. What has failed in two rounds is also noted in the record of nodes, once, so that it counts for
some days after that: what happens once may be no fault of the node, and what several nodes have in
common has mostly shown by then. What counts is decided in `holdfast_core.idle_checks`. Nothing
waits for any of this, and it needs no right that the operator has not: events are about the
daemon's pod, in the namespace of the release.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from holdfast_core.idle_checks import FailedCheck, IdleCheck, in_words, nodes_to_avoid
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
_Check = tuple[str, IdleCheck]
"""A node, and a check of it."""


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
        """What counts against nodes now."""
        self._common: frozenset[IdleCheck] = frozenset()
        """Checks that most nodes failed at the last look."""
        self._told: set[_Check] = set()
        self._recorded: set[_Check] = set()
        """What has been reported and recorded, until a daemon reports that it has passed."""

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
        views = self._nodes()
        reports = {
            name: view.failed_checks
            for name, view in views.items()
            if view.connected and view.failed_checks is not None
        }
        failing = {(name, each.check) for name, failed in reports.items() for each in failed}
        self._failed = nodes_to_avoid(reports)
        counted = [(name, each) for name, failed in self._failed.items() for each in failed]
        common = failing - {(name, each.check) for name, each in counted}
        self._say_what_is_common(Counter(check for _, check in common), len(reports))
        for known in (self._told, self._recorded):  # a node with a job has not passed its checks
            known -= {
                (name, check)
                for name, check in known
                if name not in views or (name in reports and (name, check) not in failing)
            }
        self._tell(counted)
        self._note([(name, each) for name, each in counted if each.confirmed])
        self._metrics.replace_all("idle_node_failed", {(name,): 1.0 for name, _ in failing})

    def _say_what_is_common(self, common: Mapping[IdleCheck, int], reports: int) -> None:
        """Log each check that so many of the nodes with `reports` fail, once they do."""
        for check in sorted(common.keys() - self._common):
            _log.warning(
                "%d of %s without a job fail the check of %s, so this is no matter of a node: it "
                "counts against none",
                common[check],
                format_count(reports, "node"),
                check,
            )
        self._common = frozenset(common)

    def _tell(self, counted: Iterable[tuple[str, FailedCheck]]) -> None:
        """Report what has not been reported yet."""
        new: dict[str, list[FailedCheck]] = {}
        for node, failed in counted:
            if (node, failed.check) not in self._told:
                self._told.add((node, failed.check))
                new.setdefault(node, []).append(failed)
        for node, checks in new.items():
            text = in_words(checks)
            _log.warning("node %s: %s", node, text)
            for pod in self._pods():
                if pod.node == node and not pod.ending:
                    metadata = {"name": pod.name, "uid": pod.uid, "namespace": self._namespace}
                    about = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
                    what = f"node {node}, which has no job: {text}; it is chosen last"
                    self._post(about, Event(reason="NodeCheckFailed", message=what, warning=True))

    def _note(self, confirmed: Iterable[tuple[str, FailedCheck]]) -> None:
        """Record what has not been recorded yet."""
        new = [
            (node, failed)
            for node, failed in confirmed
            if (node, failed.check) not in self._recorded
        ]
        for node, failed in new:
            self._recorded.add((node, failed.check))
            self._metrics.add("node_failures", kind=FailureKind.FAILED_CHECK.value)
        if self._record is not None and new:
            # Since when it has failed, so that another replica finds its own failure recorded.
            now = self._wall()
            self._record.note(
                (
                    node,
                    NodeFailure(
                        kind=FailureKind.FAILED_CHECK,
                        job="",
                        epoch=0,
                        at=max(0.0, now - failed.failing_s),
                        check=failed.check,
                    ),
                )
                for node, failed in new
            )
