"""What all ranks decide about sparse windows together: their lengths, the order of experts, and
which of them gives way to a snapshot of one step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from holdfast._agree.exchange import Alone
from holdfast._agree.window_order import WindowDecisions
from holdfast_core.errors import UnreachableError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.job.snapshots import ExpertOrder, SparseWindows
from holdfast_core.snapshots.units import UnitKey, UnitKind

WAIT_S = 20.0
ORIGIN = 11
UNITS = tuple(UnitKey(0, UnitKind.EXPERT, number) for number in range(2))
FIRST, OTHER = Schedule((UNITS[:1], UNITS[1:])), Schedule((UNITS[1:], UNITS[:1]))
BY_TOKENS, FIXED = SparseWindows(window=2, order=ExpertOrder.HARD_COUNT), SparseWindows(window=2)


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
    return Gated([0, 9, 0, 9])


@pytest.fixture
def deciding(exchange: Gated) -> Iterator[WindowDecisions]:
    made = WindowDecisions(exchange, BY_TOKENS)
    made.start(ORIGIN, [FIRST], FIRST, [UNITS])
    yield made
    exchange.open.set()
    made.close(WAIT_S)


def first_step(window: int) -> int:
    """Step of the first save of a window of `FIRST`."""
    return ORIGIN + 1 + 2 * window


def end_windows(deciding: WindowDecisions, windows: int) -> None:
    """Call the saves of the first `windows` windows, and one more."""
    deciding.on_save_called(first_step(windows))


def schedule(deciding: WindowDecisions, window: int, wait_s: float = WAIT_S) -> Schedule:
    found = deciding.at(first_step(window), wait_s)
    assert found is not None
    assert (found.span.first, found.span.number, found.whole) == (first_step(window), window, False)
    return found.schedule


def test_the_order_follows_what_all_ranks_have_counted(
    deciding: WindowDecisions, exchange: Any
) -> None:
    """This rank alone would order otherwise. The sum of the 50th window is that of step 100."""
    exchange.open.set()
    for window in range(50):
        assert schedule(deciding, window + 1) == FIRST
        deciding.count({UNITS[1]: 5}, {0: 5})
        end_windows(deciding, window + 1)
    assert schedule(deciding, 51) == OTHER


def test_a_window_that_is_not_decided_yet_is_left_out(
    deciding: WindowDecisions, exchange: Any
) -> None:
    assert schedule(deciding, 0, 0.0) == schedule(deciding, 1, 0.0) == FIRST
    end_windows(deciding, 1)
    assert deciding.at(first_step(2)) is None
    exchange.open.set()
    assert schedule(deciding, 2) == FIRST


def test_a_rank_that_missed_a_sum_captures_no_later_window(
    deciding: WindowDecisions, exchange: Any
) -> None:
    """Others may have got it, and order experts otherwise."""
    exchange.fails = True
    end_windows(deciding, 1)
    exchange.open.set()
    for window in (2, 3, 60):
        assert deciding.at(first_step(window), WAIT_S) is None


@pytest.mark.parametrize(("policy", "groups"), [(BY_TOKENS, []), (FIXED, [UNITS])])
def test_without_an_order_to_lose_windows_go_on_after_a_sum_that_failed(
    policy: SparseWindows, groups: Any
) -> None:
    exchange = Gated([0])
    exchange.fails = True
    exchange.open.set()
    deciding = WindowDecisions(exchange, policy)
    deciding.start(ORIGIN, [FIRST], FIRST, groups)
    deciding.want_whole(100)
    end_windows(deciding, 70)
    assert [schedule(deciding, window) for window in (2, 70)] == [FIRST, FIRST]
    deciding.close(WAIT_S)


@pytest.mark.parametrize("own", [False, True])
def test_a_snapshot_of_one_step_that_any_rank_wants_takes_the_place_of_the_window_after_the_next(
    own: bool,
) -> None:
    exchange = Gated([int(not own)])
    exchange.open.set()
    deciding = WindowDecisions(exchange, FIXED)
    deciding.start(ORIGIN, [FIRST], FIRST, [UNITS])
    if own:
        deciding.want_whole(ORIGIN)
    end_windows(deciding, 1)
    found = [deciding.at(first_step(window), WAIT_S) for window in (1, 2)]
    assert [(one.schedule, one.whole) for one in found if one] == [(FIRST, False), (FIRST, True)]
    deciding.close(WAIT_S)


def test_one_snapshot_of_one_step_answers_all_wishes_for_one_after_an_earlier_step() -> None:
    """Windows begin with steps 12, 14, 16. The session's first save, of step 11, is whole."""
    exchange = Gated([0])
    exchange.open.set()
    deciding = WindowDecisions(exchange, FIXED)
    deciding.start(ORIGIN, [FIRST], FIRST, [UNITS])
    whole = []
    for window, wish in enumerate((10, 13, 15, 15, 16, 16, 16)):
        deciding.want_whole(wish)
        end_windows(deciding, window + 1)
        found = deciding.at(first_step(window + 2), WAIT_S)
        assert found is not None
        if found.whole:
            whole.append(found.span.first)
    assert whole == [18]
    deciding.close(WAIT_S)
