"""Thread that adds up the ranks' statements on their experts, one sum for each called save.

The sums run in the order of the saves, on a process group that nothing else uses, from the same
first save on all ranks, so the n-th sum of one rank is the n-th of every other, even when saves are
skipped. Neither training nor the saver takes part in a collective: they only report their progress,
and this thread overlaps its sum with the step. The experts of a save are chosen by the sum of the
save before, which has had a step's time.

A rank that does not have that sum in time must not choose by another one. It captures all of its
experts, which includes those that the other ranks' choice requires of it: ranks that choose still
choose alike, and a rank that does not choose misses nothing. Where experts are spread over ranks,
that would mix parts of different steps, so a rank skips such a save, unless no rank can have chosen
for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast._exchange import Exchange
from holdfast_core.errors import HoldfastError
from holdfast_core.experts.counts import NONE_SPREAD, AgreedCounts, CountStatement
from holdfast_core.experts.tables import Selection
from holdfast_core.snapshots.units import UnitKey

_log = logging.getLogger("holdfast")

_KEPT = 4
"""Number of choices kept for a late saver; older ones belong to saves that were given up."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Experts chosen for a save, and the sum by which they were chosen."""

    counts: AgreedCounts
    units: tuple[UnitKey, ...]


class Counting:
    """One rank's part in the sums; the thread runs from `start` to `close`."""

    def __init__(self, exchange: Exchange, rank: int, ranks: int) -> None:
        together = exchange.together
        self._exchange = exchange
        self._rank, self.ranks = (rank, ranks) if together else (0, 1)
        self._changed = threading.Condition()
        self._called = -1
        """Number of the newest save that the training loop called."""
        self._attempted = -1
        """Number of the newest save for which it is settled whether it is attempted."""
        self._chosen: dict[int, Chosen] = {}
        """Number of a save → its choice."""
        self._late = False
        """Whether `chosen` has waited in vain and no sum has arrived since."""
        self._failed: int | None = None
        """Number of the save after which the sum failed; no sums follow. None before that."""
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(
        self,
        first: int,
        units: Sequence[UnitKey],
        statement: Callable[[int], CountStatement],
        choose: Callable[[AgreedCounts], Selection],
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> None:
        """Start the sums, the first of them before save `first`, which must be equal on all ranks.

        Args:
            statement: makes this rank's statement after a save; called on the thread.
            choose: selects the experts of the next save; called on the thread.
            spread: see `CountStatement.to_vector`.
        """
        self.attempted(first - 1)  # the first sum is of the restored state
        self._thread = threading.Thread(
            target=self._loop,
            args=(first - 1, units, statement, choose, spread),
            name="holdfast-counting",
            daemon=True,
        )
        self._thread.start()

    def called(self, number: int) -> None:
        """Note that save `number` was called, whether or not it was skipped. For the training
        thread."""
        with self._changed:
            self._called = number
            self._changed.notify_all()

    def attempted(self, number: int) -> None:
        """Note that statements from now on include whether save `number` is attempted."""
        with self._changed:
            self._attempted = max(self._attempted, number)
            self._changed.notify_all()

    def chosen(self, number: int, wait_s: float) -> Chosen | None:
        """Choice for save `number`; None when the sum is not there within `wait_s`.

        After waiting in vain, calls do not wait again until another sum has arrived.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._chosen or self._failed is not None,
                0.0 if self._late else wait_s,
            )
            found = self._chosen.get(number)
            if found is None and not self._late and self._failed is None:
                self._late = True
                _log.warning(
                    "the counts of all ranks did not arrive within %.1f s: save %d of this rank "
                    "does without the common choice",
                    wait_s,
                    number,
                )
            return found

    def no_rank_chooses(self, number: int) -> bool:
        """Whether no rank can have a choice for save `number`.

        Another rank may have one for the save right after the sum that failed here, because the
        same sum may have succeeded there. This rank took part in no later sum, so none of those can
        succeed.
        """
        with self._changed:
            return self._failed is not None and number > self._failed + 1

    def close(self, timeout_s: float) -> None:
        """Take part in the sums of all saves that were called, within about `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(
        self,
        number: int,
        units: Sequence[UnitKey],
        statement: Callable[[int], CountStatement],
        choose: Callable[[AgreedCounts], Selection],
        spread: Mapping[UnitKey, int],
    ) -> None:
        while self._wait_due(number):
            try:
                own = statement(number).to_vector(units, self._rank, self.ranks, spread)
                total = self._exchange.add(own)
                counts = AgreedCounts.from_vector(total, units, self.ranks, number, spread)
            except HoldfastError as error:
                _log.warning(
                    "the ranks' counts cannot be added up; this rank captures all of its experts "
                    "from now on: %s",
                    error,
                )
                with self._changed:
                    self._failed = number
                    self._changed.notify_all()
                return
            selection = choose(counts)
            number += 1
            _log.debug("save %d: %s", number, selection.reason)
            with self._changed:
                self._chosen[number] = Chosen(counts, selection.units)
                self._chosen.pop(number - _KEPT, None)
                self._late = False
                self._changed.notify_all()

    def _wait_due(self, number: int) -> bool:
        """Return when save `number` is settled: attempted or not, or followed by a later call.
        False when it will never be called."""
        with self._changed:
            self._changed.wait_for(
                lambda: number <= self._attempted or number < self._called or self._closing
            )
            return number <= max(self._attempted, self._called)
