from __future__ import annotations

from dataclasses import replace

import pytest
from expert_worlds import unit, world

from holdfast_core.experts.counts import AgreedCounts, Mark, Measures
from holdfast_core.experts.dynamic_k import next_k
from holdfast_core.experts.pec import select_sequential
from holdfast_core.experts.token_loss import TokenLoss
from holdfast_core.job.policies.selective import experts_total
from holdfast_core.job.snapshots import (
    ExpertBudget,
    ExpertChoice,
    LossyPolicy,
    PartialExperts,
    Selective,
)
from holdfast_core.snapshots.units import UnitKey

TABLE = replace(world([4, 2], nbytes=100), dense_bytes=0)
MEASURED = Measures(host_bytes_s=1000, network_bytes_s=0, step_us=200_000)
BY_LOAD = PartialExperts(experts_per_layer=1, selection=ExpertChoice.LOAD_AWARE)


def counts(tokens: dict[UnitKey, int], measures: Measures = MEASURED) -> AgreedCounts:
    return AgreedCounts(
        number=0,
        tokens=dict.fromkeys(TABLE.units, 0) | tokens,
        marks=dict.fromkeys(TABLE.units, Mark(0, 0)),
        measures=measures,
    )


def test_only_sequential_selection_needs_no_counts() -> None:
    assert not PartialExperts().needs_counts
    assert BY_LOAD.needs_counts
    assert Selective().needs_counts


def test_load_aware_selection_takes_the_k_busiest_experts_of_each_layer() -> None:
    found = counts({unit(0, 2): 9, unit(0, 3): 8, unit(1, 1): 1})
    assert BY_LOAD.select(TABLE, found, 1, 1).units == (unit(0, 2), unit(1, 1))
    two = BY_LOAD.select(TABLE, found, 2, 1).units
    assert set(two) >= {unit(0, 2), unit(0, 3), unit(1, 0), unit(1, 1)}


def test_sequential_selection_by_counts_adds_experts_that_are_missing_or_overdue() -> None:
    policy = PartialExperts(experts_per_layer=1)
    found = replace(counts({}), number=4)
    taken = Mark(4, 0)
    marks = dict.fromkeys(TABLE.units, taken)
    in_turn = policy.select(TABLE, replace(found, marks=marks), 1, 1).units
    assert in_turn == select_sequential(TABLE, 1, 5).units
    others = [u for u in TABLE.units if u not in in_turn]
    without = {u: mark for u, mark in marks.items() if u != others[0]}
    late = without | {others[1]: Mark(0, 0)}
    chosen = policy.select(TABLE, replace(found, marks=late), 1, 1).units
    assert set(chosen) == {*in_turn, *others[:2]}


def test_selective_spends_its_budget_on_experts_with_the_most_tokens_at_risk() -> None:
    found = counts({unit(0, 2): 9, unit(0, 3): 8, unit(1, 1): 1})
    # 1000 bytes/s for 0.2 s: two experts of 100 bytes.
    assert Selective().select(TABLE, found, 1, 1).units == (unit(0, 2), unit(0, 3))
    assert len(Selective(experts=1).select(TABLE, found, 1, 1).units) == 1


@pytest.mark.parametrize(
    ("policy", "measures", "ranks", "k", "experts"),
    [
        pytest.param(Selective(), MEASURED, 1, 1, 2, id="measured"),
        pytest.param(Selective(), MEASURED, 2, 1, 4, id="every rank copies"),
        pytest.param(Selective(), MEASURED, 9, 1, 6, id="no more than there are"),
        pytest.param(Selective(), MEASURED, 1, 2, 4, id="after losses"),
        pytest.param(Selective(), Measures(), 1, 1, 1, id="nothing measured"),
        pytest.param(Selective(), Measures(1000, 0, 0), 1, 1, 1, id="no step measured"),
        pytest.param(Selective(), Measures(1, 0, 1), 1, 1, 1, id="no budget"),
        pytest.param(Selective(), Measures(3000, 500, 200_000), 1, 1, 1, id="the network limits"),
        pytest.param(Selective(), Measures(1000, 9000, 200_000), 1, 1, 2, id="the host limits"),
        pytest.param(Selective(experts=5), Measures(), 1, 1, 5, id="given"),
        pytest.param(Selective(experts=99), Measures(), 1, 1, 6, id="more than there are"),
        pytest.param(
            Selective(budget=ExpertBudget(host_bytes_per_second=1500)),
            MEASURED,
            1,
            1,
            3,
            id="a given bandwidth",
        ),
        pytest.param(
            Selective(budget=ExpertBudget(network_bytes_per_second=500)),
            MEASURED,
            1,
            1,
            1,
            id="a given network",
        ),
    ],
)
def test_the_number_of_experts_follows_from_the_job_or_from_measures(
    policy: Selective, measures: Measures, ranks: int, k: int, experts: int
) -> None:
    assert experts_total(policy, TABLE, measures, k, ranks).experts == experts


def test_dense_bytes_of_every_snapshot_are_deducted_from_the_budget() -> None:
    table = replace(TABLE, dense_bytes=120)
    assert experts_total(Selective(), table, Measures(3000, 0, 200_000), 1, 1).experts == 4


@pytest.mark.parametrize(
    ("policy", "first", "all_of_them"),
    [
        (PartialExperts(experts_per_layer=3), 3, 4),
        (Selective(experts=4), 1, 2),
        (Selective(experts=9), 1, 1),
        (Selective(), 1, 6),
    ],
)
def test_k_goes_from_the_jobs_value_to_all_experts(
    policy: LossyPolicy, first: int, all_of_them: int
) -> None:
    assert policy.first_k == first
    assert policy.k_for_all(TABLE.units) == all_of_them
    if isinstance(policy, Selective):
        assert experts_total(policy, TABLE, Measures(), all_of_them, 1).experts == 6


def test_each_policy_has_the_limit_of_its_paper() -> None:
    """PEC §3.1 keeps PLT below 5 %; MoEtion's table 1 finds no harm up to 3 % of each layer."""
    assert (PartialExperts().loss_limit, Selective().loss_limit) == (0.05, 0.03)
    assert Selective(loss_limit=0.2).loss_limit == 0.2


@pytest.mark.parametrize(("policy", "k"), [(PartialExperts(), 1), (Selective(), 2)])
def test_between_the_limits_only_selective_captures_more_after_a_recovery(
    policy: LossyPolicy, k: int
) -> None:
    """One recovery lost 4 % of the tokens of each layer; the next K captures everything."""
    loss = TokenLoss(lost={0: 40, 1: 20}, assignments={0: 1000, 1: 500})
    assert loss.mlt / len(loss.assignments) == pytest.approx(loss.plt) == pytest.approx(0.04)
    decision = next_k(
        1,
        first_k=1,
        experts_max=2,
        lost_by_k={1: loss.lost_tokens},
        total_tokens=1500,
        limit=policy.loss_limit,
    )
    assert decision.k == k
