"""Every way to place copies of experts on a few nodes, to judge what an algorithm finds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement

SHAPES = [
    (2, 2, 3), (3, 2, 2), (3, 2, 3), (3, 2, 4), (4, 2, 3), (4, 2, 4), (5, 2, 3), (4, 3, 4),
    (3, 3, 5), (3, 3, 4), (4, 1, 3), (5, 1, 4), (4, 2, 5), (5, 2, 4), (4, 2, 6), (5, 2, 5),
]  # fmt: skip
"""(nodes, seats of a node, experts)."""

Columns = tuple[tuple[int, ...], ...]
"""For each node the experts in its seats."""


def copy_counts(nodes: int, seats: int, experts: int) -> Iterator[tuple[int, ...]]:
    """All ascending numbers of copies that fill the seats."""

    def rest(left: int, experts: int, least: int) -> Iterator[tuple[int, ...]]:
        if experts == 1:
            yield (left,)
            return
        for count in range(least, left // experts + 1):
            for others in rest(left - count, experts - 1, count):
                yield (count, *others)

    return rest(nodes * seats, experts, 1)


def placements(copies: tuple[int, ...], nodes: int, seats: int) -> Iterator[Columns]:
    """All placements, up to the order of the nodes."""
    columns = list(combinations_with_replacement(range(len(copies)), seats))

    def rest(left: tuple[int, ...], nodes: int, first: int) -> Iterator[Columns]:
        if not nodes:
            yield ()
            return
        for at in range(first, len(columns)):
            taken = tuple(n - columns[at].count(e) for e, n in enumerate(left))
            if min(taken) >= 0:
                for others in rest(taken, nodes - 1, at):
                    yield (columns[at], *others)

    return rest(copies, nodes, 0)


def fatal_by_size(columns: Columns, experts: int) -> tuple[int, ...]:
    """For k = 0 … nodes, the sets of k lost nodes that leave some expert without a copy."""
    nodes = range(len(columns))
    return tuple(
        sum(
            len({e for node in alive for e in columns[node]}) < experts
            for alive in combinations(nodes, len(columns) - lost)
        )
        for lost in range(len(columns) + 1)
    )
