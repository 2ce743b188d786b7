"""Assignment of each rank's tokens to the copies of their experts (Lazarus §4.2, algorithm 1).

Every rank computes the same assignment from the same counts, so only the counts are exchanged. Each
copy of an expert takes an equal part of its tokens, up to rounding; a rank keeps its own tokens as
far as its copies have room, and sends the rest to ranks of its node first.

The paper's listing loses tokens: it divides by the wrong numbers in two places and shares are real
numbers. Here capacities are rounded along the ranks and surplus meets room as intervals do: sums
are exact, and an expert's tokens take at most ranks - 1 messages between ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


def flows(tokens: Tokens, copies: Tokens, rank: int, nproc: int) -> tuple[Tokens, Tokens]:
    """Tokens that `rank` sends to each rank, and receives from each, including itself.

    Args:
        tokens: [ranks, experts], routed on each rank to each expert. Each choice of a token counts
            as one.
        copies: [experts, ranks], of each expert on each rank; at least one of each.
        nproc: ranks of each node, consecutive.

    Returns:
        Two arrays [experts, ranks]: sent to the rank, and received from the rank.
    """
    routed = tokens.T
    capacities = _capacities(routed.sum(axis=1), copies)
    kept = np.minimum(routed, capacities)
    surplus, room = routed - kept, capacities - kept
    nodes = (len(copies), copies.shape[1] // nproc, nproc)
    near_surplus, near_room = surplus.reshape(nodes), room.reshape(nodes)
    node = slice(rank - rank % nproc, rank - rank % nproc + nproc)
    sent, received = np.zeros_like(copies), np.zeros_like(copies)
    sent[:, node] = _meeting(surplus[:, node], room[:, node], rank % nproc)
    received[:, node] = _meeting(room[:, node], surplus[:, node], rank % nproc)
    met = np.minimum(near_surplus.sum(axis=2), near_room.sum(axis=2))[:, :, None]
    far_surplus = (near_surplus - _first(near_surplus, met)).reshape(copies.shape)
    far_room = (near_room - _first(near_room, met)).reshape(copies.shape)
    sent += _meeting(far_surplus, far_room, rank)
    received += _meeting(far_room, far_surplus, rank)
    sent[:, rank] += kept[:, rank]
    received[:, rank] += kept[:, rank]
    return sent, received


def _capacities(total: Tokens, copies: Tokens) -> Tokens:
    """Tokens of each expert that each rank takes: t · R_j / Σ R, rounded along the ranks."""
    ends = copies.cumsum(axis=1)
    bounds: Tokens = ends * total[:, None] // ends[:, -1:]
    bounds[:, 1:] -= bounds[:, :-1].copy()
    return bounds


def _meeting(given: Tokens, taken: Tokens, rank: int) -> Tokens:
    """Overlaps of the interval of `rank` with those of all ranks, where each rank's tokens follow
    those of the ranks before it on either side."""
    ends = taken.cumsum(axis=1)
    end: Tokens = given[:, : rank + 1].sum(axis=1, keepdims=True)
    start: Tokens = end - given[:, rank : rank + 1]
    last: Tokens = np.minimum(ends, end)
    overlap: Tokens = last - np.maximum(ends - taken, start)
    return overlap.clip(min=0)


def _first(parts: Tokens, total: Tokens) -> Tokens:
    """Part of each length that belongs to the first `total` tokens of its row."""
    starts: Tokens = parts.cumsum(axis=-1) - parts
    first: Tokens = np.minimum(np.maximum(total - starts, 0), parts)
    return first
