"""Numbers of copies: eq. (1) of Lazarus, greedy min-max, and what fits."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.elastic_experts.allocation import allocate, least_copies
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.elastic import Allocation

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


@given(LOADS, st.integers(1, 12), st.integers(1, 8), st.integers(1, 3), st.sampled_from(Allocation))
def test_copies_fill_the_seats_and_none_has_fewer_than_the_least(
    loads: list[int], nodes: int, seats: int, min_copies: int, rule: Allocation
) -> None:
    if nodes * seats < len(loads):
        with pytest.raises(InvalidJobError, match="do not fit"):
            allocate(rule, loads, nodes, seats, min_copies)
        return
    copies = allocate(rule, loads, nodes, seats, min_copies)
    assert sum(copies) == nodes * seats
    assert min(copies) >= least_copies(len(loads), nodes, seats, min_copies)
    by_load = sorted(range(len(loads)), key=lambda e: (loads[e], e))
    if rule is Allocation.PROPORTIONAL:
        assert [copies[e] for e in by_load] == sorted(copies)


@given(LOADS, st.randoms(use_true_random=False), st.sampled_from(Allocation))
def test_an_experts_copies_do_not_depend_on_its_number(
    loads: list[int], random: object, rule: Allocation
) -> None:
    order = list(range(len(loads)))
    random.shuffle(order)  # type: ignore[attr-defined]  # random.Random
    given_first = sorted(zip(loads, allocate(rule, loads, 6, 4, 2), strict=True))
    shuffled = [loads[e] for e in order]
    assert sorted(zip(shuffled, allocate(rule, shuffled, 6, 4, 2), strict=True)) == given_first


def compositions(total: int, parts: int) -> Iterator[list[int]]:
    if parts == 1:
        yield [total]
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield [first, *rest]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(4, 10))
def test_min_max_is_the_best_of_all_allocations(loads: list[int], seats: int) -> None:
    def busiest(copies: list[int]) -> Fraction:
        return max(Fraction(t, r) for t, r in zip(loads, copies, strict=True))

    best = min(busiest(copies) for copies in compositions(seats, len(loads)))
    assert busiest(allocate(Allocation.MIN_MAX, loads, seats, 1, 1)) == best


def test_min_max_is_better_balanced_than_the_papers_rule() -> None:
    loads = [round(1_000_000 / (place + 1)) for place in range(16)]
    ideal = sum(loads) / 60
    over = {
        rule: max(
            t / r for t, r in zip(loads, allocate(rule, loads, 10, 6, 2), strict=True)
        ) / ideal
        for rule in Allocation
    }  # fmt: skip
    assert over[Allocation.MIN_MAX] < 1.25
    assert over[Allocation.PROPORTIONAL] > 1.4


def test_the_least_is_what_fits_where_two_copies_of_each_expert_do_not() -> None:
    assert least_copies(16, 5, 6, 2) == 1  # 32 copies, 30 seats
    assert least_copies(16, 10, 6, 2) == 2
    assert least_copies(2, 2, 8, 3) == 2  # a third copy would lie beside another one


def test_without_any_tokens_all_experts_count_alike() -> None:
    assert allocate(Allocation.PROPORTIONAL, [0, 0, 0], 3, 2, 1) == [2, 2, 2]
    assert allocate(Allocation.MIN_MAX, [0, 0, 0], 3, 2, 2) == [2, 2, 2]


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_nothing_is_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidJobError, match="at least 1"):
        least_copies(*numbers)


def test_less_than_nothing_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="at least 0 tokens"):
        allocate(Allocation.MIN_MAX, [1, -1], 2, 2, 1)
