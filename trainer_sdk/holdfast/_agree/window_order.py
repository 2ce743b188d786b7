"""Decisions about sparse windows that all ranks make together, once for each window: the order of
its experts by tokens, and whether its first step captures all units instead.

The tokens and requests of one window decide about the window after the next one. The decision comes
from a sum over all ranks, which is computed during the next window. All ranks compute the same sums
in the same order, so they decide alike. They must: the parts of an expert on several ranks must be
of one step, and a snapshot of one step is useful only if all ranks have it. A rank that does not
have the sum in time skips the window.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast._agree.exchange import Exchange
from holdfast._agree.rounds import Round, Rounds
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.experts.popularity import SOFT_UNIT, Popularity
from holdfast_core.experts.sparse_windows import Schedule, reordered
from holdfast_core.job.snapshots import ExpertOrder, SparseWindows
from holdfast_core.snapshots.units import UnitKey

_log = logging.getLogger("holdfast")

_KEPT = 4
"""Number of decisions to keep for a late saver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowDecision:
    """The decision about one window."""

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
        self._ended = self._decided = 0
        """Number of windows whose saves were all called, and of windows whose round is done."""
        self._decisions: dict[int, WindowDecision] = {}
        """Number of a window → the decision about it."""
        self._origin = self._newest_whole = 0
        """Step of the session's first save, and of the newest save that must capture all units."""
        self._whole_after = -1
        """A snapshot of all units in one step is requested after this step; -1 for no request."""
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

    def start(self, origin: int, schedule: Schedule, groups: Sequence[Sequence[UnitKey]]) -> None:
        """Start the rounds with `schedule`, which is equal on all ranks. The saver's thread calls
        it.

        Args:
            origin: step of the session's first save, which captures all units.
            groups: groups of experts that may exchange their places in the schedule.
        """
        self._origin = self._newest_whole = origin
        if self._popularity is not None:
            self._groups = groups
        self._units = sorted(unit for group in self._groups for unit in group)
        self._layers = sorted({unit.layer for unit in self._units}, key=str)
        if not self._units:
            self._popularity = None
        self._decisions = {window: WindowDecision(schedule=schedule) for window in (0, 1)}
        self._rounds.start()

    def on_windows_ended(self, windows: int) -> None:
        """Note that all saves of the first `windows` windows were called. The training thread
        calls it."""
        with self._rounds.change():
            self._ended = windows

    def decision(self, window: int, wait_s: float) -> WindowDecision:
        """Return the decision about a window, which is numbered from 0. The saver's thread calls
        it.

        Raises:
            SnapshotSkippedError: the window is not decided within `wait_s`.
        """
        with self._rounds.changed:
            self._rounds.wait_for(lambda: window in self._decisions, wait_s)
            decision = self._decisions.get(window)
            if decision is None and self._rounds.failed and self._popularity is None:
                decision = WindowDecision(schedule=self._schedule)
        if decision is None:
            raise SnapshotSkippedError("the ranks have not agreed in time on this window")
        return decision

    def close(self, timeout_s: float) -> None:
        """Run the rounds of all ended windows, and end, within about `timeout_s`."""
        self._rounds.close(timeout_s)

    @property
    def _schedule(self) -> Schedule:
        """Schedule of the newest decided window."""
        return self._decisions[max(self._decisions)].schedule

    def _next(self) -> Round | None:
        return self._decide if self._decided < self._ended else None

    def _decide(self) -> None:
        """Run one round: sum the requests and counts of all ranks, and decide. Collective."""
        with self._rounds.changed:
            own = [
                int(self._whole_after >= self._newest_whole),
                *(self._counts[unit] for unit in self._units),
                *(self._assigned[layer] for layer in self._layers),
            ]
            self._counts.clear()
            self._assigned.clear()
        wanted, *total = self._exchange.add(own)
        number, schedule = self._decided + 2, self._schedule
        ordered = self._reorder(schedule, total)
        if ordered != schedule:
            _log.info("window %d captures experts in another order", number)
        with self._rounds.change():
            self._decisions[number] = WindowDecision(schedule=ordered, whole=bool(wanted))
            self._decisions.pop(number - _KEPT, None)
            self._decided += 1
            if wanted:
                self._newest_whole = self._origin + number * schedule.window + 1

    def _reorder(self, schedule: Schedule, total: Sequence[int]) -> Schedule:
        """Order `schedule` by the tokens, with those of one more window."""
        if self._popularity is None:
            return schedule
        self._popularity.add(
            schedule.window,
            dict(zip(self._units, total, strict=False)),
            dict(zip(self._layers, total[len(self._units) :], strict=True)),
        )
        popularity = self._popularity.due()
        return schedule if popularity is None else reordered(schedule, self._groups, popularity)

    def _on_failure(self, error: Exception) -> None:
        lost = (
            "this rank captures no more windows until its world ends"
            if self._popularity is not None
            else "no further snapshot of this session can be persisted"
        )
        if not self._rounds.closing:
            _log.warning("the ranks cannot decide on windows together; %s: %s", lost, error)
