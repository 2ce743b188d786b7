"""How many copies each expert of a layer gets, by the tokens that it receives.

Two rules. `PROPORTIONAL` is eq. (1) of Lazarus §4.1, which gives what all floors leave over to the
most popular expert. `MIN_MAX` gives each further copy to the expert with most tokens for each copy,
which is optimal for the tokens of the busiest copy.

This module does not place copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.elastic import Allocation


def least_copies(experts: int, nodes: int, node_seats: int, min_copies: int) -> int:
    """Copies that every expert of a layer gets at least: `min_copies`, or as many as fit.

    More copies than nodes would protect against nothing, so there are at most `nodes`.

    Args:
        node_seats: seats for copies of one layer on each node.

    Raises:
        InvalidJobError: when not even one copy of each expert fits, or a number is below 1.
    """
    if min(experts, nodes, node_seats, min_copies) < 1:
        raise InvalidJobError(
            f"{experts} experts on {nodes} nodes with {node_seats} seats each and at least "
            f"{min_copies} copies: give numbers of at least 1"
        )
    fit = nodes * node_seats // experts
    if not fit:
        raise InvalidJobError(
            f"{experts} experts of a layer do not fit {nodes} nodes with {node_seats} seats each; "
            f"use at least {-(-experts // nodes)} seats on each node"
        )
    return min(min_copies, fit, nodes)


def allocate(
    rule: Allocation, loads: Sequence[int], nodes: int, node_seats: int, min_copies: int
) -> list[int]:
    """Number of copies of each expert of a layer; together they fill all seats.

    Args:
        loads: tokens that each expert receives.

    Raises:
        InvalidJobError: as `least_copies`, and when a load is below 0.
    """
    if any(load < 0 for load in loads):
        raise InvalidJobError(f"loads {list(loads)}: an expert receives at least 0 tokens")
    least = least_copies(len(loads), nodes, node_seats, min_copies)
    if rule is Allocation.PROPORTIONAL:
        return _proportional(loads, nodes * node_seats, least)
    return _min_max(loads, nodes * node_seats, least)


def _proportional(loads: Sequence[int], seats: int, least: int) -> list[int]:
    """Eq. (1) of Lazarus §4.1, with ties by the expert's number."""
    if not any(loads):
        loads = [1] * len(loads)
    order = sorted(range(len(loads)), key=lambda expert: (loads[expert], expert))
    copies = [0] * len(loads)
    tokens = sum(loads)
    for expert in order:
        copies[expert] = max(loads[expert] * seats // tokens, least)
        seats -= copies[expert]
        tokens -= loads[expert]
    return copies


def _min_max(loads: Sequence[int], seats: int, least: int) -> list[int]:
    copies = [least] * len(loads)
    # Division rounds correctly, so all machines order these floats alike.
    busiest = [(-load / least, expert) for expert, load in enumerate(loads)]
    heapq.heapify(busiest)
    for _ in range(seats - least * len(loads)):
        _, expert = busiest[0]
        copies[expert] += 1
        heapq.heapreplace(busiest, (-loads[expert] / copies[expert], expert))
    return copies
