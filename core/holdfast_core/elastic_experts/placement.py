"""Placement of the copies of one layer's experts on nodes.

Maximum-rank-overlap (MRO, Lazarus §4.1) puts experts with equally few copies on the same nodes, so
that few sets of lost nodes are fatal. The paper's theorem 1 calls every such placement optimal.
That is true if the groups' nodes are disjoint or one node holds all experts. Otherwise the last
group is cut off: better placements may exist, and two copies of an expert may even lie on the same
node. Then an exchange of copies improves it (`climb`), and `repair` gives every expert the nodes
that its copies were meant for. `spread` deals copies evenly, which balances the load of nodes.

A placement is an array [experts, nodes] of numbers of copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

CLIMB_NODES_MAX = 24
"""Most nodes with which copies are exchanged for a better placement."""
_CLIMB_SETS_MAX = 5000
"""Sets of lost nodes that exchanges are judged by, smallest first: all of them up to 12 nodes."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Experts of a layer in groups of as many as a node has seats for, fewest copies first."""

    sizes: tuple[int, ...]
    """Number of experts in each group."""
    nodes: tuple[int, ...]
    """Number of nodes that hold one copy of each expert of the group: disjoint sets."""
    optimal: bool
    """Whether the corrected theorem calls the placement optimal for every number of lost nodes."""


def groups_of(copies: Sequence[int], nodes: int, node_seats: int) -> Groups:
    """Form the groups of MRO (Lazarus §4.1): q_i nodes for group i, where q_i is the number of
    copies of its first expert; for the last group what is left, if that is less.

    Args:
        copies: of each expert, ascending.
    """
    wanted = list(copies[::node_seats])
    left = nodes - sum(wanted[:-1])
    return Groups(
        sizes=tuple(len(copies[at : at + node_seats]) for at in range(0, len(copies), node_seats)),
        nodes=(*wanted[:-1], min(left, wanted[-1])),
        optimal=len(wanted) == 1 or wanted[-1] <= left,
    )


def place_groups(
    groups: Groups, copies: Sequence[int], nodes: int, node_seats: int, core: Sequence[int]
) -> Counts:
    """Place each group on nodes of its own, and then the copies that are left, each on the node
    with most free seats that lacks the expert, or else with any free seat.

    Args:
        copies: of each expert, ascending.
        core: for each group a number of nodes, at most the group's. The first nodes are divided
            into blocks of these sizes, and each group takes its block and further nodes behind
            them. Layers with the same `core` then share the blocks.
    """
    placed = np.zeros((len(copies), nodes), dtype=np.int64)
    first, start, behind = 0, 0, sum(core)
    for size, count, block in zip(groups.sizes, groups.nodes, core, strict=True):
        own = [*range(start, start + block), *range(behind, behind + count - block)]
        placed[first : first + size, own] = 1
        first, start, behind = first + size, start + block, behind + count - block
    free = node_seats - placed.sum(axis=0)
    for expert, count in enumerate(copies):
        left = count - int(placed[expert].sum())
        if not left:
            continue
        without = np.where(placed[expert] == 0, free, 0)
        chosen = (-without).argsort(kind="stable")[: min(left, np.count_nonzero(without))]
        placed[expert, chosen] += 1
        free[chosen] -= 1
        for _ in range(left - len(chosen)):
            node = int(free.argmax())
            placed[expert, node] += 1
            free[node] -= 1
    return placed


def spread(copies: Sequence[int], nodes: int, node_seats: int) -> Counts:
    """Deal copies to the nodes in turn, most copies first: each to the next node with a free seat
    that lacks the expert, or else to the next with any free seat.

    Args:
        copies: of each expert, ascending.
    """
    rows: list[list[int]] = []
    free, turn = [node_seats] * nodes, 0
    for count in reversed(copies):
        row = [0] * nodes
        for _ in range(count):
            node = turn
            while not free[node] or row[node]:
                node = (node + 1) % nodes
                if node == turn:  # all nodes with a free seat have the expert
                    while not free[node]:
                        node = (node + 1) % nodes
                    break
            row[node] += 1
            free[node] -= 1
            turn = (node + 1) % nodes
        rows.append(row)
    return np.array(rows[::-1], dtype=np.int64)


