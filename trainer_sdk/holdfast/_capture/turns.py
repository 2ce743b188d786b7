"""Choice of experts that take turns: each rank makes it alone, from the number of the save.

`_agree.expert_counts` is the other way to choose, by what all ranks state together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast._agree.expert_counts import Chosen
from holdfast_core.experts.counts import NO_COUNTS
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.pec import select_sequential, sequential_bound
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.snapshots.units import UnitKey


class Chooser(Protocol):
    """Choice of the experts of each save; see `ExpertCounts`."""

    def on_save_called(self, number: int) -> None:
        """Note that save `number` was called. For the training thread."""

    def on_save_decided(self, number: int) -> None:
        """Note that it is settled whether save `number` is attempted."""

    def wait_choice(self, number: int, wait_s: float) -> Chosen | None:
        """Choice for save `number`; None when it is not there within `wait_s`."""

    def no_rank_chooses(self, number: int) -> bool:
        """Whether no rank can have a choice for save `number`."""

    def close(self, timeout_s: float) -> None:
        """End within about `timeout_s`."""


class Turns:
    """Choice of K experts of each layer in turn (PEC §3.1), where one rank captures each expert.

    Args:
        own: experts that this rank captures.
        ledger: returns this rank's newest ledger.
    """

    def __init__(
        self,
        table: ExpertTable,
        own: frozenset[UnitKey],
        k: int,
        ledger: Callable[[], ExpertLedger],
    ) -> None:
        self._table, self._own, self._k, self._ledger = table, own, k, ledger

    def on_save_called(self, number: int) -> None:
        pass

    def on_save_decided(self, number: int) -> None:
        pass

    def wait_choice(self, number: int, wait_s: float) -> Chosen | None:
        ledger = self._ledger()
        turn = select_sequential(self._table, self._k, number, uncaptured=ledger.uncaptured)
        return Chosen(NO_COUNTS, tuple(self._overdue(ledger, number).union(turn.units)))

    def no_rank_chooses(self, number: int) -> bool:
        return False

    def close(self, timeout_s: float) -> None:
        pass

    def _overdue(self, ledger: ExpertLedger, number: int) -> set[UnitKey]:
        """Experts of this rank whose turn was in a save that it skipped. Without them, experts
        whose turn is skipped again and again would never be captured."""
        return {
            expert.unit
            for layer in self._table.layers
            for expert in layer.experts
            if expert.unit in self._own
            and (held := ledger.versions[expert.unit])
            and number - held[-1].number > sequential_bound(layer, self._k)
        }
