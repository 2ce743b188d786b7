"""Order of experts in sparse windows, by tokens that all ranks add up once for each window.

The sum of a window is made beside the next one, on a process group that nothing else uses, and
decides the order of the window after that. All ranks make the same sums in the same order, and so
use the same order in each window: parts of an expert that lie on several ranks must be of one step.
A rank that does not have the sum in time leaves the window out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from holdfast._exchange import Exchange
from holdfast._rounds import Round, Rounds
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.experts.popularity import SOFT_UNIT, Popularity
from holdfast_core.experts.sparse_windows import Schedule, reordered
from holdfast_core.job.snapshots import ExpertOrder, SparseWindows
from holdfast_core.snapshots.units import UnitKey

_log = logging.getLogger("holdfast")

_KEPT = 4
"""Schedules kept for a late saver."""


class Ordering:
    """One rank's part in the sums; the thread runs from `start` to `close`."""

    def __init__(self, exchange: Exchange, policy: SparseWindows) -> None:
        self._exchange = exchange
        self._popularity = Popularity(policy)
        self.parts = SOFT_UNIT if policy.order is ExpertOrder.SOFT_COUNT else 1
        """Parts of one in which the script's counts are added up."""
        self._rounds = Rounds("holdfast-ordering", self._next, self._failed)
        self._counts, self._assigned = Counter[UnitKey](), Counter[int | None]()
        self._ended = self._summed = 0
        """Windows whose saves were all called, and windows whose tokens are added up."""
        self._schedules: dict[int, Schedule] = {}
        """Number of a window → its schedule."""
        self._add: Round | None = None

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        """Add what this rank has counted. For the saver's thread."""
        with self._rounds.changed:
            self._counts.update(counts)
            self._assigned.update(assigned)

    def start(self, schedule: Schedule, groups: Sequence[Sequence[UnitKey]]) -> None:
        """Begin with `schedule`, in which the experts of each group may change places; equal on all
        ranks. For the saver's thread."""
        units = sorted(unit for group in groups for unit in group)
        layers = sorted({unit.layer for unit in units}, key=str)
        self._schedules = {0: schedule, 1: schedule}

        def add() -> None:
            with self._rounds.changed:
                own = [
                    *(self._counts[unit] for unit in units),
                    *(self._assigned[layer] for layer in layers),
                ]
                self._counts.clear()
                self._assigned.clear()
            total = self._exchange.add(own)
            self._popularity.add(
                schedule.window,
                dict(zip(units, total, strict=False)),
                dict(zip(layers, total[len(units) :], strict=True)),
            )
            popularity, newest = self._popularity.due(), self._summed + 1
            found = self._schedules[newest]
            if popularity is not None:
                found = reordered(found, groups, popularity)
                _log.info("window %d captures experts in another order", newest + 1)
            with self._rounds.change():
                self._schedules[newest + 1] = found
                self._schedules.pop(newest + 1 - _KEPT, None)
                self._summed = newest

        if units:
            self._add = add
        self._rounds.start()

    def ended(self, windows: int) -> None:
        """Note that all saves of the first `windows` windows were called. For the training
        thread."""
        with self._rounds.change():
            self._ended = windows

    def schedule(self, window: int, wait_s: float) -> Schedule:
        """Schedule of a window, by its number from 0. For the saver's thread.

        Raises:
            SnapshotSkippedError: it is not agreed within `wait_s`.
        """
        with self._rounds.changed:
            if self._add is None:
                return self._schedules[0]
            self._rounds.wait_for(lambda: window in self._schedules, wait_s)
            found = self._schedules.get(window)
        if found is None:
            raise SnapshotSkippedError(
                "the ranks have not agreed in time on the order of experts in this window"
            )
        return found

    def close(self, timeout_s: float) -> None:
        """Make the sums of all windows that have ended, within about `timeout_s`."""
        self._rounds.close(timeout_s)

    def _next(self) -> Round | None:
        return self._add if self._summed < self._ended else None

    def _failed(self, error: Exception) -> None:
        _log.warning(
            "the tokens of all ranks cannot be added up; this rank captures no window any more, "
            "until its world ends: %s",
            error,
        )
