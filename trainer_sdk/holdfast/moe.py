"""Mixture-of-Experts layers whose experts have uneven numbers of copies.

    plan = moe.plan_of_job(loads, world)                    # as spec.elastic of the job says
    group = world.group([range(world.size)])
    layer = moe.MoELayer(dim, 4 * dim, plan, 0, group)     # in the model, for each layer
    gradients = moe.SummedGradients(model, group)
    …
    out, balance = layer(tokens)
    (loss_of_own_tokens / tokens_of_all_ranks + 0.01 * balance).backward()
    gradients.sum()
    gradients.clip(1.0)
    optimizer.step()

Popular experts have more copies, tokens find one with room, and none is dropped (Lazarus, §4).
docs/elastic.md explains the plan, and what works with it so far.
"""

from __future__ import annotations

from holdfast._moe.checks import check_copies, check_optimizer
from holdfast._moe.dispatcher import Dispatcher
from holdfast._moe.gradients import SummedGradients
from holdfast._moe.layer import Gate, MoELayer, SeatedExperts
from holdfast._moe.planning import plan_of_job
from holdfast_core.elastic_experts.plans import ExpertPlan, ExpertRoom, plan_experts
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
    "SummedGradients",
    "check_copies",
    "check_optimizer",
    "plan_experts",
    "plan_of_job",
]
