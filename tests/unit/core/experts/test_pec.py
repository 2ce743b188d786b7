from __future__ import annotations

import itertools
from random import Random

import pytest
from choice_bounds import load_aware_bound
from expert_worlds import (
    after_full_snapshot,
    any_worlds,
    even_worlds,
    generation,
    taken_by_layer,
    taken_by_share,
    unit,
    world,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.pec import (
    guard_age,
    select_load_aware,
    select_sequential,
    sequential_bound,
)
from holdfast_core.experts.tables import ExpertTable

KS = st.integers(1, 10)


def spread(taken: dict[tuple[int, int], int], stage: int) -> int:
    of_stage = [count for (s, _), count in taken.items() if s == stage]
    return max(of_stage) - min(of_stage)


# --- sequential -----------------------------------------------------------------------------------


def test_figure_1_each_layer_goes_on_with_the_next_rank() -> None:
    table = world([3, 3, 3], shares=3)
    chosen = [select_sequential(table, 1, number).units for number in range(3)]
    assert [[u.expert for u in units] for units in chosen] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_a_rank_with_several_experts_of_a_layer_is_not_asked_twice_in_a_row() -> None:
    table = world([8, 8], shares=2)
    assert select_sequential(table, 1, 0).units == (unit(0, 0), unit(1, 4))
    assert select_sequential(table, 2, 0).units == (
        *(unit(0, 0), unit(0, 4)),
        *(unit(1, 1), unit(1, 5)),
    )


@given(even_worlds(), KS, st.integers(0, 100))
def test_ranks_capture_the_same_number_or_one_more(table: ExpertTable, k: int, number: int) -> None:
    taken = taken_by_share(table, select_sequential(table, k, number).units)
    assert all(spread(taken, stage) <= 1 for stage, _ in taken)


@given(any_worlds(), KS, st.integers(0, 100))
def test_each_layer_has_k_experts_or_all(table: ExpertTable, k: int, number: int) -> None:
    counts = taken_by_layer(table, select_sequential(table, k, number).units)
    assert counts == {m.layer: min(k, len(m.experts)) for m in table.layers}


@given(any_worlds(), KS, st.integers(0, 100))
def test_every_expert_has_its_turn_within_the_bound(table: ExpertTable, k: int, first: int) -> None:
    for layer in table.layers:
        seen = {
            u
            for number in range(first, first + sequential_bound(layer, k))
            for u in select_sequential(table, k, number).units
        }
        assert {expert.unit for expert in layer.experts} <= seen


def test_what_was_never_captured_comes_on_top() -> None:
    table = world([4], shares=2)
    missing = {unit(0, 1), unit(0, 3)}
    selection = select_sequential(table, 1, 0, uncaptured=missing)
    assert set(selection.units) == {unit(0, 0), *missing}
    assert "3 of 4; 2 of them because they have no version yet" in selection.reason


@pytest.mark.parametrize(("k", "number"), [(0, 0), (-1, 0), (1, -1)])
def test_numbers_out_of_range_are_refused(k: int, number: int) -> None:
    with pytest.raises(InvalidJobError, match=r"K=|snapshot number -1"):
        select_sequential(world([4]), k, number)


def test_a_model_without_experts_selects_none() -> None:
    table = ExpertTable(layers=(), dense_bytes=5)
    assert select_sequential(table, 3, 1).units == ()
    assert select_load_aware(table, 3, ExpertLedger.start([])).units == ()


# --- load-aware -----------------------------------------------------------------------------------


def loaded(table: ExpertTable, tokens: dict[tuple[int, int], int]) -> ExpertLedger:
    return after_full_snapshot(table).routed({unit(*at): n for at, n in tokens.items()})


def test_the_most_unsaved_tokens_go_first() -> None:
    table = world([4, 4], shares=1)
    ledger = loaded(table, {(0, 2): 9, (0, 1): 8, (0, 0): 7, (1, 3): 1})
    selection = select_load_aware(table, 2, ledger)
    assert selection.units == (unit(0, 1), unit(0, 2), unit(1, 0), unit(1, 3))


def test_ties_go_to_the_older_then_to_the_lower() -> None:
    table = world([3], shares=1)
    ledger = after_full_snapshot(table)
    assert select_load_aware(table, 1, ledger).units == (unit(0, 0),)
    ledger = ledger.captured(generation(1), [unit(0, 0)])
    assert select_load_aware(table, 1, ledger).units == (unit(0, 1),)


def test_popular_experts_of_one_rank_have_to_share_its_capacity() -> None:
    """Rank 0 holds the most popular expert of both layers; it may save one of them."""
    table = world([2, 2], shares=2)
    ledger = loaded(table, {(0, 0): 10, (1, 0): 9, (0, 1): 1, (1, 1): 2})
    assert select_load_aware(table, 1, ledger).units == (unit(0, 0), unit(1, 1))


def test_an_earlier_choice_moves_when_the_last_layer_finds_no_room() -> None:
    """Layers 1 and 2 fill ranks 1 and 2; layer 0 has one expert left for the room on rank 0, and
    needs two. So layer 1 takes its expert there in place of the one on rank 2."""
    table = world([3, 3, 3], shares=3)
    tokens = {(1, 0): 6, (1, 1): 8, (1, 2): 8, (2, 0): 1, (2, 1): 9, (2, 2): 7}
    ledger = loaded(table, {(0, 0): 2, (0, 1): 1, (0, 2): 4, **tokens})
    chosen = select_load_aware(table, 2, ledger).units
    assert [(u.layer, u.expert) for u in chosen] == [(0, 0), (0, 2), (1, 0), (1, 1), (2, 1), (2, 2)]


def test_experts_without_any_version_come_on_top_of_the_k() -> None:
    table = world([4])
    ledger = ExpertLedger.start(table.units).captured(generation(0), [unit(0, 0), unit(0, 1)])
    selection = select_load_aware(table, 1, ledger.routed({unit(0, 0): 9}))
    assert selection.units == (unit(0, 0), unit(0, 2), unit(0, 3))
    lost_copy = select_load_aware(table, 1, after_full_snapshot(table), uncaptured={unit(0, 3)})
    assert lost_copy.units == (unit(0, 0), unit(0, 3))


ROUTED = st.lists(st.integers(0, 5), min_size=60, max_size=60)


@given(even_worlds(), KS, ROUTED)
def test_ranks_have_equal_capacity(table: ExpertTable, k: int, tokens: list[int]) -> None:
    ledger = after_full_snapshot(table).routed(dict(zip(table.units, tokens, strict=False)))
    chosen = select_load_aware(table, k, ledger).units
    assert taken_by_layer(table, chosen) == {m.layer: min(k, len(m.experts)) for m in table.layers}
    for stage in {m.stage for m in table.layers}:
        partial = [m for m in table.layers if m.stage == stage and len(m.experts) > k]
        counted = [e.unit for m in partial for e in m.experts if e.unit in chosen]
        shares = {e.share for m in partial for e in m.experts}
        capacity = -(-k * len(partial) // len(shares)) if shares else 0
        assert max(taken_by_share(table, counted).values()) <= capacity


@given(any_worlds(), KS, ROUTED)
def test_any_world_gets_its_k(table: ExpertTable, k: int, tokens: list[int]) -> None:
    ledger = after_full_snapshot(table).routed(dict(zip(table.units, tokens, strict=False)))
    selection = select_load_aware(table, k, ledger)
    counts = taken_by_layer(table, selection.units)
    assert counts == {m.layer: min(k, len(m.experts)) for m in table.layers}
    assert selection == select_load_aware(table, k, ledger)


def longest_wait(table: ExpertTable, k: int, loads: list[int], snapshots: int) -> dict[int, int]:
    """For each layer the most snapshots that any of its experts went without, when expert i of the
    table receives loads[i] tokens before each snapshot."""
    ledger = after_full_snapshot(table)
    counts = dict(zip(table.units, itertools.cycle(loads), strict=False))
    longest = {m.layer: 0 for m in table.layers}
    for step in range(1, snapshots):
        ledger = ledger.routed(counts)
        ledger = ledger.captured(generation(step), select_load_aware(table, k, ledger).units)
        for layer in table.layers:
            ages = [ledger.age(e.unit) for e in layer.experts]
            longest[layer.layer] = max(longest[layer.layer], *ages)
        ledger = ledger.pruned({})
    return longest


@pytest.mark.parametrize(
    ("counts", "shares", "k"),
    [([4], 1, 1), ([4], 2, 3), ([6, 3], 3, 2), ([5, 5, 2], 2, 1), ([8, 8], 8, 1)],
)
def test_experts_without_tokens_are_captured_within_the_bound(
    counts: list[int], shares: int, k: int
) -> None:
    table = world(counts, shares=shares)
    starved = longest_wait(table, k, [1000] * k + [0, 999], snapshots=250)
    for layer in table.layers:
        assert starved[layer.layer] < load_aware_bound(table, layer, k)


def test_without_the_guard_they_would_starve() -> None:
    """The guard is what bounds the wait: it is reached, and popularity alone never gets there."""
    table = world([4])
    starved = longest_wait(table, 1, [1000, 0, 0, 0], snapshots=200)[0]
    assert guard_age(4, 1) <= starved < load_aware_bound(table, table.layers[0], 1)


@settings(max_examples=30)
@given(any_worlds(), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_no_traffic_makes_an_expert_wait_longer_than_the_bound(
    table: ExpertTable, k: int, loads: list[int]
) -> None:
    bounds = {m.layer: load_aware_bound(table, m, k) for m in table.layers}
    waits = longest_wait(table, k, loads, snapshots=min(120, 2 * max(bounds.values())))
    assert all(waits[layer] < bound for layer, bound in bounds.items())


@given(any_worlds(), KS, ROUTED, st.randoms(use_true_random=False))
def test_ranks_choose_the_same_experts_whatever_order_news_reached_them_in(
    table: ExpertTable, k: int, tokens: list[int], random: Random
) -> None:
    counts = list(zip(table.units, tokens, strict=False))
    chosen = []
    for _ in range(2):
        random.shuffle(counts)
        ledger = after_full_snapshot(table)
        for unit_, n in counts:
            ledger = ledger.routed({unit_: n})
        chosen.append(select_load_aware(table, k, ledger))
    assert chosen[0] == chosen[1]
