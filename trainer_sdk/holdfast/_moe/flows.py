"""Assignment of each rank's tokens to the copies of their experts (Lazarus §4.2, algorithm 1).

Every rank computes the same assignment from the same counts, so only the counts are exchanged. Each
copy of an expert takes an equal part of its tokens, up to rounding; a rank keeps its own tokens as
far as its copies have room, and sends the rest to ranks of its node first.

The paper's listing loses tokens: it divides by the wrong numbers in two places and shares are real
numbers. Here capacities are rounded along the ranks and surplus meets room as intervals do: sums
are exact, and an expert's tokens take at most ranks - 1 messages between ranks.

Counts stay on the device on which tokens were routed: some thirty small operations, none of which
waits for the device.
"""

from __future__ import annotations

import torch


def flows(tokens_RE: torch.Tensor, ends_EB: torch.Tensor, rank: int, nproc: int) -> torch.Tensor:
    """Tokens that `rank` sends to each rank, and receives from each, including itself.

    Args:
        tokens_RE: [ranks, experts], int64, routed on each rank to each expert. Each choice of a
            token counts as one.
        ends_EB: [experts, ranks + 1], int64, on the same device: copies of each expert on the ranks
            before each rank and, last, on all of them; at least one of each expert.
        nproc: ranks of each node, consecutive.

    Returns:
        int64 [2, experts, ranks]: sent to the rank, and received from the rank.
    """
    experts, ranks = ends_EB.shape[0], ends_EB.shape[1] - 1
    # Each rank takes t · R_j / Σ R of an expert's tokens, rounded along the ranks.
    routed_ER = tokens_RE.T.contiguous()
    bounds_EB = ends_EB * tokens_RE.sum(0).unsqueeze(1) // ends_EB[:, -1:]
    excess_ER = routed_ER - bounds_EB.diff(dim=1)
    # [room, surplus] of each rank: what it could take, and what it cannot keep.
    surplus_ER = excess_ER.clamp(min=0)
    open_2ER = torch.stack([surplus_ER - excess_ER, surplus_ER])
    # Within a node, the first tokens of either side meet, as many as the smaller side has.
    open_2ENP = open_2ER.view(2, experts, ranks // nproc, nproc)
    ends_2ENP = open_2ENP.cumsum(3)
    met_EN1 = ends_2ENP[0, ..., -1:].minimum(ends_2ENP[1, ..., -1:])
    near_2ENP = ends_2ENP.minimum(met_EN1) - (ends_2ENP - open_2ENP).minimum(met_EN1)
    # [near, far] tokens meet room at the same places of two rows, in the order of ranks: both
    # sides have equally many that stay in each node, and equally many in all.
    near_2ER = near_2ENP.view_as(open_2ER)
    rows_22ER = torch.stack([near_2ER, open_2ER - near_2ER])
    ends_22ER = rows_22ER.cumsum(3)
    starts_22ER = ends_22ER - rows_22ER
    own_end = ends_22ER[..., rank : rank + 1].flip(1)  # [surplus, room]
    own_start = starts_22ER[..., rank : rank + 1].flip(1)
    met_22ER = ends_22ER.minimum(own_end) - starts_22ER.maximum(own_start)
    found_2ER = met_22ER.clamp_(min=0).sum(0)
    found_2ER[:, :, rank] += routed_ER[:, rank] - surplus_ER[:, rank]  # what it keeps
    return found_2ER


def copies_before(copies_ER: torch.Tensor) -> torch.Tensor:
    """Return `ends_EB` of `flows` for [experts, ranks] copies."""
    return torch.nn.functional.pad(copies_ER.cumsum(1), (1, 0))


def starts_of(blocks: torch.Tensor) -> torch.Tensor:
    """Return the number of the first row of each block, where the rows of blocks of these lengths
    follow each other."""
    return blocks.reshape(-1).cumsum(0).view(blocks.shape) - blocks


def rows_of(starts: torch.Tensor, lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the numbers of the rows of blocks, one block after the other.

    Args:
        starts, lengths: for each block its first row, and its number of rows.
        rows: number of rows of all blocks, which is not read from the device.
    """
    flat = lengths.reshape(-1)
    shifts = starts.reshape(-1) - starts_of(flat)
    moved = shifts.repeat_interleave(flat, output_size=rows)
    return moved + torch.arange(rows, device=flat.device)
