"""The thread that adds up what ranks know of their experts, one sum for each save that was called.

The sums run in the order of the saves, on a process group that nothing else uses, from the same
first save on all ranks; so the n-th sum of one rank is the n-th of every other, also when saves
were skipped. Neither training nor the saver takes part in a collective: they say how far they are,
and this thread overlaps its sum with the step. A save is chosen by the sum of the save before,
which has had a step's time.

A rank that does not have that sum in time must not choose by another one. It captures all experts
that are its own, which is what the others' choice asks of it and more: ranks that choose still
choose alike, and a rank that does not choose misses nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast._exchange import Exchange
from holdfast_core.agreed_counts import AgreedCounts, Statement
from holdfast_core.errors import HoldfastError
from holdfast_core.experts import Selection
from holdfast_core.units import UnitKey

_log = logging.getLogger("holdfast")

_KEPT = 4
"""Choices that are kept for a saver that is late; older ones are of saves that were given up."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts of a save, and the sum that they were chosen by."""

    counts: AgreedCounts
    units: tuple[UnitKey, ...]


class Counting:
    """One rank's part; the thread runs from `start` to `close`."""

    def __init__(self, exchange: Exchange, rank: int, ranks: int) -> None:
        together = exchange.together
        self._exchange = exchange
        self._rank, self.ranks = (rank, ranks) if together else (0, 1)
        self._news = threading.Condition()
        self._called = -1
        """The newest save that the training loop called."""
        self._attempted = -1
        """The newest save of which it is known whether it is attempted."""
        self._chosen: dict[int, Chosen] = {}
        """By save."""
        self._late = False
        """Nothing arrived since `chosen` waited in vain."""
        self._failed = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(
        self,
        first: int,
        units: Sequence[UnitKey],
        statement: Callable[[int], Statement],
        choose: Callable[[AgreedCounts], Selection],
    ) -> None:
        """Add up from before save `first` on, which must be equal on all ranks.

        Args:
            statement: what this rank has to say after a save; called on the thread.
            choose: what the next save captures; called on the thread.
        """
        self.attempted(first - 1)  # the first sum is of what was restored
        self._thread = threading.Thread(
            target=self._loop,
            args=(first - 1, units, statement, choose),
            name="holdfast-counting",
            daemon=True,
        )
        self._thread.start()

    def called(self, number: int) -> None:
        """Save `number` was called, skipped or not. The training thread says so."""
        with self._news:
            self._called = number
            self._news.notify_all()

    def attempted(self, number: int) -> None:
        """What is stated from now on knows whether save `number` is attempted."""
        with self._news:
            self._attempted = max(self._attempted, number)
            self._news.notify_all()

    def chosen(self, number: int, wait_s: float) -> Chosen | None:
        """What save `number` captures; None when the sum is not there within `wait_s`.

        Whoever waited in vain does not wait again before there is another sum.
        """
        with self._news:
            self._news.wait_for(
                lambda: number in self._chosen or self._failed, 0.0 if self._late else wait_s
            )
            found = self._chosen.get(number)
            if found is None and not self._late and not self._failed:
                self._late = True
                _log.warning(
                    "the counts of tokens of all ranks were not there in %.1f s: save %d of this "
                    "rank captures all of its experts",
                    wait_s,
                    number,
                )
            return found

    def close(self, timeout_s: float) -> None:
        """Take part in the sums of all saves that were called, within about `timeout_s`."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(
        self,
        number: int,
        units: Sequence[UnitKey],
        statement: Callable[[int], Statement],
        choose: Callable[[AgreedCounts], Selection],
    ) -> None:
        while self._wait_due(number):
            try:
                said = statement(number).to_vector(units, self._rank, self.ranks)
                total = self._exchange.add(said)
                counts = AgreedCounts.from_vector(total, units, self.ranks, number)
            except HoldfastError as error:
                _log.warning(
                    "the ranks' counts of tokens cannot be added up; this rank captures all of its "
                    "experts from now on: %s",
                    error,
                )
                with self._news:
                    self._failed = True
                    self._news.notify_all()
                return
            selection = choose(counts)
            number += 1
            _log.debug("save %d: %s", number, selection.reason)
            with self._news:
                self._chosen[number] = Chosen(counts, selection.units)
                self._chosen.pop(number - _KEPT, None)
                self._late = False
                self._news.notify_all()

    def _wait_due(self, number: int) -> bool:
        """Return when no more will be known of save `number`: it is attempted or not, or the
        training loop is one further. False when it will never be called."""
        with self._news:
            self._news.wait_for(
                lambda: number <= self._attempted or number < self._called or self._closing
            )
            return number <= max(self._attempted, self._called)
