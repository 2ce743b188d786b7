"""Sends tokens to the copies of their experts, and the answers back.

The ranks exchange how many tokens each has for each expert; from these counts every rank computes
the same flows (`holdfast_core.elastic_experts.dispatching`), so the tokens themselves travel once,
without padding, and none is dropped. One number for each rank and expert comes to the host, once a
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
import torch.distributed as dist

from holdfast._elastic.world import WorldGroup
from holdfast._moe.exchanging import ExchangedRows, PermutedRows, SpreadRows, add_rows, inverse_of
from holdfast_core.elastic_experts.dispatching import flows
from holdfast_core.elastic_experts.plans import ExpertPlan
from holdfast_core.errors import InvalidJobError


class Order(StrEnum):
    """Order in which a token's K rows are added."""

    CHOICES = "Choices"
    """In one reduction over its choices, in any grouping."""
    EXPERTS = "Experts"
    """One after the other, by the experts' numbers."""
    EXPERTS_DOWN = "ExpertsDown"
    """One after the other, by the experts' numbers, the highest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Additions:
    """What decides about the last bits of a layer: the orders in which numbers are added."""

    answers: Order = Order.CHOICES
    """Order in which the answers to a token are added. In the dtype of tokens, except for
    `CHOICES`."""
    gradients: Order = Order.CHOICES
    """Order in which the gradients of a token are added."""
    by_choice: bool = False
    """Whether an expert gets the rows of all first choices, then those of all second ones, instead
    of those of one token after the other. Its weights' gradients are sums over rows."""


IN_ONE_REDUCTION = Additions()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoute:
    """Ways of one batch's tokens through one layer. N tokens with K choices are N·K assignments."""

    tokens: torch.Tensor
    """[ranks, experts], int64 in host memory: assignments of each rank."""
    expert_NK: torch.Tensor
    """The choices."""
    additions: Additions
    order: torch.Tensor
    """[N·K]: assignments in the order in which they are sent: by rank, expert and token."""
    order_back: torch.Tensor
    arrival: torch.Tensor
    """[arrived]: arrived rows in the order of this rank's seats, then by sender and token."""
    arrival_back: torch.Tensor
    sent_rows: list[int]
    received_rows: list[int]
    seat_rows: list[int]
    """Rows of each seat; 0 for empty ones."""


