"""Survival: enumeration, samples, and the examples of the paper."""

from __future__ import annotations

from itertools import combinations
from math import comb, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.elastic_experts.survival import SAMPLES, LossCases, Survival, loss_cases

SETS = st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=7), min_size=1, max_size=6)


def counted(holders: list[set[int]], nodes: int) -> tuple[int, ...]:
    return tuple(
        sum(
            any(one <= set(lost) for one in holders) for lost in combinations(range(nodes), size)
        )
        for size in range(nodes + 1)
    )  # fmt: skip


def found(cases: LossCases, holders: list[set[int]]) -> Survival:
    return cases.survival(cases.fatal(holders))


@given(SETS)
def test_a_set_is_fatal_when_it_contains_all_holders_of_something(holders: list[set[int]]) -> None:
    assert found(loss_cases(7), holders).fatal == counted(holders, 7)


@given(st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=3))
def test_groups_are_lost_with_more_nodes_than_they_bear(groups: list[set[int]]) -> None:
    cases = loss_cases(7)
    for losses in (0, 1, 2):
        pairs = [set(two) for group in groups for two in combinations(group, losses + 1)]
        fatal = cases.fatal_to_groups([sorted(group) for group in groups], losses)
        assert cases.survival(fatal).fatal == (counted(pairs, 7) if pairs else (0,) * 8)


def test_either_of_two_things_is_lost_only_with_both() -> None:
    cases = loss_cases(4)
    both = cases.fatal([{0, 1}]).both(cases.fatal([{1, 2}]))
    assert cases.survival(both).fatal == counted([{0, 1, 2}], 4)


def test_samples_agree_with_enumeration() -> None:
    """Within three standard deviations, for each number of lost nodes."""
    holders = [{0, 1}, {1, 2}, {3, 4, 5}, {6, 7, 8, 9}, {2, 6, 9}]
    sets, samples = LossCases(10), LossCases(10, listed_max=20)
    exact, sampled = found(sets, holders), found(samples, holders)
    assert exact.exact_up_to == 10
    assert sampled.cases[1] == 10
    assert sampled.exact_up_to == 1
    for lost in range(2, 9):
        assert sampled.cases[lost] == SAMPLES
        p = exact.probability(lost)
        bound = 3 * sqrt(p * (1 - p) / SAMPLES)
        assert abs(sampled.probability(lost) - p) <= bound + 1e-12
    groups = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    for losses in (1, 2):
        p = sets.survival(sets.fatal_to_groups(groups, losses)).probability(losses + 1)
        got = samples.survival(samples.fatal_to_groups(groups, losses)).probability(losses + 1)
        assert abs(got - p) <= 3 * sqrt(p * (1 - p) / SAMPLES)


def test_few_lost_nodes_of_many_are_enumerated_and_more_are_sampled() -> None:
    pairs = [{2 * at, 2 * at + 1} for at in range(32)]
    result = found(loss_cases(64), pairs)
    assert result.cases[:4] == (1, 64, comb(64, 2), comb(64, 3))
    assert result.exact_up_to == 3
    assert result.fatal[:4] == (0, 0, 32, 32 * 62)
    # 4 lost nodes of 64, no two of a pair: 64 · 62 · 60 · 58 of 64 · 63 · 62 · 61
    assert result.probability(4) == pytest.approx(60 * 58 / (63 * 61), abs=0.006)
    assert result.probability(33) == 0.0


@settings(max_examples=20)
@given(SETS)
def test_more_lost_nodes_are_never_better(holders: list[set[int]]) -> None:
    result = found(loss_cases(7), holders)
    chances = [result.probability(lost) for lost in range(8)]
    assert chances == sorted(chances, reverse=True)


def test_the_papers_figure_4() -> None:
    """4 experts on 5 nodes of which 3 are lost: plan A recovers in 5 of 10 cases, and a plan whose
    rarest expert has two copies beside all others, in 7 of 10."""
    cases = loss_cases(5)
    plan_a = [{0, 1}, {1, 2, 3}, {0, 3, 4}, {0, 1, 2, 3, 4}]
    alive = [
        {node + 1 for node in pair}
        for pair in combinations(range(5), 2)
        if all(set(pair) & one for one in plan_a)
    ]
    assert alive == [{1, 2}, {1, 3}, {1, 4}, {2, 4}, {2, 5}]
    assert found(cases, plan_a).fatal[3] == 5
    plan_b = [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    assert found(cases, plan_b).fatal[3] == 3
