from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.experts.popularity import (
    Popularity,
    by_capacity,
    decayed,
    frequencies,
    reorder_due,
)
from holdfast_core.experts.sparse_windows import (
    Operator,
    Schedule,
    alike,
    cut,
    ordered,
    reordered,
    room_for_any_order,
    save_bytes,
)
from holdfast_core.job.snapshots import ExpertOrder, SparseWindows
from holdfast_core.snapshots.units import UnitKey, UnitKind


def unit(number: int, layer: int = 0) -> UnitKey:
    return UnitKey(layer, UnitKind.EXPERT, number)


def counts(*numbers: int, layer: int = 0) -> dict[UnitKey, int]:
    return {unit(i, layer): n for i, n in enumerate(numbers)}


def shares(*numbers: float) -> dict[UnitKey, float]:
    return {unit(i): n for i, n in enumerate(numbers)}


# --- when another order is due --------------------------------------------------------------------


def test_frequencies_are_shares_of_a_layer() -> None:
    both = {**counts(3, 1), **counts(0, 0, layer=1)}
    assert frequencies(both) == {**shares(0.75, 0.25), unit(0, 1): 0, unit(1, 1): 0}


@pytest.mark.parametrize(
    ("now", "due"),
    [
        (shares(10.0, 10.0, 10.0, 10.0), False),
        (shares(11.0, 10.0, 10.0, 10.0), False),  # by 10 % exactly
        (shares(11.1, 10.0, 10.0, 10.0), True),  # a quarter of the experts
        (shares(8.9, 10.0, 10.0, 10.0), True),
        (shares(11.1, 10.0, 10.0, 10.0, 10.0), False),  # a fifth
        (shares(11.1, 8.0, 10.0, 10.0, 10.0), True),
    ],
)
def test_an_order_is_due_when_a_quarter_of_the_experts_has_changed_by_a_tenth(
    now: Mapping[UnitKey, float], due: bool
) -> None:
    then = dict.fromkeys(now, 10.0)
    assert reorder_due(now, then) is due


def test_an_expert_that_was_not_used_has_changed_once_it_is() -> None:
    assert reorder_due(shares(0.5, 0.5), shares(0.0, 1.0))
    assert not reorder_due(shares(0.0, 1.0), shares(0.0, 1.0))


def test_there_is_no_order_before_a_hundred_steps() -> None:
    popularity = Popularity(ExpertOrder.HARD_COUNT)
    for _ in range(24):
        popularity.add(4, counts(5, 1), {0: 6})
        assert popularity.due() is None
    popularity.add(4, counts(5, 1), {0: 6})
    assert popularity.due() == counts(125, 25)
    popularity.add(4, counts(5, 1), {0: 6})
    assert popularity.due() is None  # nothing has changed


def test_only_the_newest_hundred_steps_count() -> None:
    popularity = Popularity(ExpertOrder.HARD_COUNT)
    popularity.add(50, counts(1000, 0), {})
    popularity.add(60, counts(0, 7), {})
    assert popularity.due() == counts(1000, 7)
    popularity.add(40, counts(0, 3), {})
    assert popularity.due() == counts(0, 10)


# --- what experts are ordered by ------------------------------------------------------------------


def test_older_windows_count_less() -> None:
    policy = SparseWindows(order=ExpertOrder.TIME_DECAYED, decay=0.5)
    popularity = Popularity(policy.order, policy.decay)
    popularity.add(50, counts(80, 0), {})
    popularity.add(50, counts(0, 80), {})
    assert popularity.due() == shares(20.0, 40.0)
    assert decayed({}, counts(8), 0.75) == shares(2.0)


def test_capacity_makes_layers_comparable() -> None:
    tokens = {**counts(30, 10), **counts(30, 10, 0, 0, layer=1)}
    assert by_capacity(tokens, {0: 80, 1: 80}) == {
        **shares(0.75, 0.25),
        unit(0, 1): 1.5,
        unit(1, 1): 0.5,
        unit(2, 1): 0,
        unit(3, 1): 0,
    }
    popularity = Popularity(ExpertOrder.CAPACITY_AWARE)
    popularity.add(100, counts(30, 10), {0: 80})
    assert popularity.due() == shares(0.75, 0.25)


# --- which slots they get -------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> list[Operator]:
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2))
    found = draw(st.lists(sizes, min_size=1, max_size=8))
    experts = [
        Operator(unit=unit(i), compute_bytes=c, state_bytes=c + more, home=(0, home))
        for i, (c, more, home) in enumerate(found)
    ]
    gate = UnitKey(0, UnitKind.GATE)
    return [*experts, Operator(unit=gate, compute_bytes=1, state_bytes=draw(st.integers(1, 9)))]


@settings(max_examples=60)
@given(operators=models(), window=st.integers(1, 5), data=st.data())
def test_another_order_changes_the_bytes_of_no_save(
    operators: list[Operator], window: int, data: st.DataObject
) -> None:
    schedule, groups = cut(ordered(operators), window), alike(operators)
    used = {one.unit: data.draw(st.integers(0, 3)) for one in operators}
    found = reordered(schedule, groups, used)
    assert save_bytes(found, operators) == save_bytes(schedule, operators)
    assert sorted(found.slot_of) == sorted(schedule.slot_of)
    fixed = {one.unit for one in operators}.difference(*groups)
    assert all(found.slot(one) == schedule.slot(one) for one in fixed)
    for units in groups:
        by_use = sorted(units, key=lambda one: (used[one], one))
        slots = [found.slot(one) for one in by_use]
        assert slots == sorted(slots) == sorted(schedule.slot(one) for one in units)


@settings(max_examples=60)
@given(data=st.data())
def test_there_is_room_for_every_order(data: st.DataObject) -> None:
    units = [unit(i) for i in range(5)]
    nbytes = {one: data.draw(st.integers(0, 4)) for one in units[1:]}  # another rank captures one
    slot_of = [data.draw(st.integers(0, 2)) for _ in units]
    schedule = Schedule(
        tuple(tuple(u for u, s in zip(units, slot_of, strict=True) if s == k) for k in range(3))
    )
    group = units[:4]
    rooms = []
    for order in permutations(group):
        found = reordered(schedule, [group], {one: i for i, one in enumerate(order)})
        rooms.append(sum(found.slot(one) * size for one, size in nbytes.items()))
    assert room_for_any_order(schedule, [group], nbytes) == max(rooms)
