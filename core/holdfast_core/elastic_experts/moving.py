"""Moves of experts that lead from one plan to another (Lazarus §4.3).

A plan does not depend on which node is which. So its nodes are mapped to the present nodes such
that as few experts as possible have to be sent. All layers share one mapping, because layers with
different orders would survive fewer losses. Experts that a rank then lacks come from the ranks that
hold them, evenly divided among those.

Pure: every rank computes the same moves from the experts that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast_core.elastic_experts.plans import ExpertPlan

Held = Sequence[Sequence[Sequence[int]]]
"""For each rank and layer the experts in its seats; nothing for a rank without any."""


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """An expert of a layer that one rank sends to another."""

    layer: int
    expert: int
    source: int
    target: int


def renumbered(plan: ExpertPlan, held: Held) -> ExpertPlan:
    """`plan` with the mapping of nodes, and of the ranks of each, that moves few experts: with one
    rank on each node the fewest.

    Args:
        held: what the ranks hold for which the plan is.
    """
    nproc, nodes = plan.room.nproc, plan.room.nodes
    has = _holdings(held, plan)
    wants = np.zeros_like(has)
    for at, layer in enumerate(plan.layers):
        for expert, holders in enumerate(layer.copies):
            wants[[rank for rank, _ in holders], at, expert] = True
    ranks = plan.room.ranks
    lacking = (
        wants.reshape(ranks, -1).astype(np.int64) @ (~has).reshape(ranks, -1).astype(np.int64).T
    )
    by_lane = lacking.reshape(nodes, nproc, nodes, nproc).swapaxes(1, 2)
    # Which rank of a node gets what is chosen later: here each takes the one that has most of it.
    node_of = cheapest(by_lane.min(axis=3).sum(axis=2))
    rank_of = []
    for planned, node in enumerate(node_of):
        rank_of += [node * nproc + lane for lane in cheapest(by_lane[planned, node])]
    return plan.moved_to(rank_of)


def moves_of(plan: ExpertPlan, held: Held) -> tuple[ExpertMove, ...]:
    """What ranks have to send each other until all hold what `plan` says, by layer, expert and
    target. Experts with fewest holders come first, each from the holder that sends least so far,
    one on the target's node where it makes no difference, or else the lowest.

    Args:
        held: together all experts.
    """
    has, nproc = _holdings(held, plan), plan.room.nproc
    wanted = [
        (np.flatnonzero(has[:, at, expert]).tolist(), at, expert, target)
        for at, layer in enumerate(plan.layers)
        for expert, holders in enumerate(layer.copies)
        for target, _ in holders
        if not has[target, at, expert]
    ]
    sent = [0] * plan.room.ranks
    found = []
    for sources, at, expert, target in sorted(wanted, key=lambda one: (len(one[0]), one[1:])):
        near = {source for source in sources if source // nproc == target // nproc}
        source = min(sources, key=lambda rank: (sent[rank], rank not in near, rank))
        sent[source] += 1
        found.append(ExpertMove(at, expert, source, target))
    return tuple(sorted(found, key=lambda one: (one.layer, one.expert, one.target)))


def seats_after(before: Sequence[int | None], experts: Sequence[int]) -> tuple[int | None, ...]:
    """Seats of a rank that is to hold `experts`: whoever stays keeps its seat, and the others take
    the free ones in their order."""
    staying = [expert if expert in experts else None for expert in before]
    coming = (expert for expert in experts if expert not in staying)
    return tuple(next(coming, None) if expert is None else expert for expert in staying)


def cheapest(cost: NDArray[np.int64]) -> list[int]:
    """For each row its column, so that all rows have different ones and the sum of `cost` is least.
    The Hungarian method with potentials, in cubic time.

    Args:
        cost: [n, n].
    """
    n = len(cost)
    of_row, of_column = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    row_at = np.zeros(n + 1, dtype=np.int64)  # rows and columns count from 1; 0 is none
    for row in range(1, n + 1):
        row_at[0], column = row, 0
        least = np.full(n + 1, np.iinfo(np.int64).max)
        way = np.zeros(n + 1, dtype=np.int64)
        used = np.zeros(n + 1, dtype=bool)
        while row_at[column]:
            used[column] = True
            here = row_at[column]
            reduced = cost[here - 1] - of_row[here] - of_column[1:]
            better = ~used[1:] & (reduced < least[1:])
            least[1:][better] = reduced[better]
            way[1:][better] = column
            nearest = int(np.where(used[1:], np.iinfo(np.int64).max, least[1:]).argmin()) + 1
            step = least[nearest]
            of_row[row_at[used]] += step
            of_column[used] -= step
            least[~used] -= step
            column = nearest
        while column:
            row_at[column] = row_at[way[column]]
            column = int(way[column])
    found = np.empty(n, dtype=np.int64)
    found[row_at[1:] - 1] = np.arange(n)
    return [int(column) for column in found]


def _holdings(held: Held, plan: ExpertPlan) -> NDArray[np.bool_]:
    """[ranks, layers, experts]: who holds what."""
    holds = np.zeros((len(held), len(plan.layers), len(plan.layers[0].copies)), dtype=bool)
    for rank, layers in enumerate(held):
        for at, experts in enumerate(layers):
            holds[rank, at, list(experts)] = True
    return holds
