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

from torch import nn

from holdfast._elastic.world import World, WorldGroup
from holdfast._environment import read_environment
from holdfast._moe.checks import check_copies, check_optimizer
from holdfast._moe.dispatcher import Dispatcher
from holdfast._moe.gradients import SummedGradients
from holdfast._moe.layer import Gate, MoELayer, SeatedExperts
from holdfast._moe.modules import SeatedModules
from holdfast._moe.placed import PlacedExperts, blocks_of, number_of_experts, whole_state_dict
from holdfast_core.elastic_experts.plans import (
    ExpertPlan,
    ExpertRoom,
    PlanRules,
    plan_experts,
    seats_needed,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.elastic import Allocation, Placement

__all__ = [
    "Allocation",
    "Dispatcher",
    "ExpertPlan",
    "ExpertRoom",
    "Gate",
    "MoELayer",
    "PlacedExperts",
    "Placement",
    "SeatedExperts",
    "SeatedModules",
    "SummedGradients",
    "check_copies",
    "check_optimizer",
    "place_experts",
    "plan_experts",
    "plan_of_job",
    "whole_state_dict",
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


def place_experts(
    model: nn.Module, world: World, group: WorldGroup, *, plan: ExpertPlan | None = None
) -> ExpertPlan:
    """Place the experts of all MoE blocks of a transformers model on the ranks, and return the
    plan. Call it after the weights are loaded, equally on all ranks, and before the optimizer is
    made.

    The experts of each block give way to `PlacedExperts`. Everything else of the model stays as it
    is, with the names of all parameters; `whole_state_dict` returns what the model had before.

    Args:
        model: a model of transformers 5 on the device where it trains, or in host memory.
        group: the group of all ranks: `world.group([range(world.size)])`.
        plan: places the copies; by default `plan_of_job` for equal loads.

    Raises:
        InvalidJobError: the model has no MoE block of transformers, its experts are of another
            kind, or its blocks have different numbers of experts; or the plan does not fit.
    """
    blocks = list(blocks_of(model))
    counts = [number_of_experts(experts) for _, experts in blocks]
    if not counts or len(set(counts)) > 1:
        raise InvalidJobError(
            f"the model has MoE blocks of {counts} experts: an expert plan needs at least one, and "
            f"equally many experts in each"
        )
    plan = plan or plan_of_job([[1] * count for count in counts], world)
    if len(plan.layers) != len(blocks):
        raise InvalidJobError(
            f"the expert plan has {len(plan.layers)} layers, and the model {len(blocks)} MoE "
            f"blocks; plan for the layers that the model has"
        )
    for layer, (block, experts) in enumerate(blocks):
        block.experts = PlacedExperts(experts, plan, layer, group).train(experts.training)
    return plan
