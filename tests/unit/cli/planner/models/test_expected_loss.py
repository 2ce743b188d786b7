"""Tokens that a recovery is expected to lose, beside what the ledger counts on routed tokens."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest
from expert_worlds import after_full_snapshot, even_worlds, generation, world
from hypothesis import given
from hypothesis import strategies as st

from holdfast_cli.planner.models.expected_loss import (
    choices_of,
    loss_of_choices,
    popularity,
    routed_tokens,
    selective_loss,
    sequential_loss,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.budgeted import select_local
from holdfast_core.experts.counts import UNKNOWN
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.pec import select_sequential
from holdfast_core.experts.tables import ExpertTable, Selection
from holdfast_core.experts.token_loss import at_risk
from holdfast_core.job.snapshots import ExpertChoice, LossyPolicy, PartialExperts, Selective


def counted(
    table: ExpertTable,
    select: Callable[[ExpertLedger], Selection],
    *,
    skew: float,
    snapshots: int,
    warmup: int,
) -> float:
    """The mean of what the ledger has at risk after each snapshot, in steps' worth of tokens."""
    routed = routed_tokens(table, skew, 1 << 16)
    ledger = after_full_snapshot(table)
    found = []
    for step in range(1, snapshots + 1):
        ledger = ledger.routed(routed)
        ledger = ledger.captured(generation(step), select(ledger).units).pruned({})
        if step > warmup:
            found.append(at_risk(ledger).lost_tokens / sum(routed.values()))
    return fmean(found)


@pytest.mark.parametrize(("counts", "k"), [((8, 8), 1), ((8, 8), 3), ((6, 4), 2), ((5,), 4)])
def test_experts_in_turn_lose_what_the_ledger_counts(counts: tuple[int, ...], k: int) -> None:
    table = world(counts)
    rounds = 120  # a multiple of all periods
    found = counted(
        table,
        lambda ledger: select_sequential(table, k, ledger.snapshots),
        skew=1.0,
        snapshots=2 * rounds,
        warmup=rounds,
    )
    assert sequential_loss(table, k) == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize(("counts", "k"), [((8, 8), 1), ((8, 8), 3), ((6, 4), 2), ((5,), 4)])
def test_what_a_policy_chooses_loses_what_its_formula_gives(
    counts: tuple[int, ...], k: int, skew: float
) -> None:
    table = world(counts)
    routed = routed_tokens(table, skew, 1 << 16)

    def loss(policy: LossyPolicy, snapshots: int) -> float:
        chosen = choices_of(policy, table, routed, UNKNOWN, 1, snapshots)
        return loss_of_choices(table, chosen, skew)

    in_turn = loss(PartialExperts(experts_per_layer=k), 120)  # a multiple of all periods
    assert in_turn == pytest.approx(sequential_loss(table, k), rel=1e-3)
    by_load = PartialExperts(experts_per_layer=k, selection=ExpertChoice.LOAD_AWARE)
    assert loss(by_load, 240) <= in_turn * 1.01
    total = sum(counts) // 2
    at_risk = loss(Selective(experts=total), 240)
    assert at_risk == pytest.approx(selective_loss(table, total, skew), rel=0.15)


def test_one_of_eight_experts_in_turn_loses_three_and_a_half_steps() -> None:
    assert sequential_loss(world((8,) * 6), 1) == 3.5


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("counts", "total"), [((8,) * 4, 8), ((16,) * 4, 10), ((8,) * 6, 3)])
def test_selective_experts_lose_about_what_the_ledger_counts(
    counts: tuple[int, ...], total: int, skew: float
) -> None:
    table = world(counts)
    rounds = -(-sum(counts) // total)
    found = counted(
        table,
        lambda ledger: select_local(table, ledger, total),
        skew=skew,
        snapshots=40 * rounds,
        warmup=20 * rounds,
    )
    assert 0.97 * found <= selective_loss(table, total, skew) <= 1.2 * found


@given(even_worlds(), st.integers(1, 12))
def test_more_experts_lose_fewer_tokens(table: ExpertTable, k: int) -> None:
    assert sequential_loss(table, k + 1) <= sequential_loss(table, k) + 1e-9
    assert sequential_loss(table, table.experts_max) == 0
    total = min(k, len(table.experts))
    assert selective_loss(table, total + 1, 1.0) <= selective_loss(table, total, 1.0) + 1e-9
    assert selective_loss(table, len(table.experts), 1.0) == 0


@given(st.integers(1, 30), st.floats(0, 3))
def test_popularity_is_shares_of_one(experts: int, skew: float) -> None:
    shares = popularity(world((experts,)).layers[0], skew)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0


def test_with_a_skew_of_2_two_of_16_experts_receive_79_percent() -> None:
    shares = sorted(popularity(world((16,)).layers[0], 2).values())
    assert sum(shares[-2:]) == pytest.approx(0.79, abs=0.005)


def test_popular_experts_are_not_those_with_the_lowest_numbers() -> None:
    table = world((16,) * 8)
    first = set()
    for layer in table.layers:
        shares = popularity(layer, 2)
        first.add(max(shares, key=shares.__getitem__).expert)
    assert len(first) >= 4


def test_a_negative_skew_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="skew=-1"):
        popularity(world((2,)).layers[0], -1)
