"""Which policy a job should use: the one whose simulated training loses the least time.

`policy_comparison` computes each policy's costs. Here a training with each policy is simulated
through the same failures, so that K grows as recoveries lose tokens, and failures during recoveries
count. Only policies that the job can ask for are compared and recommended.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from holdfast_cli.planner.effective_time.incidents import DrawOf
from holdfast_cli.planner.effective_time.policy_models import (
    Cluster,
    Level,
    PolicyModel,
    Workload,
)
from holdfast_cli.planner.effective_time.runs import Runs, simulate_many
from holdfast_cli.planner.models.policy_comparison import (
    Assumptions,
    Comparison,
    PolicyCost,
    best_of,
    reason_of,
)
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.snapshots import Repeats
from holdfast_core.protection.intervals import recoveries_per_s
from holdfast_core.snapshots.membership import Redundancy

DETECT_S, RESTART_S = 2.0, 5.0
"""Time from a failure until it is known, and from there to the next step, with any policy."""

RUNS, FAILURES = 8, 50
"""Trainings that are simulated with each policy, and failures of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The policies, and the one to use."""

    comparison: Comparison
    """With `best` and `reason` as the simulations have them."""
    runs: tuple[Runs, ...]
    """Simulated trainings with each of `comparison.costs`."""


def recommend(
    comparison: Comparison, job: MoETrainingJob, assumed: Assumptions, draw_of: DrawOf
) -> Recommendation:
    """Simulate the job with each policy, and choose among those that fit.

    There are always enough nodes: the time for which a job without spares waits is the same for
    each policy.

    Args:
        draw_of: gives a generator of its own for each seed; every policy sees the same failures.
    """
    # The same failures for all policies, at the job's own rates.
    redundant = job.spec.redundancy.type is not Redundancy.NONE
    nodes = job.spec.nodes
    rate_per_s = recoveries_per_s(
        nodes,
        node_losses_per_s=assumed.node_losses_per_s,
        process_failures_per_s=assumed.process_failures_per_s,
        redundant=redundant,
    )
    losses = nodes * assumed.node_losses_per_s / rate_per_s if redundant else 0.0
    cluster = Cluster(
        nodes=nodes,
        spares=RUNS * FAILURES * nodes,
        detect_s=DETECT_S,
        restart_s=RESTART_S,
        replacement_s=inf,
        node_losses=min(1.0, losses),
    )
    runs = tuple(
        simulate_many(
            _model(cost, comparison, assumed, rate_per_s, cluster.node_losses),
            Workload(step_s=assumed.step_s),
            cluster,
            1 / rate_per_s,
            runs=RUNS,
            length_s=FAILURES / rate_per_s,
            draw_of=draw_of,
        )
        for cost in comparison.costs
    )
    # Choose by simulated losses; the rest of the comparison stays.
    lost = {id(cost): 1 - each.ettr for cost, each in zip(comparison.costs, runs, strict=True)}
    best = best_of(comparison.fitting or comparison.costs, lambda cost: lost[id(cost)])
    chosen = Comparison(
        costs=comparison.costs,
        fitting=comparison.fitting,
        best=best,
        reason=reason_of(comparison.costs, best, assumed),
    )
    return Recommendation(comparison=chosen, runs=runs)


def _model(
    cost: PolicyCost,
    comparison: Comparison,
    assumed: Assumptions,
    rate_per_s: float,
    node_losses: float,
) -> PolicyModel:
    """A policy from its costs; the levels of one that grows are its later rows, and after them that
    of the policy that captures every unit."""
    levels = [cost]
    if cost.grows:
        same = [each for each in comparison.costs if each.policy is cost.policy]
        levels = [*same[same.index(cost) :], comparison.costs[0]]
    catches_up = cost.repeats is Repeats.OPTIMIZER
    whole = cost.experts if catches_up else 1  # a restore needs the whole window protected
    last = max(2 * each.experts for each in levels[:-1]) if len(levels) > 1 else cost.experts
    return PolicyModel(
        name=cost.policy.value,
        levels=tuple(
            Level(
                experts=each.experts if each is not comparison.costs[0] else last,
                interval_steps=each.interval_steps,
                stall_s=each.stall_s,
                lost_tokens=each.lost_tokens / rate_per_s / assumed.step_s,
                usable_after_s=each.copy_s + each.protect_s * whole * node_losses,
            )
            for each in levels
        ),
        loss_limit=assumed.loss_limit_of(cost.policy),
        window_steps=cost.window_steps,
        catches_up=catches_up,
    )
