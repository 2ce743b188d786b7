"""The dispatcher's plan on the host, as it was before decision 0143: what the one on the device is
measured against, and must be equal to.

All counts come to the host, numpy computes the flows, and what sorts the rows goes back to the
device. Several operations on the way wait for the device by themselves.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from holdfast._moe.dispatcher import IN_ONE_REDUCTION, Additions, Dispatcher, TokenRoute
from holdfast._moe.exchanging import inverse_of

Tokens = NDArray[np.int64]


class HostDispatcher(Dispatcher):
    """A dispatcher that plans on the host."""

    def route(self, expert_NK: torch.Tensor, additions: Additions = IN_ONE_REDUCTION) -> TokenRoute:
        """Find the way of each token; see `Dispatcher.route`."""
        device, experts = expert_NK.device, len(self._copies)
        copies = np.zeros((experts, self._ranks), dtype=np.int64)
        for expert, held in enumerate(self._copies):
            for holder, count in held:
                copies[expert, holder] = count
        expert_P = expert_NK.reshape(-1)
        own = torch.bincount(expert_P, minlength=experts)
        every = [torch.empty_like(own) for _ in range(self._ranks)]
        self.group.wait(dist.all_gather(every, own, group=self.group.now, async_op=True))
        tokens = torch.stack(every).cpu()
        sent, received = flows(tokens.numpy(), copies, self.rank, self._nproc)
        order = order_of(expert_NK, sent, by_choice=additions.by_choice)
        arrival = arrival_of(received, self._seats, device)
        here = received.sum(axis=1)
        seat_rows = [0 if one is None else int(here[one]) for one in self._seats]
        return TokenRoute(
            tokens_E=tokens.sum(0).tolist(),
            total_E=tokens.sum(0).to(device),
            routed_E=tokens[self.rank].tolist(),
            expert_NK=expert_NK,
            additions=additions,
            order=order,
            order_back=inverse_of(order),
            arrival=arrival,
            arrival_back=inverse_of(arrival),
            sent_rows=sent.sum(axis=0).tolist(),
            received_rows=received.sum(axis=0).tolist(),
            seat_rows=seat_rows,
            rows_S=torch.tensor(seat_rows, device=device),
        )


def order_of(expert_NK: torch.Tensor, sent: Tokens, *, by_choice: bool) -> torch.Tensor:
    """Assignments in the order of ranks, experts and tokens; see `flows` for `sent`."""
    device, expert_P = expert_NK.device, expert_NK.reshape(-1)
    if by_choice:
        listed = torch.arange(expert_P.numel(), device=device).view(expert_NK.shape).T.reshape(-1)
        by_expert = listed[expert_P[listed].argsort(stable=True)]
    else:
        by_expert = expert_P.argsort(stable=True)
    experts, ranks = sent.shape
    rank_of = torch.arange(ranks, device=device).repeat(experts)
    target = rank_of.repeat_interleave(torch.from_numpy(sent).reshape(-1).to(device))
    return by_expert[target.argsort(stable=True)]


def arrival_of(
    received: Tokens, seats: tuple[int | None, ...], device: torch.device
) -> torch.Tensor:
    """Rows that arrive, in the order of seats, senders and tokens; see `flows` for `received`."""
    experts, ranks = received.shape
    seat_of = torch.zeros(experts, dtype=torch.int64, device="cpu")
    for seat, held in enumerate(seats):
        if held is not None:
            seat_of[held] = seat
    rows = torch.from_numpy(received.T.copy()).reshape(-1).to(device)
    return seat_of.to(device).repeat(ranks).repeat_interleave(rows).argsort(stable=True)


def flows(tokens: Tokens, copies: Tokens, rank: int, nproc: int) -> tuple[Tokens, Tokens]:
    """Tokens that `rank` sends to each rank, and receives from each, including itself.

    Args:
        tokens: [ranks, experts], routed on each rank to each expert.
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
