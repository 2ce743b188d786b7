"""What a number of slots costs: which saves are skipped, and what a node holds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from holdfast_cli.planner.models.slots import compare_slots, skipped_saves, slots_chosen
from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.budget import NodeMemory
from holdfast_core.protection.intervals import least_interval_s


def nodes_of(slots: int) -> tuple[NodeMemory, ...]:
    return tuple(
        NodeMemory(member=member, arena_bytes=slots * (100 + member), parity_bytes=60)
        for member in range(2)
    )


@pytest.mark.parametrize("slots", [2, 3])
def test_no_save_is_skipped_that_comes_after_the_one_before_is_protected(slots: int) -> None:
    assert skipped_saves(10.0, 4.0, 6.0, slots=slots) == 0


def test_with_two_slots_a_save_waits_for_copy_and_protection_and_with_three_for_protection() -> (
    None
):
    assert skipped_saves(10.0, 4.0, 9.0, slots=3) == 0
    assert skipped_saves(10.0, 4.0, 9.0, slots=2) == 0.5
    assert skipped_saves(1.0, 0.1, 2.5, slots=2) == pytest.approx(2 / 3, abs=0.01)
    assert skipped_saves(1.0, 0.1, 2.5, slots=3) == pytest.approx(0.6, abs=0.01)


def test_a_save_is_skipped_while_the_one_before_is_being_copied() -> None:
    assert skipped_saves(1.0, 3.0, 0.0, slots=3) == pytest.approx(2 / 3, abs=0.01)


def test_slower_protection_skips_no_fewer_saves() -> None:
    for slots in (2, 3):
        portions = [skipped_saves(1.0, 0.3, tenths / 10, slots=slots) for tenths in range(60)]
        assert all(less <= more + 0.002 for less, more in pairwise(portions))


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize(("copy_s", "protect_s"), [(0.5, 4.0), (4.0, 0.5), (2.0, 2.0), (3.0, 0.0)])
def test_the_least_interval_is_the_shortest_that_skips_nothing(
    slots: int, copy_s: float, protect_s: float
) -> None:
    least_s = least_interval_s(copy_s=copy_s, protect_s=protect_s, slots=slots)
    assert skipped_saves(least_s, copy_s, protect_s, slots=slots) == 0
    assert skipped_saves(least_s * 63 / 64, copy_s, protect_s, slots=slots) > 0


def test_where_the_interval_depends_on_the_slots_each_number_has_its_own() -> None:
    def least_s(slots: int) -> float:
        return least_interval_s(copy_s=4.0, protect_s=9.0, slots=slots)

    costs = compare_slots(nodes_of, interval_of=least_s, copy_s=4.0, protect_s=9.0)
    assert [cost.skipped for cost in costs] == [0, 0]


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidJobError, match=r"interval_s=0.0: an interval"):
        skipped_saves(0.0, 1.0, 1.0, slots=2)


def test_both_numbers_are_compared_on_the_node_that_needs_most() -> None:
    three, two = compare_slots(nodes_of, interval_of=lambda slots: 10.0, copy_s=4.0, protect_s=9.0)
    assert (three.slots, three.memory.total_bytes, three.skipped) == (3, 363, 0)
    assert (two.slots, two.memory.total_bytes, two.skipped) == (2, 262, 0.5)
    assert two.memory.settled_bytes == 232
    assert (two.interval_s, two.bytes_without_weights) == (10.0, round(262 * 12 / 14))


def test_three_slots_are_chosen_where_they_fit_the_limit() -> None:
    assert [slots_chosen((3, 2), nodes_of, limit) for limit in (None, 363, 362, 1)] == [3, 3, 2, 2]
    assert slots_chosen((2,), nodes_of, None) == 2


@pytest.mark.parametrize("interval_s", [0.5, 1.1, 2.5, 3.5, 5.0])
def test_more_than_three_slots_hardly_change_how_many_saves_are_skipped(interval_s: float) -> None:
    """A queue of snapshots that wait for protection is full, or empty, whatever its length."""
    three, eight = (skipped_saves(interval_s, 1.0, 3.0, slots=slots) for slots in (3, 8))
    assert 0 <= three - eight < 0.03
