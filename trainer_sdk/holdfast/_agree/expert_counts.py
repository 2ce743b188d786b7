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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast._agree.exchange import Exchange
from holdfast._agree.rounds import Round, Rounds
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


class ExpertCounts:
    """One rank's part in the sums; the thread runs from `start` to `close`."""

    def __init__(self, exchange: Exchange, rank: int, ranks: int) -> None:
        together = exchange.together
        self._exchange = exchange
        self._rank, self.ranks = (rank, ranks) if together else (0, 1)
        self._rounds = Rounds("holdfast-counting", self._next, self._on_failure)
        self._number = -1
        """Number of the save that the next sum is of, or the one that failed."""
        self._add: Round | None = None
        self._called = -1
        """Number of the newest save that the training loop called."""
        self._attempted = -1
        """Number of the newest save for which it is settled whether it is attempted."""
        self._chosen: dict[int, Chosen] = {}
        """Number of a save → its choice."""
        self._late = False
        """Whether `chosen` has waited in vain and no sum has arrived since."""

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
        self.on_save_decided(first - 1)  # the first sum is of the restored state
        self._number = first - 1

        def add() -> None:
            number = self._number
            own = statement(number).to_vector(units, self._rank, self.ranks, spread)
            total = self._exchange.add(own)
            counts = AgreedCounts.from_vector(total, units, self.ranks, number, spread)
            selection = choose(counts)
            _log.debug("save %d: %s", number + 1, selection.reason)
            with self._rounds.change():
                self._number = number + 1
                self._chosen[self._number] = Chosen(counts, selection.units)
                self._chosen.pop(self._number - _KEPT, None)
                self._late = False

        self._add = add
        self._rounds.start()

    def on_save_called(self, number: int) -> None:
        """Note that save `number` was called, whether or not it was skipped. For the training
        thread."""
        with self._rounds.change():
            self._called = number

    def on_save_decided(self, number: int) -> None:
        """Note that statements from now on include whether save `number` is attempted."""
        with self._rounds.change():
            self._attempted = max(self._attempted, number)

    def wait_choice(self, number: int, wait_s: float) -> Chosen | None:
        """Choice for save `number`; None when the sum is not there within `wait_s`.

        After waiting in vain, calls do not wait again until another sum has arrived.
        """
        with self._rounds.changed:
            self._rounds.wait_for(lambda: number in self._chosen, 0.0 if self._late else wait_s)
            found = self._chosen.get(number)
            if found is None and not self._late and not self._rounds.failed:
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
        with self._rounds.changed:
            return self._rounds.failed and number > self._number + 1

    def close(self, timeout_s: float) -> None:
        """Take part in the sums of all saves that were called, within about `timeout_s`."""
        self._rounds.close(timeout_s)

    def _next(self) -> Round | None:
        """Next sum, when its save is settled: attempted or not, or followed by a later call. At the
        end the save needs only to have been called."""
        settled = max(self._attempted, self._called - (not self._rounds.closing))
        return self._add if self._number <= settled else None

    def _on_failure(self, error: Exception) -> None:
        _log.warning(
            "the ranks' counts cannot be added up; this rank captures all of its experts from now "
            "on: %s",
            error,
        )
