"""Decisions about sparse windows that all ranks make together, once for each window: its length,
the order of its experts by tokens, and whether its first step captures all units instead.

The measures, tokens and requests of one window decide about the window after the next one. The
decision comes from a sum over all ranks, which is computed during the next window. All ranks
compute the same sums in the same order, so they decide alike. They must: the parts of an expert on
several ranks must be of one step, a window is complete only if all ranks have the same saves of it,
and a snapshot of one step is useful only if all ranks have it. A rank that does not have the sum in
time skips the window.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast._agree.exchange import Exchange
from holdfast._agree.rounds import Round, Rounds
from holdfast_core.experts.popularity import SOFT_UNIT, Popularity
from holdfast_core.experts.sparse_windows import Schedule, reordered
from holdfast_core.experts.window_lengths import WindowGrid, WindowSpan, agreed_length
from holdfast_core.job.snapshots import ExpertOrder, SparseWindows
from holdfast_core.snapshots.units import UnitKey

_log = logging.getLogger("holdfast")

_KEPT = 4
"""Number of decisions to keep for a late saver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowDecision:
    """The decision about one window."""

    span: WindowSpan
    schedule: Schedule
    whole: bool = False
    """Whether the first save of the window captures the state of all units, and the others
    nothing."""


class WindowDecisions:
    """One rank's part in the decisions. The thread runs from `start` to `close`.

    Args:
        exchange: exchange between all ranks that is used for nothing else.
    """

    def __init__(self, exchange: Exchange, policy: SparseWindows) -> None:
        self._exchange = exchange
        self._popularity = Popularity(policy.order, policy.decay) if policy.counts_tokens else None
        self.parts = SOFT_UNIT if policy.order is ExpertOrder.SOFT_COUNT else 1
        """Fraction of a token (1/parts) in which the script's counts are summed."""
        self._rounds = Rounds("holdfast-windows", self._next, self._on_failure)
        self._counts, self._assigned = Counter[UnitKey](), Counter[int | None]()
        self._called = -1
        """Newest step whose save was called."""
        self._decided = 0
        """Number of windows whose round is done."""
        self._grid = WindowGrid(0)
        self._decisions: dict[int, WindowDecision] = {}
        """Number of a window → the decision about it."""
        self._newest_whole = 0
        """Step of the newest save that must capture all units."""
        self._whole_after = -1
        """A snapshot of all units in one step is requested after this step; -1 for no request."""
        self._schedules: Sequence[Schedule] = ()
        self._length = 0
        """Index in `_schedules` of the length of the newest decided window."""
        self._order: Mapping[UnitKey, float] | None = None
        """What that window's experts are ordered by; None for the fixed order."""
        self._state_lengths: Callable[[], Sequence[int]] = list
        self._groups: Sequence[Sequence[UnitKey]] = ()
        self._units: Sequence[UnitKey] = ()
        self._layers: Sequence[int | None] = ()

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        """Add this rank's counts of tokens. The saver's thread calls it."""
        with self._rounds.changed:
            self._counts.update(counts)
            self._assigned.update(assigned)

    def want_whole(self, after: int) -> None:
        """Request that all units are captured in one step after step `after`. Any thread."""
        with self._rounds.changed:
            self._whole_after = max(self._whole_after, after)

    def start(
        self,
        origin: int,
        schedules: Sequence[Schedule],
        first: Schedule,
        groups: Sequence[Sequence[UnitKey]],
        state_lengths: Callable[[], Sequence[int]] = list,
    ) -> None:
        """Start the rounds with `first`, which is one of `schedules`. Called once, with the same
        arguments on all ranks, when the schedules are agreed and the first save is called.

        Args:
            origin: step of the session's first save, which captures all units.
            schedules: one for each length that windows may have.
            groups: groups of experts that may exchange their places in a schedule.
            state_lengths: returns this rank's statement about the lengths of `schedules`; see
                `window_lengths.statement`. The thread of the rounds calls it.
        """
        with self._rounds.change():
            self._newest_whole, self._grid = origin, WindowGrid(origin)
            self._schedules, self._length = schedules, schedules.index(first)
            if self._adapts:
                self._state_lengths = state_lengths
            if self._popularity is not None:
                self._groups = groups
            self._units = sorted(unit for group in self._groups for unit in group)
            self._layers = sorted({unit.layer for unit in self._units}, key=str)
            if not self._units:
                self._popularity = None
            for _ in range(2):
                self._add(whole=False)
        self._rounds.start()

    def on_save_called(self, step: int) -> None:
        """Note that the save of `step` was called. The training thread calls it."""
        with self._rounds.change():
            self._called = step

    def at(self, step: int, wait_s: float = 0.0) -> WindowDecision | None:
        """The decision about the window of the save of `step`, if it is made within `wait_s`. Only
        a window's first save waits. Any thread.

        The windows of a session lie on a grid of steps that begins after its first save. How it
        goes on after a window is decided together with the length of the next one.
        """
        with self._rounds.changed:
            if step == self._grid.next_first:
                self._rounds.wait_for(lambda: step < self._grid.next_first, wait_s)
            while self._goes_on_alone and step >= self._grid.next_first:
                self._add(whole=False)
            span = self._grid.at(step)
            return None if span is None else self._decisions.get(span.number)

    def close(self, timeout_s: float) -> None:
        """Run the rounds of all ended windows, and end, within about `timeout_s`."""
        self._rounds.close(timeout_s)

    @property
    def _adapts(self) -> bool:
        """Whether windows may have different lengths."""
        return len(self._schedules) > 1

    @property
    def _goes_on_alone(self) -> bool:
        """Whether windows go on although ranks can no longer decide about them: as there is only
        one way for it."""
        return self._rounds.failed and self._popularity is None and not self._adapts

    @property
    def _ended(self) -> int:
        """Number of windows whose saves were all called."""
        return self._grid.ended_before(self._called)

    def _add(self, *, whole: bool) -> WindowDecision:
        """Add the decision about the next window: it has the newest length and order."""
        schedule = self._schedules[self._length]
        if self._order is not None:
            schedule = reordered(schedule, self._groups, self._order)
        span = self._grid.add(schedule.window)
        decision = WindowDecision(span=span, schedule=schedule, whole=whole)
        self._decisions[span.number] = decision
        self._decisions.pop(span.number - _KEPT, None)
        return decision

    def _next(self) -> Round | None:
        return self._decide if self._decided < self._ended else None

    def _decide(self) -> None:
        """Run one round: sum the measures, requests and counts of all ranks, and decide.
        Collective."""
        lengths = [*self._state_lengths()]
        with self._rounds.changed:
            own = [
                int(self._whole_after >= self._newest_whole),
                *lengths,
                *(self._counts[unit] for unit in self._units),
                *(self._assigned[layer] for layer in self._layers),
            ]
            self._counts.clear()
            self._assigned.clear()
        wanted, *total = self._exchange.add(own)
        # The sum is of the window that has ended; the newest decided one is the next.
        measured, newest = self._decisions[self._decided], self._decisions[self._decided + 1]
        with self._rounds.change():
            if self._adapts and measured.span.steps == newest.span.steps:
                self._length = agreed_length(total[: len(lengths)], self._length)
            self._count_order(measured.span.steps, total[len(lengths) :])
            decision = self._add(whole=bool(wanted))
            self._decided += 1
            if wanted:
                self._newest_whole = decision.span.first
        if decision.span.steps != newest.span.steps:
            _log.info(
                "windows have %d steps from step %d on, as measured",
                decision.span.steps,
                decision.span.first,
            )
        elif decision.schedule != newest.schedule:
            _log.info("window %d captures experts in another order", decision.span.number)

    def _count_order(self, steps: int, total: Sequence[int]) -> None:
        """Add the tokens of a window of `steps`, and find the order that is due."""
        if self._popularity is None:
            return
        self._popularity.add(
            steps,
            dict(zip(self._units, total, strict=False)),
            dict(zip(self._layers, total[len(self._units) :], strict=True)),
        )
        due = self._popularity.due()
        self._order = self._order if due is None else due

    def _on_failure(self, error: Exception) -> None:
        lost = (
            "this rank captures no more windows until its world ends"
            if not self._goes_on_alone
            else "no further snapshot of this session can be persisted"
        )
        if not self._rounds.closing:
            _log.warning("the ranks cannot decide on windows together; %s: %s", lost, error)
