"""The policies that follow from sizes and rates, computed by hand, and the goals that use them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks.papers.goals import goal_tables, state_of

from holdfast_cli.planner.effective_time.assumed_policies import (
    NOT_BUILT,
    AssumedCosts,
    PolicyKind,
    policy_models,
)
from holdfast_cli.planner.effective_time.incidents import Draw
from holdfast_cli.planner.effective_time.policy_models import (
    AfterLoss,
    Cluster,
    PolicyModel,
    Workload,
)
from holdfast_core.errors import InvalidJobError

GB = 10**9
COSTS = AssumedCosts(
    expert_bytes=112 * GB,
    other_bytes=28 * GB,
    experts_per_layer=8,
    moe_layers=2,
    copy_bytes_s=10e9,
    network_bytes_s=5e9,
    storage_bytes_s=1e9,
)
CLUSTER = Cluster(nodes=2, spares=1, detect_s=2, restart_s=5, replacement_s=600)
WORKLOAD = Workload(step_s=4.0)
MTBF_S = 600.0


def models(costs: AssumedCosts = COSTS) -> dict[PolicyKind, PolicyModel]:
    return policy_models(costs, WORKLOAD, CLUSTER, MTBF_S)


def draw_of(seed: int) -> Draw:
    return random.Random(seed).random


def test_a_full_snapshot_stalls_for_what_a_step_does_not_hide() -> None:
    """70 GB a node: 7 s of copy, of which 4 hide, and 14 s of parity, which is 4 steps; the best
    interval is √(2 · 3 · 600) = 60 s."""
    full = models()[PolicyKind.FULL]
    (level,) = full.levels
    assert level.stall_s == pytest.approx(3.0)
    assert level.interval_steps == 15
    assert level.usable_after_s == pytest.approx(7 + 14)
    (bare,) = models(replace(COSTS, losses=0))[PolicyKind.FULL].levels
    assert bare.usable_after_s == pytest.approx(7)


def test_a_step_with_a_snapshot_is_longer_even_where_it_hides() -> None:
    fast = replace(COSTS, copy_bytes_s=1e11, network_bytes_s=1e11, slower=0.02)
    (level,) = models(fast)[PolicyKind.FULL].levels
    assert level.stall_s == pytest.approx(0.08)
    assert level.interval_steps == 2  # √(2 · 0.08 · 600) = 9.8 s


def test_some_experts_of_each_layer_take_turns() -> None:
    """K of 8 experts: 28 + 14 K GB on two nodes."""
    partial = models()[PolicyKind.PARTIAL]
    assert [level.experts for level in partial.levels] == [1, 2, 4, 8]
    assert [level.stall_s for level in partial.levels] == pytest.approx([0, 0, 0.2, 3.0])
    # Parity of 21 GB takes 4.2 s: a snapshot every second step. (8 - 1) / 2 snapshots are lost.
    assert partial.levels[0].interval_steps == 2
    assert partial.levels[0].lost_tokens == pytest.approx(2 * 3.5)
    assert partial.levels[-1].lost_tokens == 0


def test_selective_captures_what_a_step_holds() -> None:
    """5 GB/s for 4 s on 2 nodes: 40 GB, of which 12 for experts of 7 GB: 1 of 16."""
    selective = models()[PolicyKind.SELECTIVE]
    assert selective.levels[0].stall_s == 0
    assert selective.levels[0].lost_tokens > 0
    roomy = replace(COSTS, copy_bytes_s=1e12, network_bytes_s=1e12)
    (level,) = models(roomy)[PolicyKind.SELECTIVE].levels
    assert level.lost_tokens == 0


def test_checkfreq_stores_as_often_as_storage_and_three_percent_allow() -> None:
    """3 s of stall are 3 % of 25 steps; 70 s of storing are 18 steps, and of loading again."""
    checkfreq = models()[PolicyKind.CHECKFREQ]
    assert checkfreq.levels[0].interval_steps == 25
    assert checkfreq.load_s == pytest.approx(70)
    slow = replace(COSTS, storage_bytes_s=1e8)
    assert models(slow)[PolicyKind.CHECKFREQ].levels[0].interval_steps == 175


@pytest.mark.parametrize(
    ("network_bytes_s", "window"),
    [
        (1e11, 1),  # 70 GB fit into a step
        (1e10, 2),  # 40 GB: 30 + 5
        (5.5e9, 5),  # 22 GB: 12 + 8, but with a window of four steps 15 + 7.5
        (1e9, 16),  # never: the longest
    ],
)
def test_a_window_is_as_short_as_its_largest_save_allows(
    network_bytes_s: float, window: int
) -> None:
    """70 GB of state a node, 10 of them weights: 60 / W + 10 (W - 1) / W GB at most in a save."""
    costs = replace(COSTS, network_bytes_s=network_bytes_s, copy_bytes_s=1e12)
    found = models(costs)
    assert found[PolicyKind.SPARSE].window_steps == window
    limited = models(replace(costs, window_max=2))[PolicyKind.SPARSE]
    assert limited.window_steps == min(window, 2)
    of_gradients = found[PolicyKind.SPARSE_GRADS]
    assert of_gradients.window_steps == window
    [of_slot], [of_window] = found[PolicyKind.SPARSE_GLOBAL].levels, of_gradients.levels
    assert of_window.stall_s == of_slot.stall_s
    assert of_window.usable_after_s == pytest.approx(window * of_slot.usable_after_s, rel=0.1)


def test_what_no_job_can_ask_for_is_marked() -> None:
    found = models()
    assert list(found) == list(PolicyKind)
    assert {kind for kind, model in found.items() if not model.built} == NOT_BUILT
    assert found[PolicyKind.FEWER].after_loss is AfterLoss.FEWER
    assert found[PolicyKind.ELASTIC].after_loss is AfterLoss.LIVE
    assert found[PolicyKind.STAGES].by_stage and not found[PolicyKind.STAGES].window_steps
    assert found[PolicyKind.SPARSE].by_stage and not found[PolicyKind.SPARSE_GLOBAL].by_stage
    grads, fewer = found[PolicyKind.SPARSE_GRADS], found[PolicyKind.FEWER_GRADS]
    assert {model.name for model in found.values() if model.catches_up} == {grads.name, fewer.name}
    assert fewer.after_loss is AfterLoss.FEWER


def test_another_world_fetches_the_gradients_of_a_window() -> None:
    """70 GB of state a node, 10 of them weights: with four steps, 15 GB of gradients on average."""
    costs = replace(COSTS, window_steps=4, network_bytes_s=1e9, copy_bytes_s=1e10)
    found = models(costs)
    grads, fewer = found[PolicyKind.SPARSE_GRADS], found[PolicyKind.FEWER_GRADS]
    assert grads.catch_up_s == pytest.approx(1.5)
    assert fewer.catch_up_s == pytest.approx(15 + 1.5)
    alike = replace(fewer, after_loss=grads.after_loss, catch_up_s=grads.catch_up_s)
    assert replace(alike, name=grads.name) == grads
    whole = models(replace(costs, window_steps=1))[PolicyKind.FEWER_GRADS]
    assert whole.catch_up_s == 0.0


def test_costs_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidJobError, match="rates above 0"):
        replace(COSTS, copy_bytes_s=0.0)
    with pytest.raises(InvalidJobError, match="at least one expert"):
        replace(COSTS, experts_per_layer=0)


def test_the_state_of_a_model_of_some_size() -> None:
    assert state_of(1e9, COSTS).state_bytes == 14 * GB
    assert state_of(1e9, COSTS).expert_bytes == round(13.58 * GB)


def test_a_goal_is_reached_from_0_97_on() -> None:
    four, largest, required = goal_tables(COSTS, CLUSTER, draw_of, 4)
    assert len(four.rows) == 4 * 5
    for row in four.rows:
        assert row[-1] == ("reached" if float(row[5]) >= 0.97 else "missed")
    assert {row[0] for row in largest.rows} == {5.0, 10.0, 20.0}
    # At an overhead of 1 %, 600 · (1 / (0.97 · 1.01) - 1) = 12.4 s, of which 7 are for repairs.
    (row,) = (row for row in required.rows if row[:2] == (0.97, 1.0))
    assert row[2:] == pytest.approx((12.44, 5.44), abs=0.01)
