"""A thread that sums the statements of all ranks about their experts, once for each called save.

The sums follow the order of the saves, on a process group that nothing else uses, and start with
the same save on all ranks. So the n-th sum of one rank is the n-th sum of every other rank, even if
saves are skipped. Neither training nor the saver takes part in a collective. They only report their
progress, and this thread computes its sum while the step runs. The sum after one save chooses the
experts of the next save, so it has a step's time.

If a rank does not have that sum in time, it must not choose by another one. It captures all of its
experts, which include those that the choice of the other ranks requires. So ranks that choose still
choose alike, and a rank that does not choose misses nothing. But if experts are spread over ranks,
that would mix parts of different steps. Then the rank skips the save, unless no rank can have
chosen for it.
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
"""Number of choices to keep for a late saver. Older choices belong to abandoned saves."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts chosen for a save, and the sum by which they were chosen."""

    counts: AgreedCounts
    units: tuple[UnitKey, ...]


class ExpertCounts:
    """One rank's part in the sums. The thread runs from `start` to `close`."""

    def __init__(self, exchange: Exchange, rank: int, ranks: int) -> None:
        together = exchange.together
        self._exchange = exchange
        self._rank, self.ranks = (rank, ranks) if together else (0, 1)
        self._rounds = Rounds("holdfast-counting", self._next, self._on_failure)
        self._number = -1
        """Number of the save whose sum is next, or whose sum has failed."""
        self._add: Round | None = None
        self._called = -1
        """Number of the newest save that the training loop called."""
        self._attempted = -1
        """Number of the newest save for which it is settled whether it is attempted."""
        self._chosen: dict[int, Chosen] = {}
        """Number of a save → its choice."""
        self._late = False
        """Whether `wait_choice` has timed out, and no sum has arrived since."""

    def start(
        self,
        first: int,
        units: Sequence[UnitKey],
        statement: Callable[[int], CountStatement],
        choose: Callable[[AgreedCounts], Selection],
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> None:
        """Start the sums. The first one comes before save `first`, which must be equal on all
        ranks.

        Args:
            statement: makes this rank's statement after a save. Called on the thread.
            choose: selects the experts of the next save. Called on the thread.
            spread: see `CountStatement.to_vector`.
        """
        self.on_save_decided(first - 1)  # The first sum describes the restored state.
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
        """Note that save `number` was called, whether or not it was skipped. The training thread
        calls it."""
        with self._rounds.change():
            self._called = number

    def on_save_decided(self, number: int) -> None:
        """Note that it is decided whether save `number` is attempted: statements include that from
        now on."""
        with self._rounds.change():
            self._attempted = max(self._attempted, number)

    def wait_choice(self, number: int, wait_s: float) -> Chosen | None:
        """Return the choice for save `number`; None if its sum does not arrive within `wait_s`.

        After a timeout, calls do not wait again until another sum has arrived.
        """
        with self._rounds.changed:
            self._rounds.wait_for(lambda: number in self._chosen, 0.0 if self._late else wait_s)
            choice = self._chosen.get(number)
            if choice is None and not self._late and not self._rounds.failed:
                self._late = True
                _log.warning(
                    "the counts of all ranks did not arrive within %.1f s: save %d of this rank "
                    "does without the common choice",
                    wait_s,
                    number,
                )
            return choice

    def no_rank_chooses(self, number: int) -> bool:
        """Whether no rank can have a choice for save `number`.

        If a sum failed here, it may have succeeded on another rank, which then has a choice for the
        save that follows. This rank takes part in no later sum, so none of those can succeed.
        """
        with self._rounds.changed:
            return self._rounds.failed and number > self._number + 1

    def close(self, timeout_s: float) -> None:
        """Take part in the sums of all saves that were called, within about `timeout_s`."""
        self._rounds.close(timeout_s)

    def _next(self) -> Round | None:
        """Return the next sum, once it is decided whether its save is attempted, or a later save
        was called. At the end it is enough that the save was called."""
        settled = max(self._attempted, self._called - (not self._rounds.closing))
        return self._add if self._number <= settled else None

    def _on_failure(self, error: Exception) -> None:
        _log.warning(
            "the ranks' counts cannot be added up; this rank captures all of its experts from now "
            "on: %s",
            error,
        )
