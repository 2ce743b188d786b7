"""Placements of one layer, against all placements that there are."""

from __future__ import annotations

import random
from math import comb

import numpy as np
import pytest
from all_placements import SHAPES, copy_counts, fatal_by_size, placements
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.elastic_experts.allocation import allocate, least_copies
from holdfast_core.elastic_experts.placement import (
    Counts,
    climb,
    fatal_sets,
    groups_of,
    place_groups,
    repair,
    spread,
)
from holdfast_core.job.elastic import Allocation

EXCHANGES = 20_000


def mro(copies: tuple[int, ...], nodes: int, seats: int) -> tuple[Counts, bool]:
    groups = groups_of(copies, nodes, seats)
    return place_groups(groups, copies, nodes, seats, groups.nodes), groups.optimal


def climbed(copies: tuple[int, ...], nodes: int, seats: int) -> Counts:
    starts = mro(copies, nodes, seats)[0], spread(copies, nodes, seats)
    return min((climb(one, EXCHANGES) for one in starts), key=fatal_sets)


def is_whole(placed: Counts, copies: tuple[int, ...], seats: int) -> bool:
    return bool(
        (placed.sum(axis=1) == copies).all()
        and (placed.sum(axis=0) == seats).all()
        and (placed >= 0).all()
    )


def test_where_the_papers_theorem_fails_exchanges_find_the_best() -> None:
    """Three nodes of two seats, two copies of each of three experts: MRO puts both copies of the
    last expert on one node, although there are two copies of everything."""
    placed, optimal = mro((2, 2, 2), 3, 2)
    assert placed.T.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 2]]
    assert not optimal
    assert fatal_sets(placed) == (0, 1, 3, 1)
    best = climbed((2, 2, 2), 3, 2)
    assert sorted(best.T.tolist()) == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert fatal_sets(best) == (0, 0, 3, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_placements_of_small_shapes(shape: tuple[int, int, int]) -> None:
    """The corrected theorem: where it calls MRO optimal, MRO is best for every number of lost
    nodes at once. Everywhere else exchanges reach the best."""
    nodes, seats, experts = shape
    for copies in copy_counts(nodes, seats, experts):
        known = {fatal_by_size(one, experts) for one in placements(copies, nodes, seats)}
        placed, optimal = mro(copies, nodes, seats)
        assert is_whole(placed, copies, seats)
        if optimal:
            assert fatal_sets(placed) == tuple(map(min, zip(*known, strict=True)))
        assert fatal_sets(climbed(copies, nodes, seats)) == min(known)


@pytest.mark.parametrize(
    ("nodes", "copies", "recovered", "best"),
    [
        (4, (2, 3, 3), (0, 4, 4, 1), (0, 5, 4, 1)),
        (5, (3, 3, 4), (0, 6, 9, 5, 1), (0, 8, 10, 5, 1)),
        (5, (2, 2, 2, 2, 2), (0, 0, 4, 4, 1), (0, 0, 6, 5, 1)),
    ],
)
def test_mro_can_be_beaten_where_its_last_group_is_cut_off(
    nodes: int, copies: tuple[int, ...], recovered: tuple[int, ...], best: tuple[int, ...]
) -> None:
    """Sets of 1, 2, … alive nodes that hold all experts, with two seats on each node."""

    def favourable(placed: Counts) -> tuple[int, ...]:
        fatal = fatal_sets(placed)
        return tuple(comb(nodes, r) - fatal[nodes - r] for r in range(1, nodes + 1))

    assert favourable(mro(copies, nodes, 2)[0]) == recovered
    assert favourable(climbed(copies, nodes, 2)) == best


@pytest.mark.parametrize(
    ("nodes", "seats", "copies"),
    [
        (5, 2, (2, 2, 3, 3)),
        (10, 6, (2, 2, 2, 2, 2, 2, 2, 3, 3, 4, 5, 6, 6, 6, 6, 7)),
        (6, 1, (2, 4)),
    ],
)
def test_the_formula_of_the_corrected_theorem(
    nodes: int, seats: int, copies: tuple[int, ...]
) -> None:
    groups = groups_of(copies, nodes, seats)
    assert groups.optimal
    fatal = fatal_sets(mro(copies, nodes, seats)[0])
    for lost in range(nodes + 1):
        survivals = 0
        for chosen in range(1 << len(groups.nodes)):
            of = [q for at, q in enumerate(groups.nodes) if chosen >> at & 1]
            # Ways to lose all nodes of the chosen groups, and others.
            rest = lost - sum(of)
            survivals += (-1) ** len(of) * (comb(nodes - sum(of), rest) if rest >= 0 else 0)
        assert comb(nodes, lost) - fatal[lost] == survivals


def test_the_papers_figure_5() -> None:
    """4 experts, 2 seats, 5 nodes of which 3 are lost: the best fails in 4 of 10 cases."""
    placed, optimal = mro((2, 2, 3, 3), 5, 2)
    assert optimal
    assert fatal_sets(placed)[3] == 4
    known = {fatal_by_size(one, 4)[3] for one in placements((2, 2, 3, 3), 5, 2)}
    assert min(known) == 4
    assert 7 in known  # the paper's bad plan


@given(st.data())
def test_spread_and_groups_place_every_copy(data: st.DataObject) -> None:
    nodes, seats = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    experts = data.draw(st.integers(1, nodes * seats))
    loads = data.draw(st.lists(st.integers(0, 99), min_size=experts, max_size=experts))
    copies = tuple(sorted(allocate(Allocation.MIN_MAX, loads, nodes, seats, 2)))
    assert is_whole(spread(copies, nodes, seats), copies, seats)
    assert is_whole(mro(copies, nodes, seats)[0], copies, seats)


def test_after_repair_every_expert_is_on_as_many_nodes_as_it_has_least_copies() -> None:
    draw = random.Random(20)
    for _ in range(3000):
        nodes, seats = draw.randint(1, 12), draw.randint(1, 8)
        experts = draw.randint(1, nodes * seats)
        loads = [int(draw.paretovariate(0.7)) for _ in range(experts)]
        wanted = draw.randint(1, 3)
        copies = tuple(sorted(allocate(draw.choice(list(Allocation)), loads, nodes, seats, wanted)))
        least = least_copies(experts, nodes, seats, wanted)
        for placed in (mro(copies, nodes, seats)[0], spread(copies, nodes, seats)):
            repaired = repair(placed, least)
            assert is_whole(repaired, copies, seats)
            assert ((repaired > 0).sum(axis=1) >= least).all()


def test_layers_share_the_nodes_of_their_core() -> None:
    small, large = groups_of((2, 2, 4, 4), 6, 2), groups_of((3, 3, 3, 3), 6, 2)
    core = [2, 3]
    first = place_groups(small, (2, 2, 4, 4), 6, 2, core)
    second = place_groups(large, (3, 3, 3, 3), 6, 2, core)
    for placed in (first, second):
        assert (placed[:2, :2] == 1).all()
        assert (placed[2:, 2:5] == 1).all()
    assert np.flatnonzero(second[0]).tolist() == [0, 1, 5]
    assert np.flatnonzero(first[2]).tolist() == [2, 3, 4, 5]
