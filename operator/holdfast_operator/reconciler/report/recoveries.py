"""History of recoveries: what was lost, what was restored from where, and how long it took.

Pure. It follows the control loop's observations and decisions. It is for people only; nothing
depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast_core.job.recovery_story import recovery_in_words
from holdfast_core.job.status import RecoveryStatus
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.failures.replays import replay_in_words
from holdfast_operator.reconciler.observe.lookups import ranks_in
from holdfast_operator.reconciler.observe.timestamps import micro_timestamp
from holdfast_operator.reconciler.observe.views import (
    EVENT_BYTES_MAX,
    ClusterView,
    Decision,
    Event,
    EventReason,
)
from holdfast_operator.reconciler.report.advice import advice_for
from holdfast_operator.reconciler.report.conditions import newest_step, training_runs

_FARTHEST_FIRST = (
    RestoreSource.STORAGE,
    RestoreSource.PARITY,
    RestoreSource.LOCAL,
    RestoreSource.LIVE,
    RestoreSource.NONE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """One recovery, from the decision to the next step."""

    epoch: int
    cause: str
    decided_at: float
    step_before: int
    """Newest step that any rank had reported before the recovery, or before those that it cut
    off."""
    resumed_at: float | None = None
    """When all ranks were restored and at work."""
    restored_step: int | None = None
    """Step that was restored; 0 for a fresh start."""
    lost_steps: int | None = None
    sources: tuple[tuple[int, RestoreSource], ...] = ()
    """Each rank, and the source of its state."""
    replay: str = ""
    """Which ranks recovered alone, or why none did; empty where none were to."""
    left_nodes: tuple[str, ...] = ()
    """Nodes that members have left with it."""
    advice: str = ""
    """What to do about the cause, in a sentence; empty where nothing is known."""
    advanced_at: float | None = None
    """When the first step after the restored one was completed."""

    @property
    def source(self) -> RestoreSource:
        """Source of the state of all ranks together: storage or parity if any rank needed it."""
        kinds = {source for _, source in self.sources}
        return next((kind for kind in _FARTHEST_FIRST if kind in kinds), RestoreSource.UNKNOWN)

    @property
    def status(self) -> RecoveryStatus:
        """The recovery as a job's status has it."""
        resumed_at = self.resumed_at
        return RecoveryStatus(
            cause=self.cause,
            detected_at=micro_timestamp(self.decided_at),
            restored_step=self.restored_step,
            lost_steps=self.lost_steps,
            seconds=None if resumed_at is None else round(resumed_at - self.decided_at, 3),
            source=None if resumed_at is None else self.source,
            replay=self.replay or None,
            advice=self.advice or None,
            left_nodes=self.left_nodes[:NODES_SHOWN] or None,
        )


NODES_SHOWN = 16
"""Nodes that one recovery names."""
RECOVERIES_MAX = 1000
"""Recoveries that are remembered, and shown in the status; older ones are dropped."""


class Recoveries:
    """Newest recoveries of a run, as far as this control loop saw them. The caller provides the
    times."""

    def __init__(self) -> None:
        self.all: list[Recovery] = []
        self._step = 0
        self._count: int | None = None
        self._nodes: frozenset[str] = frozenset()
        """Nodes of the members in the previous turn."""

    def follow(self, observed: ClusterView, decision: Decision, time: float) -> Event | None:
        """Add one turn of the reconciler. Returns the story of a recovery that is over with it, as
        an event; None without one."""
        state = decision.state
        membership = state.membership
        began = self._count is not None and state.recoveries > self._count
        self._count = state.recoveries
        if membership is None:
            return None
        nodes = frozenset(member.node for member in membership.members)
        left, self._nodes = self._nodes - nodes, nodes
        if began and state.outcome is None:
            if self.all and self.all[-1].resumed_at is None:  # cut off: its loss is this one's
                self._step = max(self._step, self.all[-1].step_before)
            causes = [e.message for e in decision.events if e.reason == EventReason.RECOVERING]
            self.all.append(
                Recovery(
                    epoch=membership.epoch,
                    cause=causes[-1] if causes else decision.reason,
                    decided_at=time,
                    step_before=self._step,
                    advice=advice_for(decision.blamed, state, membership.epoch - 1),
                    left_nodes=tuple(sorted(left)),
                )
            )
            del self.all[:-RECOVERIES_MAX]
            self._step = 0
        step = newest_step(observed, membership)
        self._step = max(self._step, step)
        if not self.all or self.all[-1].epoch != membership.epoch:
            return None
        last = self.all[-1]
        ongoing = last.resumed_at is None
        for event in decision.events:
            if event.reason == EventReason.AGENT_ENDED and not began:  # of the epoch that it ended
                last = replace(last, cause=f"{event.message}; {last.cause}")
        late = [each for each in decision.blamed if each.epoch == membership.epoch - 1]
        if ongoing and (advice := advice_for(late, state, membership.epoch - 1)):
            last = replace(last, advice=advice)  # its reason has come late
        start = state.started_from
        if last.resumed_at is None and start is not None and training_runs(observed, membership):
            ranks = ranks_in(observed, membership)
            last = replace(
                last,
                resumed_at=time,
                restored_step=start,
                lost_steps=max(0, last.step_before - start),
                sources=tuple(
                    (rank.rank, rank.restored_from or RestoreSource.NONE) for rank in ranks
                ),
                replay=replay_in_words(ranks),
            )
        if last.advanced_at is None and start is not None and step > start:
            last = replace(last, advanced_at=time)
        self.all[-1] = last
        if not ongoing or last.resumed_at is None:
            return None
        story = recovery_in_words(last.status, EVENT_BYTES_MAX)
        return Event(reason=EventReason.RECOVERED, message=story)
