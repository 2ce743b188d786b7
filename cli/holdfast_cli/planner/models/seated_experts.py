"""How often experts in seats outlive the loss of nodes, by the plans that a job's ranks would make.

Experts of a layer that have a copy on another node move from there, and training continues live
(Lazarus §4). Which sets of nodes are fatal depends on the plan, which ranks make anew for each
number of nodes. Layers are taken to route alike, so the plan of one holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from holdfast_core.elastic_experts.allocation import least_copies
from holdfast_core.elastic_experts.plans import ExpertRoom, PlanRules
from holdfast_core.elastic_experts.survival import NODES_MAX
from holdfast_core.job.parsing import MoETrainingJob

Survives = Callable[[int, int], float]
"""Function from a number of nodes, and how many of these are lost at once, to the probability that
a copy of every expert is left."""

_TOKENS = 1_000_000
"""Tokens of a layer, of which experts get their portions: only ratios matter."""


def two_copies(nodes: int, lost: int) -> float:
    """Survival of experts that are each on two nodes at least, where no plan is known: of one lost
    node, and of no more."""
    del nodes
    return float(lost < 2)


def fewest_nodes(job: MoETrainingJob, experts: int) -> int:
    """The fewest nodes whose seats hold all experts of a layer; 1 if the job has no seats."""
    elastic = job.spec.elastic
    if elastic is None:
        return 1
    return -(-experts // (elastic.seats_per_rank * job.spec.nproc_per_node))


def survives_in_seats(job: MoETrainingJob, portions: Sequence[float]) -> Survives | None:
    """Survival of the experts of a job with `spec.elastic`; None for a job without.

    Args:
        portions: portions of a layer's tokens that its experts get.

    Raises:
        InvalidJobError: when the function is called for nodes whose seats cannot hold all experts.
    """
    elastic, nproc = job.elastic, job.spec.nproc_per_node
    if elastic is None:
        return None
    rules, seats = PlanRules.of_job(elastic), elastic.seats_per_rank
    tokens = [round(_TOKENS * portion) for portion in portions]

    @cache
    def survival(nodes: int) -> Sequence[float]:
        if nodes > NODES_MAX:  # No plan is made for as many.
            copies = least_copies(len(tokens), nodes, nproc * seats, rules.min_copies)
            return [1.0] * copies
        plan = rules.plan([tokens], ExpertRoom(nodes=nodes, rank_seats=seats, nproc=nproc))
        return [plan.chosen.survival.probability(lost) for lost in range(nodes + 1)]

    def survives(nodes: int, lost: int) -> float:
        known = survival(nodes)
        return known[lost] if lost < len(known) else 0.0

    return survives
