"""Mixture-of-Experts layers whose experts have uneven numbers of copies.

    plan = moe.plan_of_job(loads, world)                    # by the job's spec.elastic
    group = world.group([range(world.size)])
    layer = moe.MoELayer(dim, 4 * dim, plan, 0, group)     # one for each layer of the model
    gradients = moe.SummedGradients(model, group)
    …
    out, balance = layer(tokens)
    (loss_of_own_tokens / tokens_of_all_ranks + 0.01 * balance).backward()
    gradients.sum()
    gradients.clip(1.0)
    optimizer.step()

Popular experts have more copies. Each token goes to a copy with room, and no token is dropped
(Lazarus, §4). docs/elastic.md explains the plan, and which features work with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast._elastic.world import World
from holdfast._environment import read_environment
from holdfast._moe.checks import check_copies, check_optimizer
from holdfast._moe.dispatcher import Dispatcher
from holdfast._moe.gradients import SummedGradients
from holdfast._moe.layer import Gate, MoELayer, SeatedExperts
from holdfast._moe.modules import SeatedModules
from holdfast_core.elastic_experts.plans import (
    ExpertPlan,
    ExpertRoom,
    PlanRules,
    plan_experts,
    seats_needed,
)
from holdfast_core.job.elastic import Allocation, Placement

__all__ = [
    "Allocation",
    "Dispatcher",
    "ExpertPlan",
    "ExpertRoom",
    "Gate",
    "MoELayer",
    "Placement",
    "SeatedExperts",
    "SeatedModules",
    "SummedGradients",
    "check_copies",
    "check_optimizer",
    "plan_experts",
    "plan_of_job",
]


def plan_of_job(loads: Sequence[Sequence[int]], world: World) -> ExpertPlan:
    """Plan the copies of the experts of all layers for the ranks of `world`, as the job's
    `spec.elastic` asks. Without `spec.elastic`, each rank has as many seats as two copies of every
    expert need. The plan is equal on all ranks.

    Args:
        loads: for each layer, the tokens that each expert receives; only their ratios matter.

    Raises:
        InvalidJobError: the experts do not fit into the seats, or `HOLDFAST_ELASTIC` is invalid.
    """
    given, nodes = read_environment().elastic, world.size // world.nproc
    if given is None:
        rules = PlanRules()
        seats = seats_needed(max(map(len, loads)), nodes, world.nproc, rules.min_copies)
    else:
        rules, seats = PlanRules.of_job(given), given.seats_per_rank
    return rules.plan(loads, ExpertRoom(nodes=nodes, nproc=world.nproc, rank_seats=seats))
