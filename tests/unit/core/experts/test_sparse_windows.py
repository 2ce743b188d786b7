from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.sparse_windows import (
    Operator,
    Schedule,
    cut,
    find_window,
    ordered,
    save_bytes,
    slot_bytes,
)
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.units import UnitKey, UnitKind


def expert(number: int, *, compute: int = 2, state: int = 12, share: int = 0) -> Operator:
    unit = UnitKey(0, UnitKind.EXPERT, number)
    return Operator(unit=unit, compute_bytes=compute, state_bytes=state, home=(0, share))


@st.composite
def models(draw: st.DrawFn) -> list[Operator]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 90)), min_size=1, max_size=9))
    return [expert(i, compute=c, state=c + more) for i, (c, more) in enumerate(sizes)]


def every_cut(operators: list[Operator], window: int) -> list[list[list[Operator]]]:
    """All divisions into at most `window` consecutive runs."""
    count = len(operators)
    return [
        [operators[a:b] for a, b in pairwise((0, *cuts, count))]
        for slots in range(1, min(window, count) + 1)
        for cuts in combinations(range(1, count), slots - 1)
    ]


def paper_window(count: int, state: int, compute: int, budget: int) -> int:
    """`FindWindowSize` of algorithm 1, down to one active operator."""
    active = count
    while active > 1 and state * active + compute * (count - active) > budget:
        active -= 1
    return -(-count // active)


def test_the_saves_of_the_papers_example_hold_32_28_and_24_of_72_bytes() -> None:
    operators = [expert(i) for i in range(6)]
    schedule = cut(operators, 3)
    assert [len(units) for units in schedule.slots] == [2, 2, 2]
    assert save_bytes(schedule, operators) == (32, 28, 24)
    assert sum(one.state_bytes for one in operators) == 72
    assert find_window(operators, 32) == schedule


@pytest.mark.parametrize(
    ("compute", "master", "optimizer"), [(2, 4, 8), (2, 2, 4), (1, 4, 8), (1, 2, 8), (1, 2, 3)]
)
@pytest.mark.parametrize("window", [1, 2, 3, 6])
def test_a_window_of_equal_units_adds_half_the_weights_of_its_other_steps(
    compute: int, master: int, optimizer: int, window: int
) -> None:
    """§3.2 and table 7: 12 + (W - 1) bytes for each parameter with 16-bit weights."""
    state = master + optimizer
    operators = [expert(i, compute=compute, state=state) for i in range(6)]
    equal = [operators[i : i + 6 // window] for i in range(0, 6, 6 // window)]
    assert sum(slot_bytes(equal)) == 6 * state + 3 * compute * (window - 1)


def test_the_saves_of_the_papers_example_hold_as_many_bytes_with_gradients() -> None:
    operators = [expert(i) for i in range(6)]
    schedule = cut(operators, 3, Repeats.OPTIMIZER)
    assert save_bytes(schedule, operators) == (24, 28, 32)
    assert [list(schedule.frames(units[0])) for units in schedule.slots] == [[1, 2], [2], []]


@given(models(), st.integers(1, 9))
def test_gradients_of_earlier_units_need_what_weights_of_later_ones_do(
    operators: list[Operator], window: int
) -> None:
    weights, gradients = cut(operators, window), cut(operators[::-1], window, Repeats.OPTIMIZER)
    assert [set(units) for units in gradients.slots] == [
        set(units) for units in weights.slots[::-1]
    ]
    assert save_bytes(gradients, operators) == save_bytes(weights, operators)[::-1]


@given(models(), st.integers(1, 9))
def test_a_cut_holds_each_unit_once_and_its_largest_save_is_the_least(
    operators: list[Operator], window: int
) -> None:
    schedule = cut(operators, window)
    assert [u for units in schedule.slots for u in units] == [one.unit for one in operators]
    assert all(schedule.slots)
    assert schedule.window <= window
    least = min(max(slot_bytes(runs)) for runs in every_cut(operators, window))
    assert max(save_bytes(schedule, operators)) == least


@given(models(), st.integers(0, 500))
def test_the_window_is_the_shortest_that_fits(operators: list[Operator], budget: int) -> None:
    schedule = find_window(operators, budget)
    fitting = [
        len(runs)
        for runs in every_cut(operators, len(operators))
        if max(slot_bytes(runs)) <= budget
    ]
    if fitting:
        assert schedule.window <= min(fitting)
        assert max(save_bytes(schedule, operators)) <= budget
    more = find_window(operators, budget + 50)
    assert max(save_bytes(more, operators)) >= max(save_bytes(schedule, operators)) or (
        more.window <= schedule.window
    )


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 20), st.integers(0, 900))
def test_equal_units_need_no_longer_window_than_in_algorithm_1(
    count: int, more: int, compute: int, budget: int
) -> None:
    operators = [expert(i, compute=compute, state=compute + more) for i in range(count)]
    papers = paper_window(count, compute + more, compute, budget)
    assert find_window(operators, budget).window <= papers
    if not compute:
        assert find_window(operators, budget).window == papers


def test_what_every_token_uses_comes_last_and_homes_alternate() -> None:
    rest = [
        Operator(unit=unit, compute_bytes=1, state_bytes=6)
        for unit in (
            UnitKey(None, UnitKind.HEAD),
            UnitKey(None, UnitKind.EMBEDDING),
            UnitKey(0, UnitKind.DENSE),
            UnitKey(0, UnitKind.GATE),
        )
    ]
    experts = [expert(i, share=i // 2) for i in range(4)]
    found = [str(one.unit) for one in ordered([*rest, *experts])]
    assert found == [
        *("layer0/expert0", "layer0/expert2", "layer0/expert1", "layer0/expert3"),
        *("layer0/gate", "layer0/dense", "embedding", "head"),
    ]


def test_a_unit_that_came_later_is_in_the_last_slot() -> None:
    schedule = cut([expert(0), expert(1)], 2)
    assert schedule == Schedule(((expert(0).unit,), (expert(1).unit,)))
    assert [schedule.slot(expert(i).unit) for i in range(3)] == [0, 1, 1]


def test_nothing_to_divide_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="0 units in a window of 2 steps"):
        cut([], 2)
    with pytest.raises(InvalidJobError, match="1 units in a window of 0 steps"):
        cut([expert(0)], 0)
    with pytest.raises(InvalidJobError, match="13 bytes of weights in 12 bytes of state"):
        expert(0, compute=13)