class Dispatcher:
    """Token dispatcher of one layer (Lazarus §4.2).

    Args:
        plan: the expert plan; one rank of the group for each of its ranks.
        layer: number of the layer in the plan.
        group: all ranks.
        seats: for each seat of this rank its expert, or None; by the experts' numbers unless given.

    Raises:
        InvalidJobError: when the plan is for another number of ranks.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        layer: int,
        group: WorldGroup,
        seats: Sequence[int | None] | None = None,
    ) -> None:
        ranks = dist.get_world_size(group.now)
        if plan.room.ranks != ranks:
            raise InvalidJobError(
                f"the expert plan is for {plan.room.ranks} ranks, and the group has {ranks}; plan "
                f"for the world's number of nodes and ranks"
            )
        self.group, self.rank = group, dist.get_rank(group.now)
        self._nproc = plan.room.nproc
        copies = plan.layers[layer].copies
        self._copies = np.zeros((len(copies), ranks), dtype=np.int64)
        for expert, held in enumerate(copies):
            for holder, count in held:
                self._copies[expert, holder] = count
        self.experts = plan.layers[layer].experts_of(self.rank)
        """Experts in this rank's seats, ascending."""
        empty = plan.room.rank_seats - len(self.experts)
        self._seats = (*self.experts, *[None] * empty) if seats is None else tuple(seats)
        self._seat_of = torch.zeros(len(copies), dtype=torch.int64, device="cpu")
        for seat, held_here in enumerate(self._seats):
            if held_here is not None:
                self._seat_of[held_here] = seat

    def route(self, expert_NK: torch.Tensor, additions: Additions = IN_ONE_REDUCTION) -> TokenRoute:
        """Find the way of each token. Collective.

        Args:
            expert_NK: [N, K], the experts that each token of this rank has chosen.
        """
        device, experts = expert_NK.device, len(self._copies)
        expert_P = expert_NK.reshape(-1)
        own = torch.zeros(experts, dtype=torch.int64, device=device)
        own += torch.bincount(expert_P, minlength=experts)
        every = [torch.empty_like(own) for _ in range(self._copies.shape[1])]
        self.group.wait(dist.all_gather(every, own, group=self.group.now, async_op=True))
        tokens = torch.stack(every).cpu()
        sent, received = flows(tokens.numpy(), self._copies, self.rank, self._nproc)

        if additions.by_choice:
            listed = torch.arange(expert_P.numel(), device=device).view(expert_NK.shape).T
            listed = listed.reshape(-1)
            by_expert = listed[expert_P[listed].argsort(stable=True)]
        else:
            by_expert = expert_P.argsort(stable=True)
        ranks = torch.arange(sent.shape[1], device=device).repeat(experts)
        target = ranks.repeat_interleave(torch.from_numpy(sent).reshape(-1).to(device))
        order = by_expert[target.argsort(stable=True)]
        seat_of = self._seat_of.to(device).repeat(sent.shape[1])
        rows = torch.from_numpy(received.T.copy()).reshape(-1).to(device)
        arrival = seat_of.repeat_interleave(rows).argsort(stable=True)
        here = received.sum(axis=1)
        return TokenRoute(
            tokens=tokens,
            expert_NK=expert_NK,
            additions=additions,
            order=order,
            order_back=inverse_of(order),
            arrival=arrival,
            arrival_back=inverse_of(arrival),
            sent_rows=sent.sum(axis=0).tolist(),
            received_rows=received.sum(axis=0).tolist(),
            seat_rows=[0 if one is None else int(here[one]) for one in self._seats],
        )

    def dispatch(self, x_ND: torch.Tensor, route: TokenRoute) -> torch.Tensor:
        """Send the tokens; return those that arrive here, seat by seat. Collective, as is its
        backward pass.

        Args:
            x_ND: [N, D], tokens of this rank.
        """
        added = _sequence(route.expert_NK, route.additions.gradients)
        choices = route.expert_NK.shape[1]
        sent = SpreadRows.apply(x_ND, choices, route.order, route.order_back, added)
        arrived = ExchangedRows.apply(self.group, sent, route.sent_rows, route.received_rows)
        found: torch.Tensor = PermutedRows.apply(arrived, route.arrival, route.arrival_back)
        return found

    def combine(
        self, answers: torch.Tensor, route: TokenRoute, weights_NK: torch.Tensor
    ) -> torch.Tensor:
        """Send answers back, and add up each token's by its weights. Collective, as is its backward
        pass.

        Args:
            answers: [arrived, D], in the order of `dispatch`.
            weights_NK: [N, K].

        Returns:
            [N, D], in the dtype of answers.
        """
        arrived = PermutedRows.apply(answers, route.arrival_back, route.arrival)
        back = ExchangedRows.apply(self.group, arrived, route.received_rows, route.sent_rows)
        answer_P = PermutedRows.apply(back, route.order_back, route.order)
        answer_NKD = answer_P.view(*weights_NK.shape, answers.shape[-1])
        weighted_NKD = answer_NKD * weights_NK.unsqueeze(-1)
        added = _sequence(route.expert_NK, route.additions.answers)
        if added is not None:
            weighted_NKD = weighted_NKD.to(answers.dtype)
        return add_rows(weighted_NKD, added).to(answers.dtype)


def _sequence(expert_NK: torch.Tensor, order: Order) -> torch.Tensor | None:
    """Return [N, K], the places of each token's choices in the order in which they are added; None
    for one reduction."""
    if order is Order.CHOICES:
        return None
    return expert_NK.argsort(dim=1, descending=order is Order.EXPERTS_DOWN, stable=True)
