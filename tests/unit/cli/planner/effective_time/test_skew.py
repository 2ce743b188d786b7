"""Skewed routing: MoEvement's appendix D, and what it changes for each policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_cli.planner.effective_time.assumed_policies import (
    AssumedCosts,
    PolicyKind,
    policy_models,
)
from holdfast_cli.planner.effective_time.policy_models import (
    Cluster,
    Workload,
    expected_redone_s,
)
from holdfast_cli.planner.effective_time.runs import simulate_many
from holdfast_cli.planner.effective_time.skew import (
    concentration,
    draw_popularity,
    frozen_portion,
    lost_by_load,
    lost_in_turn,
    skewness,
)
from holdfast_cli.planner.seeds import generator
from holdfast_core.errors import InvalidJobError

EXPERTS = 64
EQUAL = (1 / EXPERTS,) * EXPERTS
SKEWS = (0.25, 0.5, 0.75, 0.99)
WORKLOAD = Workload(step_s=2.75)
CLUSTER = Cluster(
    nodes=12, spares=99, detect_s=2.0, restart_s=8.0, replacement_s=60.0, node_losses=1.0
)
COSTS = AssumedCosts(
    expert_bytes=220 * 10**9,
    other_bytes=10 * 10**9,
    experts_per_layer=EXPERTS,
    moe_layers=28,
    copy_bytes_s=2e9,
    network_bytes_s=1.5e9,
    storage_bytes_s=1e9,
)


def test_skewness_is_the_normalized_index_of_the_paper() -> None:
    assert skewness(EQUAL) == pytest.approx(0.0)
    assert skewness([0, 7, 0]) == pytest.approx(1.0)
    assert skewness([3, 1]) == pytest.approx((0.5625 + 0.0625 - 0.5) / 0.5)


@pytest.mark.parametrize(
    ("skew", "alpha"), [(0.25, 0.0469), (0.5, 0.0156), (0.75, 0.0052), (0.99, 0.000158)]
)
def test_concentrations_are_those_of_the_paper(skew: float, alpha: float) -> None:
    assert concentration(skew, EXPERTS) == pytest.approx(alpha, rel=4e-3)


@pytest.mark.parametrize("skew", SKEWS)
def test_what_is_drawn_has_the_skewness_that_was_asked_for(skew: float) -> None:
    drawn = draw_popularity(skew, EXPERTS, generator(0))
    assert drawn == draw_popularity(skew, EXPERTS, generator(0))
    assert sum(drawn) == pytest.approx(1)
    assert skewness(drawn) == pytest.approx(skew, abs=0.02)
    assert draw_popularity(0.0, EXPERTS, generator(0)) == EQUAL


@pytest.mark.parametrize(("skew", "experts"), [(0.0, 8), (1.0, 8), (-0.1, 8), (0.5, 1)])
def test_no_distribution_has_such_a_skewness(skew: float, experts: int) -> None:
    with pytest.raises(InvalidJobError, match="more than 0 and less than 1"):
        concentration(skew, experts)


@pytest.mark.parametrize("tokens", [[], [1.0], [0.0, 0.0], [1.0, -1.0, 2.0]])
def test_no_tokens_have_no_skewness(tokens: list[float]) -> None:
    with pytest.raises(InvalidJobError, match="at least two experts"):
        skewness(tokens)


@pytest.mark.parametrize("k", [1, 4, 32])
@pytest.mark.parametrize("skew", [0.0, *SKEWS])
def test_turns_lose_equally_much_on_average_and_more_at_once_with_skew(k: int, skew: float) -> None:
    losses = lost_in_turn(draw_popularity(skew, EXPERTS, generator(1)), k)
    mean = (EXPERTS / k - 1) / 2
    assert sum(losses) / len(losses) == pytest.approx(mean)
    assert max(losses) <= EXPERTS / k - 1 + 1e-9
    if skew >= 0.75:
        assert max(losses) > 1.5 * mean


def test_choice_by_load_serves_a_popular_expert_in_each_snapshot_and_the_others_in_turn() -> None:
    """Two of four experts are captured: the popular one, and one of three that take turns and have
    one, two and no snapshots' worth of 1 % when a snapshot has been taken."""
    assert lost_by_load((0.97, 0.01, 0.01, 0.01), 2) == pytest.approx(0.03, rel=0.02)
    assert lost_by_load((0.25, 0.25, 0.25, 0.25), 1.5) == pytest.approx((4 / 1.5 - 1) / 2, rel=0.15)


