"""The recommendation by simulated trainings: near the formulas, cheap, and only what is built."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from holdfast_cli.planner.effective_time.incidents import Draw
from holdfast_cli.planner.effective_time.runs import Activity
from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_cli.planner.models.policy_comparison import (
    NEGLIGIBLE,
    Assumptions,
    compare_policies,
)
from holdfast_cli.planner.models.recommending import (
    DETECT_S,
    FAILURES,
    RESTART_S,
    RUNS,
    Recommendation,
    recommend,
)
from holdfast_core.job.parsing import MoETrainingJob, PolicyType, parse_job
from holdfast_core.protection.groups import form_groups

DAY_S = 86400.0
SIZES = ModelSizes.even(layers=12, experts=16, expert_bytes=335_000_000, other_bytes=8_000_000_000)
HIDES = Assumptions(
    copy_bytes_s=10e9,
    network_bytes_s=10e9,
    step_s=2.0,
    node_losses_per_s=1 / 180 / DAY_S,
    process_failures_per_s=1 / 10 / DAY_S,
)
STALLS = replace(HIDES, copy_bytes_s=2.5e9)


def draw_of(seed: int) -> Draw:
    return random.Random(seed).random


def job(**spec: object) -> MoETrainingJob:
    container = {"name": "t", "image": "i", "command": ["t"]}
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "j"},
            "spec": {
                "nodes": 4,
                "nprocPerNode": 2,
                "parallelism": {"dp": 8, "ep": 8},
                "trainer": {"template": {"spec": {"containers": [container]}}},
                **spec,
            },
        }
    )


def advice(assumed: Assumptions, of: MoETrainingJob | None = None) -> Recommendation:
    of = of or job()
    groups = form_groups(dict.fromkeys(range(4), ""), of.group_size).groups
    return recommend(compare_policies(of, SIZES, groups, assumed), of, assumed, draw_of)


@pytest.mark.parametrize("assumed", [HIDES, STALLS], ids=["hides", "stalls"])
def test_simulations_lose_what_the_formulas_have(assumed: Assumptions) -> None:
    """Within a quarter, beside detection and restart, which the formulas leave out."""
    found = advice(assumed)
    rate_per_s = 4 * (assumed.node_losses_per_s + assumed.process_failures_per_s)
    for cost, runs in zip(found.comparison.costs, found.runs, strict=True):
        lost = runs.portions[Activity.STALLED] + runs.portions[Activity.REDOING]
        assert lost == pytest.approx(cost.overhead, rel=0.25, abs=1e-6)
        repairs = runs.portions[Activity.DETECTING] + runs.portions[Activity.RESTARTING]
        assert repairs == pytest.approx(rate_per_s * (DETECT_S + RESTART_S), rel=0.1)
        assert runs.failures == pytest.approx(FAILURES, rel=0.15)
        assert runs.lost_tokens == pytest.approx(cost.lost_tokens, rel=0.4, abs=1e-6)


def test_the_recommendation_is_that_of_the_least_time_lost() -> None:
    found = advice(STALLS)
    comparison = found.comparison
    by_cost = dict(zip((id(cost) for cost in comparison.costs), found.runs, strict=True))
    most = max(by_cost[id(cost)].ettr for cost in comparison.costs if not cost.objection)
    assert by_cost[id(comparison.best)].ettr >= most - NEGLIGIBLE
    assert comparison.best.policy is PolicyType.SPARSE
    assert comparison.reason
    seldom = job(snapshot={"interval": {"steps": 2}})
    assert advice(STALLS, seldom).comparison.best.policy is PolicyType.PARTIAL_EXPERTS
    assert advice(HIDES).comparison.best.policy is PolicyType.FULL


def test_only_policies_of_this_version_are_recommended() -> None:
    """Sparse windows are only for saves that a step does not hide, and need every step."""
    always = {PolicyType.FULL, PolicyType.PARTIAL_EXPERTS, PolicyType.SELECTIVE}
    seldom = job(snapshot={"interval": {"steps": 2}})
    for assumed, of, more in (
        (HIDES, job(), set()),
        (STALLS, job(), {PolicyType.SPARSE}),
        (STALLS, job(persistence={"uri": "s3://bucket/run1"}), {PolicyType.SPARSE}),
        (STALLS, seldom, set()),
    ):
        policies = {cost.policy for cost in advice(assumed, of).comparison.costs}
        assert policies == always | more


def test_it_takes_some_thousand_events_and_one_history() -> None:
    """A plan answers in a moment: simulations here make some 100,000 events a second."""
    found = advice(STALLS)
    assert sum(runs.events for runs in found.runs) < 60_000
    assert len(found.runs) == len(found.comparison.costs)
    assert advice(STALLS) == found
    assert RUNS * FAILURES >= 400


def test_k_grows_in_the_simulation_where_recoveries_lose_too_much() -> None:
    frequent = replace(STALLS, process_failures_per_s=1 / 400, loss_limit=0.01)
    found = advice(frequent)
    (first,) = (
        runs
        for cost, runs in zip(found.comparison.costs, found.runs, strict=True)
        if cost.policy is PolicyType.PARTIAL_EXPERTS and cost.experts == 1
    )
    assert first.experts > 1


def test_without_redundancy_lost_nodes_are_not_simulated() -> None:
    of = job(redundancy={"type": "None"})
    found = recommend(compare_policies(of, SIZES, (), STALLS), of, STALLS, draw_of)
    assert found.comparison.best in found.comparison.costs
