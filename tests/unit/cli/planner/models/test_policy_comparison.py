"""What policies cost beside each other, and which is recommended."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_cli.planner.models.policy_comparison import (
    NEGLIGIBLE,
    Assumptions,
    Comparison,
    PolicyCost,
    compare_policies,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, PolicyType, parse_job
from holdfast_core.job.snapshots import WINDOW_MAX, Repeats
from holdfast_core.protection.groups import form_groups

DAY_S = 86400.0
GB = 10**9
SMALL = ModelSizes.even(layers=4, experts=8, expert_bytes=GB, other_bytes=4 * GB)
ASSUMED = Assumptions(
    copy_bytes_s=10e9,
    network_bytes_s=10e9,
    step_s=1.0,
    node_losses_per_s=1 / 180 / DAY_S,
    process_failures_per_s=1 / 60 / DAY_S,
)


def job(nodes: int = 4, *, ranks: int = 1, ep: int = 4, **spec: Any) -> MoETrainingJob:
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "j"},
            "spec": {
                "nodes": nodes,
                "nprocPerNode": ranks,
                "parallelism": {"dp": nodes * ranks, "ep": ep},
                "trainer": {
                    "template": {
                        "spec": {"containers": [{"name": "t", "image": "i", "command": ["t"]}]}
                    }
                },
                **spec,
            },
        }
    )


SELDOM: dict[str, Any] = {"snapshot": {"interval": {"steps": 2}}}
"""What excludes sparse windows."""


def compared(
    sizes: ModelSizes = SMALL, assumed: Assumptions = ASSUMED, of: MoETrainingJob | None = None
) -> Comparison:
    of = of or job()
    members = dict.fromkeys(range(of.spec.nodes), "")
    groups = form_groups(members, of.group_size).groups if of.group_size > 1 else ()
    return compare_policies(of, sizes, groups, assumed)


def partial(found: Comparison) -> list[PolicyCost]:
    return [cost for cost in found.costs if cost.policy is PolicyType.PARTIAL_EXPERTS]


def selective(found: Comparison) -> PolicyCost:
    return found.costs[-1]


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    return ModelSizes.even(
        layers=draw(st.integers(1, 5)),
        experts=4 * draw(st.integers(1, 4)),
        expert_bytes=draw(st.integers(1, 2 * GB)),
        other_bytes=draw(st.integers(0, 20 * GB)),
    )


@given(models())
def test_partial_experts_with_all_experts_is_full(sizes: ModelSizes) -> None:
    """With one rank for each share; replicas of a share would divide full snapshots more finely."""
    found = compared(sizes, replace(ASSUMED, first_k=100))
    (everything,) = partial(found)
    full = found.costs[0]
    assert everything == replace(
        full,
        policy=PolicyType.PARTIAL_EXPERTS,
        experts=everything.experts,
        settings={"expertsPerLayer": everything.experts},
        grows=True,
    )
    assert everything.lost_tokens == 0
    assert found.best is not everything  # the full one comes first


@given(models())
def test_bytes_and_copies_grow_with_k(sizes: ModelSizes) -> None:
    found = compared(sizes)
    rows = [*partial(found), found.costs[0]]
    assert [row.experts for row in rows[:-1]] == sorted({row.experts for row in rows[:-1]})
    for before, after in pairwise(rows):
        assert before.job_bytes <= after.job_bytes
        assert before.rank_bytes <= after.rank_bytes
        assert before.copy_s <= after.copy_s
        assert before.stall_s <= after.stall_s
        assert before.memory_bytes == after.memory_bytes


@given(st.floats(0.5, 500), st.floats(1.01, 50))
def test_more_failures_cost_more(mtbf_days: float, times: float) -> None:
    """Where copies hide, so that the interval does not shrink with the rate."""
    slow = replace(ASSUMED, step_s=10.0, process_failures_per_s=1 / mtbf_days / DAY_S)
    fast = replace(slow, process_failures_per_s=times / mtbf_days / DAY_S)
    for few, many in zip(compared(assumed=slow).costs, compared(assumed=fast).costs, strict=True):
        assert not few.stall_s
        assert few.redone < many.redone
        if few.policy is PolicyType.PARTIAL_EXPERTS:
            assert 0 < few.lost_tokens < many.lost_tokens


def test_the_figures_of_a_small_job_by_hand() -> None:
    """4 ranks, each with 2 of 8 experts of 4 layers (1 GB each), and a quarter of 4 GB besides."""
    found = compared(assumed=replace(ASSUMED, step_s=2.0))
    one = partial(found)[0]
    assert (one.experts, one.job_bytes, one.interval_steps, one.stall_s) == (1, 8 * GB, 1, 0.0)
    sizes = (one.rank_bytes, found.costs[0].rank_bytes)
    assert sizes == pytest.approx((2 * GB, 9 * GB), rel=1e-5)  # ranges are of 64 bytes
    assert (one.copy_s, one.protect_s) == pytest.approx((0.2, 0.2), rel=1e-5)
    # Half an interval, the copy, and a quarter of the protection: one failure in 4 takes a node.
    assert one.lost_steps == pytest.approx((1.0 + 0.2 + 0.25 * 0.2) / 2)
    rate_per_s = 4 * (1 / 60 + 1 / 180) / DAY_S
    assert one.redone == pytest.approx(rate_per_s * 1.25)
    assert one.lost_tokens == pytest.approx(rate_per_s * 2.0 * 3.5)
    # Three slots of 9 GB, two blocks of a third of it.
    assert one.memory_bytes == pytest.approx(3 * 9 * GB + 2 * 3 * GB, rel=1e-3)


def test_a_copy_that_does_not_hide_is_taken_at_the_best_interval() -> None:
    full = compared(assumed=replace(ASSUMED, step_s=0.5)).costs[0]
    rate_per_s = 4 * (1 / 60 + 1 / 180) / DAY_S
    assert full.stall_s == pytest.approx(0.4)
    assert full.interval_steps * 0.5 == pytest.approx((2 * 0.4 / rate_per_s) ** 0.5, abs=0.5)
    assert full.stalled == pytest.approx(0.4 / (full.interval_steps * 0.5))


def test_snapshots_are_no_more_frequent_than_protection_or_the_job_allow() -> None:
    slow = replace(ASSUMED, step_s=2.0, network_bytes_s=1e9)
    assert compared(assumed=slow).costs[0].interval_steps == 5  # 9 s on the network
    alone = job(redundancy={"type": "None"})
    assert compared(assumed=slow, of=alone).costs[0].interval_steps == 1
    rare = job(snapshot={"interval": {"steps": 30}})
    assert {cost.interval_steps for cost in compared(assumed=slow, of=rare).costs} == {30}


def test_k_doubles_from_the_first_as_long_as_experts_are_left_out() -> None:
    assert [cost.experts for cost in partial(compared())] == [1, 2, 4]
    assert [c.experts for c in partial(compared(assumed=replace(ASSUMED, first_k=3)))] == [3, 6]


def test_selective_captures_what_the_smaller_budget_holds() -> None:
    # 4 nodes · 1 s · 5 GB/s hold 4 GB of all else and 16 experts; half of it without redundancy.
    narrow = replace(ASSUMED, copy_bytes_s=5e9, network_bytes_s=3e9)
    assert selective(compared(assumed=narrow)).experts == 8
    alone = job(redundancy={"type": "None"})
    assert selective(compared(assumed=narrow, of=alone)).experts == 16
    tiny = replace(ASSUMED, copy_bytes_s=1.0)
    assert selective(compared(assumed=tiny)).experts == 1


def test_skewed_routing_makes_selective_lose_less_and_the_others_as_much() -> None:
    narrow = replace(ASSUMED, copy_bytes_s=3e9)
    even, skewed = (compared(assumed=replace(narrow, routing_skew=x)) for x in (0.0, 2.0))
    assert selective(skewed).lost_tokens < 0.7 * selective(even).lost_tokens
    assert partial(skewed) == partial(even)


# --- what is recommended --------------------------------------------------------------------------


def test_full_is_recommended_where_it_hides() -> None:
    found = compared()
    assert found.best.policy is PolicyType.FULL
    assert "hides behind a step of 1 s and no recovery loses a token" in found.reason


def test_a_window_is_recommended_where_full_does_not_hide() -> None:
    """It loses time as little as experts that are left out do, and no token."""
    often = replace(ASSUMED, step_s=0.6, process_failures_per_s=1 / DAY_S)
    found = compared(assumed=often)
    assert (found.best.policy, found.best.experts) == (PolicyType.SPARSE, 2)
    assert (found.best.stall_s, found.best.lost_tokens) == (0, 0)
    assert found.best.copy_s <= 0.6 < found.costs[0].copy_s
    assert found.best.interval_steps == 1
    assert found.best.repeats is Repeats.OPTIMIZER
    assert "nothing but the optimizer's step changes parameters" in found.reason
    by_training, by_optimizer = (cost for cost in found.costs if cost.policy is PolicyType.SPARSE)
    assert 1.5 * 2 < by_training.lost_steps < 1.5 * 2 + 2
    assert by_optimizer.lost_steps == pytest.approx(by_training.lost_steps - 2)
    assert by_optimizer.job_bytes == by_training.job_bytes


def test_a_slower_copy_takes_a_longer_window() -> None:
    windows, saves = [], []
    for step_s in (0.5, 0.3, 0.2, 0.15):
        found = compared(assumed=replace(ASSUMED, step_s=step_s)).costs
        sparse, _ = [cost for cost in found if cost.policy is PolicyType.SPARSE]
        windows.append(sparse.experts)
        saves.append(sparse.job_bytes)
    assert windows == sorted(set(windows)) and max(windows) <= WINDOW_MAX
    assert saves == sorted(saves, reverse=True)


def test_a_job_that_cannot_have_windows_is_shown_none() -> None:
    found = compared(assumed=replace(ASSUMED, step_s=0.5), of=job(**SELDOM))
    assert all(cost.policy is not PolicyType.SPARSE for cost in found.costs)


def test_the_largest_k_that_hides_is_recommended_where_neither_full_nor_windows_do() -> None:
    """One failure of a process a day and node: full snapshots cost a percent of the time."""
    often = replace(ASSUMED, step_s=0.6, process_failures_per_s=1 / DAY_S)
    found = compared(assumed=often, of=job(**SELDOM))
    assert (found.best.policy, found.best.experts) == (PolicyType.PARTIAL_EXPERTS, 4)
    assert found.best.stall_s == 0 < found.costs[0].stall_s
    assert "copy of 0.5 s hides behind a step of 0.6 s where Full's takes 0.9 s" in found.reason


def test_a_slow_network_is_named_where_it_decides() -> None:
    slow = replace(ASSUMED, network_bytes_s=0.01e9, process_failures_per_s=1 / DAY_S)
    found = compared(assumed=slow)
    assert found.best.policy is PolicyType.PARTIAL_EXPERTS
    assert "on the network where Full's takes 900 s" in found.reason


def test_k_that_would_grow_is_not_recommended() -> None:
    often = replace(ASSUMED, step_s=0.5, process_failures_per_s=1 / DAY_S)
    strict = compared(
        assumed=replace(often, loss_limit=1e-9, selective_loss_limit=1e-9), of=job(**SELDOM)
    )
    assert [cost.objection for cost in partial(strict)] == [
        "K would grow to 2",
        "K would grow to 4",
        "K would grow to 8",
    ]
    assert selective(strict).objection == "S would grow"
    assert strict.best.policy is PolicyType.FULL
    assert "does not hide behind a step of 0.5 s" in strict.reason


@given(models(), st.floats(0.05, 5), st.floats(0.05, 100))
def test_no_usable_policy_is_much_faster_or_as_fast_and_safer(
    sizes: ModelSizes, step_s: float, mtbf_days: float
) -> None:
    assumed = replace(ASSUMED, step_s=step_s, process_failures_per_s=1 / mtbf_days / DAY_S)
    found = compared(sizes, assumed)
    assert not found.best.objection
    for other in (cost for cost in found.costs if not cost.objection):
        assert found.best.overhead <= other.overhead + NEGLIGIBLE
        if other.overhead <= found.best.overhead:
            assert found.best.lost_tokens <= other.lost_tokens


# --- bad input ------------------------------------------------------------------------------------


def test_a_model_without_experts_has_nothing_to_choose() -> None:
    with pytest.raises(InvalidJobError, match="no experts to leave out"):
        compared(ModelSizes(experts={}, other_bytes=GB))


@pytest.mark.parametrize("field", ["copy_bytes_s", "network_bytes_s", "step_s"])
def test_zero_budgets_are_refused(field: str) -> None:
    with pytest.raises(InvalidJobError, match=f"{field}=0"):
        replace(ASSUMED, **{field: 0})


def test_a_k_below_1_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="first_k=0"):
        replace(ASSUMED, first_k=0)


def replicated(**policy: Any) -> MoETrainingJob:
    given: dict[str, Any] = {"snapshot": {"policy": policy}} if policy else {}
    return job(redundancy={"type": "Replication", "replication": {"replicas": 1}}, **given)


def test_gradients_cross_the_network_as_a_seventh_of_the_experts_state() -> None:
    cost = selective(compared(of=replicated()))
    experts = cost.job_bytes - SMALL.other_bytes
    assert cost.network_bytes == cost.job_bytes
    assert cost.recomputed_bytes == SMALL.other_bytes + experts // 7


def test_memory_counts_the_gradients_of_a_job_that_asks_for_them() -> None:
    without = selective(compared(of=replicated()))
    asked = selective(compared(of=replicated(type="Selective", selective={"recompute": True})))
    assert asked.memory_bytes == without.memory_bytes + without.gradient_bytes
    # Of 32 experts of a GB, 8 are on each node: in 3 slots and, for one replica, 2 blocks.
    assert without.gradient_bytes == pytest.approx(5 * 8 * GB / 7, rel=0.01)


def test_parity_and_full_snapshots_have_no_use_for_gradients() -> None:
    for cost in (*compared().costs, compared(of=replicated()).costs[0]):
        assert (cost.recomputed_bytes, cost.gradient_bytes) == (cost.network_bytes, 0)