def test_choice_by_load_loses_less_the_more_popular_a_few_experts_are() -> None:
    assert lost_by_load(EQUAL, 8) == pytest.approx((EXPERTS / 8 - 1) / 2, rel=0.01)
    assert lost_by_load(EQUAL, EXPERTS) == 0.0
    lost = [lost_by_load(draw_popularity(s, EXPERTS, generator(0)), 8) for s in SKEWS]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 0.01


@pytest.mark.parametrize("window", [1, 2, 3, 6, 16])
def test_equal_experts_are_frozen_for_half_of_a_window(window: int) -> None:
    assert frozen_portion(EQUAL, window) == pytest.approx((window - 1) / (2 * window))


def test_popular_experts_are_frozen_longest() -> None:
    frozen = [frozen_portion(draw_popularity(s, EXPERTS, generator(0)), 6) for s in (0.0, *SKEWS)]
    assert frozen == sorted(frozen)
    assert frozen[-1] == pytest.approx(5 / 6, abs=0.02)


def test_only_policies_that_treat_experts_differently_depend_on_skew() -> None:
    popularity = draw_popularity(0.75, EXPERTS, generator(0))
    equal = policy_models(COSTS, WORKLOAD, CLUSTER, 600)
    skewed = policy_models(replace(COSTS, popularity=popularity), WORKLOAD, CLUSTER, 600)
    changed = {kind for kind in PolicyKind if equal[kind] != skewed[kind]}
    assert changed == {PolicyKind.PARTIAL, PolicyKind.SELECTIVE}
    assert skewed[PolicyKind.SELECTIVE].levels[0].lost_tokens < (
        equal[PolicyKind.SELECTIVE].levels[0].lost_tokens
    )


def test_windows_gain_from_skew_where_frozen_experts_save_work() -> None:
    """MoEvement's figure 16: equal popularity is its worst case."""
    redone = []
    for skew in (0.0, *SKEWS):
        costs = replace(
            COSTS, popularity=draw_popularity(skew, EXPERTS, generator(0)), frozen_saves=1 / 3
        )
        model = policy_models(costs, WORKLOAD, CLUSTER, 600)[PolicyKind.SPARSE]
        assert model.window_steps > 2
        redone.append(expected_redone_s(model, WORKLOAD))
    assert redone == sorted(redone, reverse=True)
    whole = policy_models(COSTS, WORKLOAD, CLUSTER, 600)[PolicyKind.SPARSE]
    assert redone[0] < expected_redone_s(whole, WORKLOAD)


def test_simulated_windows_repeat_in_less_time_where_frozen_experts_save_work() -> None:
    ettr = []
    for saves in (0.0, 1 / 3):
        costs = replace(COSTS, frozen_saves=saves)
        for kind in (PolicyKind.SPARSE, PolicyKind.SPARSE_GLOBAL):
            model = policy_models(costs, WORKLOAD, CLUSTER, 600)[kind]
            runs = simulate_many(
                model, WORKLOAD, CLUSTER, 600, runs=3, length_s=36000, draw_of=generator
            )
            ettr.append(runs.ettr)
    assert ettr[2] > ettr[0] and ettr[3] > ettr[1]


def test_turns_capture_more_experts_sooner_where_losses_come_in_bursts() -> None:
    """Recoveries lose as much on average; the burst that exceeds a limit comes sooner."""
    kept = []
    for skew in (0.0, 0.99):
        costs = replace(COSTS, popularity=draw_popularity(skew, EXPERTS, generator(0)))
        model = policy_models(costs, WORKLOAD, CLUSTER, 7200)[PolicyKind.PARTIAL]
        runs = simulate_many(
            model, WORKLOAD, CLUSTER, 7200, runs=20, length_s=12 * 3600, draw_of=generator
        )
        kept.append(runs)
    assert kept[1].experts >= kept[0].experts
    assert kept[1].lost_tokens == pytest.approx(kept[0].lost_tokens, rel=0.6)
