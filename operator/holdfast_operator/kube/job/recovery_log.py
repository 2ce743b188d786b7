"""A job's recoveries, recorded for its status and counted in metrics. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_core.job.parsing import MoETrainingJob, On
from holdfast_core.states import RestoreSource
from holdfast_operator.kube.job.status import RECOVERIES_SHOWN
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.reconciler.observe.evidence import gather
from holdfast_operator.reconciler.observe.views import ClusterView, ControlState, Decision, Event
from holdfast_operator.reconciler.report.recoveries import Recoveries, Recovery


class RecoveryLog:
    """The recoveries of one job.

    Args:
        earlier: the recoveries that an earlier control loop recorded.
    """

    def __init__(self, metrics: OperatorMetrics, earlier: Sequence[Recovery]) -> None:
        self._metrics = metrics
        self._recoveries = Recoveries()
        self._recoveries.all = list(earlier)

    @property
    def recoveries(self) -> list[Recovery]:
        """The recoveries, oldest first, with wall-clock times."""
        return self._recoveries.all

    def follow(
        self,
        job: MoETrainingJob,
        before: ControlState,
        observed: ClusterView,
        decision: Decision,
        wall: float,
    ) -> Event | None:
        """Note one turn of the control loop, at the wall-clock time `wall`. Returns the story of a
        recovery that is over with it."""
        was_over = self._last_is_over()
        story = self._recoveries.follow(observed, decision, wall)
        del self._recoveries.all[:-RECOVERIES_SHOWN]
        if decision.state.recoveries > before.recoveries and before.membership is not None:
            causes = gather(
                job, before.membership, observed, before, decision.state.looked_at
            ).causes
            self._metrics.add("recoveries", cause=(causes[0].on if causes else On.ANY).value)
        elif not was_over and self._last_is_over():
            last = self._recoveries.all[-1]
            assert last.resumed_at is not None
            self._metrics.add("recoveries_finished", source=last.source or RestoreSource.NONE)
            self._metrics.observe("recovery_seconds", last.resumed_at - last.decided_at)
        return story

    def _last_is_over(self) -> bool:
        every = self._recoveries.all
        return not every or every[-1].resumed_at is not None
