"""The expert plan that a job asks for."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast._elastic.world import World
from holdfast._environment import read_environment
from holdfast_core.elastic_experts.plans import ExpertPlan, ExpertRoom, PlanRules, seats_needed


def plan_of_job(loads: Sequence[Sequence[int]], world: World) -> ExpertPlan:
    """Plan the copies of all layers for the ranks of `world`, by the job's `spec.elastic`. Without
    that, ranks have as few seats as two copies of each expert need. Equal on all ranks.

    Args:
        loads: for each layer the tokens that each expert receives; only their ratios matter.

    Raises:
        InvalidJobError: when experts do not fit, or `HOLDFAST_ELASTIC` cannot be read.
    """
    given, nodes = read_environment().elastic, world.size // world.nproc
    if given is None:
        rules = PlanRules()
        seats = seats_needed(max(map(len, loads)), nodes, world.nproc, rules.min_copies)
    else:
        rules, seats = PlanRules.of_job(given), given.seats_per_rank
    return rules.plan(loads, ExpertRoom(nodes=nodes, nproc=world.nproc, rank_seats=seats))
