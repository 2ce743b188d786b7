"""The order of experts in sparse windows, which all ranks must have agreed on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from holdfast._exchange import Alone
from holdfast._experts.ordering import Ordering
from holdfast_core.errors import SnapshotSkippedError, UnreachableError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.job.snapshots import ExpertOrder, SparseWindows
from holdfast_core.snapshots.units import UnitKey, UnitKind

WAIT_S = 20.0
UNITS = tuple(UnitKey(0, UnitKind.EXPERT, number) for number in range(2))
FIRST, OTHER = Schedule((UNITS[:1], UNITS[1:])), Schedule((UNITS[1:], UNITS[:1]))
POLICY = SparseWindows(window=2, order=ExpertOrder.HARD_COUNT)


class Gated(Alone):
    """Exchange with a rank that always adds the same, and does not always come."""

    def __init__(self, other: Sequence[int]) -> None:
        self._other = other
        self.open = threading.Event()
        self.fails = False

    def add(self, numbers: Sequence[int]) -> list[int]:
        self.open.wait(WAIT_S)
        if self.fails:
            raise UnreachableError("a rank does not take part")
        return [a + b for a, b in zip(numbers, self._other, strict=True)]


@pytest.fixture
def exchange() -> Gated:
    return Gated([9, 0, 9])


@pytest.fixture
def ordering(exchange: Gated) -> Iterator[Ordering]:
    made = Ordering(exchange, POLICY)
    made.start(FIRST, [UNITS])
    yield made
    exchange.open.set()
    made.close(WAIT_S)


def test_the_order_follows_what_all_ranks_have_counted(ordering: Ordering, exchange: Any) -> None:
    """This rank alone would order otherwise. The sum of the 50th window is that of step 100."""
    exchange.open.set()
    for window in range(50):
        assert ordering.schedule(window + 1, WAIT_S) == FIRST
        ordering.count({UNITS[1]: 5}, {0: 5})
        ordering.ended(window + 1)
    assert ordering.schedule(51, WAIT_S) == OTHER


def test_a_window_whose_order_is_not_agreed_yet_is_left_out(
    ordering: Ordering, exchange: Any
) -> None:
    assert ordering.schedule(0, 0.0) == ordering.schedule(1, 0.0) == FIRST
    ordering.ended(1)
    with pytest.raises(SnapshotSkippedError, match="have not agreed in time on the order"):
        ordering.schedule(2, 0.0)
    exchange.open.set()
    assert ordering.schedule(2, WAIT_S) == FIRST


def test_a_rank_that_missed_a_sum_captures_no_later_window(
    ordering: Ordering, exchange: Any
) -> None:
    """Others may have got it, and order experts otherwise."""
    exchange.fails = True
    ordering.ended(1)
    exchange.open.set()
    for window in (2, 3, 60):
        with pytest.raises(SnapshotSkippedError):
            ordering.schedule(window, WAIT_S)


def test_experts_that_cannot_change_places_need_no_sums(exchange: Any) -> None:
    ordering = Ordering(exchange, POLICY)
    ordering.start(FIRST, [])
    ordering.ended(70)
    assert ordering.schedule(70, 0.0) == FIRST
    ordering.close(WAIT_S)
