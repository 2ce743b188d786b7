"""Decisions on sparse windows that all ranks make together, once for each window: the order of its
experts, by tokens, and whether all units are captured in its first step instead.

What a window's tokens and wishes lead to is decided beside the next one, for the window after that,
by a sum over all ranks. All ranks make the same sums in the same order, and so decide alike: parts
of an expert that lie on several ranks must be of one step, and a snapshot of one step is of use
only if all ranks have it. A rank that does not have the sum in time leaves the window out.
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
"""Decisions kept for a late saver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowDecision:
    """What a window captures."""

    schedule: Schedule
    whole: bool = False
    """Whether its first save captures the state of all units instead, and the others nothing."""


class WindowDecisions:
    """One rank's part in the decisions; the thread runs from `start` to `close`.

    Args:
        exchange: exchange between all ranks, used for nothing else.
    """

    def __init__(self, exchange: Exchange, policy: SparseWindows) -> None:
        self._exchange = exchange
        self._popularity = Popularity(policy) if policy.counts_tokens else None
        self.parts = SOFT_UNIT if policy.order is ExpertOrder.SOFT_COUNT else 1
        """Parts of one in which the script's counts are added up."""
        self._rounds = Rounds("holdfast-windows", self._next, self._on_failure)
        self._counts, self._assigned = Counter[UnitKey](), Counter[int | None]()
        self._ended = self._decided = 0
        """Windows whose saves were all called, and windows whose round is made."""
        self._decisions: dict[int, WindowDecision] = {}
        """Number of a window → what it captures."""
        self._origin = self._newest_whole = 0
        """Step of the session's first save, and of the newest one that is to capture all units."""
        self._whole_after = -1
        """A snapshot of all units in one step is wanted after this one."""
        self._groups: Sequence[Sequence[UnitKey]] = ()
        self._units: Sequence[UnitKey] = ()
        self._layers: Sequence[int | None] = ()

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        """Add what this rank has counted. For the saver's thread."""
        with self._rounds.changed:
            self._counts.update(counts)
            self._assigned.update(assigned)

    def want_whole(self, after: int) -> None:
        """Ask that all units be captured in one step after step `after`. Any thread."""
        with self._rounds.changed:
            self._whole_after = max(self._whole_after, after)

    def start(self, origin: int, schedule: Schedule, groups: Sequence[Sequence[UnitKey]]) -> None:
        """Begin with `schedule`, in which the experts of each group may change places; equal on all
        ranks. For the saver's thread.

        Args:
            origin: step of the session's first save, which captures all units.
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
        """Note that all saves of the first `windows` windows were called. For the training
        thread."""
        with self._rounds.change():
            self._ended = windows

    def decision(self, window: int, wait_s: float) -> WindowDecision:
        """What a window captures, by its number from 0. For the saver's thread.

        Raises:
            SnapshotSkippedError: it is not decided within `wait_s`.
        """
        with self._rounds.changed:
            self._rounds.wait_for(lambda: window in self._decisions, wait_s)
            found = self._decisions.get(window)
            if found is None and self._rounds.failed and self._popularity is None:
                found = WindowDecision(schedule=self._schedule)
        if found is None:
            raise SnapshotSkippedError("the ranks have not agreed in time on this window")
        return found

    def close(self, timeout_s: float) -> None:
        """Make the rounds of all windows that have ended, within about `timeout_s`."""
        self._rounds.close(timeout_s)

    @property
    def _schedule(self) -> Schedule:
        """Schedule of the newest window that is decided."""
        return self._decisions[max(self._decisions)].schedule

    def _next(self) -> Round | None:
        return self._decide if self._decided < self._ended else None

    def _decide(self) -> None:
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
        """`schedule` in the order that follows from the tokens of one more window."""
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
            "this rank captures no window any more, until its world ends"
            if self._popularity is not None
            else "nothing more of this session can be persisted"
        )
        if not self._rounds.closing:
            _log.warning("the ranks cannot decide on windows together; %s: %s", lost, error)