def repair(placed: Counts, least: int) -> Counts:
    """Exchange copies until each expert lies on `least` nodes, or on as many as it has copies.

    An expert below that has two copies on some node a. Node a has at most two experts fewer than
    it has seats besides this one, so any node without the expert has one that a lacks, or a second
    copy of one: exchanging it leaves no other expert on fewer nodes.
    """
    placed = placed.copy()
    while True:
        on = (placed > 0).sum(axis=1)
        below = np.flatnonzero(on < np.minimum(least, placed.sum(axis=1)))
        if not below.size:
            return placed
        expert = int(below[0])
        a = int(placed[expert].argmax())
        b, other = next(
            (int(b), int(other))
            for b in np.flatnonzero(placed[expert] == 0)
            for other in np.flatnonzero(placed[:, b])
            if placed[other, a] == 0 or placed[other, b] > 1
        )
        _exchange(placed, expert, a, other, b)


def _exchange(placed: Counts, x: int, a: int, y: int, b: int) -> None:
    """Exchange a copy of x on node a against a copy of y on node b."""
    placed[x, a] -= 1
    placed[x, b] += 1
    placed[y, b] -= 1
    placed[y, a] += 1


class _LostSets:
    """Sets of lost nodes, the smallest first, as bits of integers."""

    def __init__(self, nodes: int) -> None:
        subsets: list[tuple[int, ...]] = []
        self.masks: list[int] = []
        """For each number of lost nodes, the bits of its sets."""
        for size in range(nodes + 1):
            count = comb(nodes, size)
            if len(subsets) + count > _CLIMB_SETS_MAX:
                break
            self.masks.append(((1 << count) - 1) << len(subsets))
            subsets += combinations(range(nodes), size)
        self.all = (1 << len(subsets)) - 1
        self.with_node = [
            sum(1 << at for at, subset in enumerate(subsets) if node in subset)
            for node in range(nodes)
        ]

    def fatal_to(self, counts: Sequence[int]) -> int:
        """The sets that contain every node on which `counts` has a copy."""
        sets = self.all
        for with_node, count in zip(self.with_node, counts, strict=True):
            if count:
                sets &= with_node
        return sets

    def numbers(self, fatal: int) -> tuple[int, ...]:
        """How many of the `fatal` sets there are of each size."""
        return tuple((fatal & mask).bit_count() for mask in self.masks)


@lru_cache(maxsize=4)
def _lost_sets(nodes: int) -> _LostSets:
    return _LostSets(nodes)


def fatal_sets(placed: Counts) -> tuple[int, ...]:
    """Fatal sets of lost nodes by their size, smallest first: compared in this order, the least is
    the best. At most `CLIMB_NODES_MAX` nodes."""
    cases = _lost_sets(placed.shape[1])
    fatal = 0
    for counts in placed.tolist():
        fatal |= cases.fatal_to(counts)
    return cases.numbers(fatal)


def climb(placed: Counts, exchanges_max: int) -> Counts:
    """Exchange copies of two experts between two nodes, the best exchange first, as long as one
    leaves fewer fatal sets of lost nodes, fewest small ones before all.

    Args:
        placed: at most `CLIMB_NODES_MAX` nodes.
        exchanges_max: exchanges to look at; the best so far is returned.
    """
    placed, cases = placed.copy(), _lost_sets(placed.shape[1])
    best, left = fatal_sets(placed), exchanges_max
    while left > 0:
        best_move, best, left = _best_exchange(placed.tolist(), cases, best, left)
        if best_move is None:
            break
        _exchange(placed, *best_move)
    return placed


def _best_exchange(
    rows: list[list[int]], cases: _LostSets, best: tuple[int, ...], left: int
) -> tuple[tuple[int, int, int, int] | None, tuple[int, ...], int]:
    """The exchange (x, a, y, b) that leaves the fewest fatal sets, if fewer than `best`; their
    numbers, and how many further exchanges may be looked at."""
    fatal = [cases.fatal_to(row) for row in rows]
    behind = [0]
    for one in reversed(fatal):
        behind.append(behind[-1] | one)
    behind.reverse()
    move = None
    before = 0
    for x, row_x in enumerate(rows):
        between = 0
        for y in range(x + 1, len(rows)):
            others = before | between | behind[y + 1]
            between |= fatal[y]
            if cases.numbers(others) >= best:
                continue  # whatever becomes of x and y
            row_y = rows[y]
            for a in (node for node, count in enumerate(row_x) if count):
                for b in (node for node, count in enumerate(row_y) if count and node != a):
                    left -= 1
                    row_x[a] -= 1
                    row_x[b] += 1
                    row_y[b] -= 1
                    row_y[a] += 1
                    fatal_numbers = cases.numbers(
                        others | cases.fatal_to(row_x) | cases.fatal_to(row_y)
                    )
                    row_x[a] += 1
                    row_x[b] -= 1
                    row_y[b] += 1
                    row_y[a] -= 1
                    if fatal_numbers < best:
                        move, best = (x, a, y, b), fatal_numbers
            if left <= 0:
                return move, best, 0
        before |= fatal[x]
    return move, best, left
