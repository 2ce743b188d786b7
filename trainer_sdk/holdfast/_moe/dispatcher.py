"""Sends tokens to the copies of their experts, and the answers back.

The ranks exchange how many tokens each has for each expert; from these counts every rank computes
the same flows (`holdfast._moe.flows`), so the tokens themselves travel once, without padding, and
none is dropped. All of this is computed on the device of the choices. The host reads once a layer,
a few numbers for each rank, seat and expert: the lengths of an all-to-all have to be known there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

import torch
import torch.distributed as dist

from holdfast._elastic.world import WorldGroup
from holdfast._moe.exchanging import ExchangedRows, PermutedRows, SpreadRows, add_rows, inverse_of
from holdfast._moe.flows import copies_before, flows, rows_of, starts_of
from holdfast_core.elastic_experts.plans import ExpertPlan
from holdfast_core.errors import InvalidJobError

_TOKENS_MAX = 2**31 - 1
"""Largest number of assignments of a rank to an expert: sums and products of it fit into 64 bits.
"""


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

    tokens_E: list[int]
    """Assignments of all ranks to each expert."""
    total_E: torch.Tensor
    """The same on the device, int64 [E]."""
    routed_E: list[int]
    """Assignments of this rank to each expert."""
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
    rows_S: torch.Tensor
    """The same on the device, int64 [S]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A layer's plan and one rank's seats, on one device."""

    rank: int
    nproc: int
    """Ranks of each node."""
    ends_EB: torch.Tensor
    """See `flows`."""
    expert_S: torch.Tensor
    """[S], int64: the expert in each seat; 0 for empty ones."""
    taken_S: torch.Tensor
    """[S], int64: 1 for each seat with an expert, 0 for empty ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchPlan:
    """What one rank sends and receives in one layer, on the device on which tokens were routed."""

    flows_2ER: torch.Tensor
    """See `flows`."""
    rows_SR: torch.Tensor
    """Rows that arrive for each seat from each rank."""
    rows_S: torch.Tensor
    """Rows that arrive for each seat."""
    total_E: torch.Tensor
    """Assignments of all ranks to each expert."""
    numbers: torch.Tensor
    """All that the host needs, int64 [2R + S + 2E]: rows to each rank and from each, rows of each
    seat, and the assignments of all ranks and of this one to each expert."""

    @classmethod
    def of(cls, tokens_RE: torch.Tensor, placed: Placement) -> DispatchPlan:
        """Plan from the assignments of each rank to each expert, int64 [R, E]."""
        found_2ER = flows(tokens_RE, placed.ends_EB, placed.rank, placed.nproc)
        rows_SR = found_2ER[1][placed.expert_S] * placed.taken_S.unsqueeze(1)
        rows_S, total_E = rows_SR.sum(1), tokens_RE.sum(0)
        numbers = (found_2ER.sum(1).view(-1), rows_S, total_E, tokens_RE[placed.rank])
        return cls(
            flows_2ER=found_2ER,
            rows_SR=rows_SR,
            rows_S=rows_S,
            total_E=total_E,
            numbers=torch.cat(numbers),
        )

    def order(self, by_expert: torch.Tensor) -> torch.Tensor:
        """Return the assignments in the order of ranks, experts and tokens.

        Args:
            by_expert: [N·K], the assignments in the order of experts and tokens.
        """
        sent_ER = self.flows_2ER[0]
        return by_expert[rows_of(starts_of(sent_ER).T, sent_ER.T, by_expert.numel())]

    def arrival(self, rows: int, placed: Placement) -> torch.Tensor:
        """Return the numbers of the `rows` rows that arrive, in the order of seats and ranks. They
        arrive in the order of ranks and experts."""
        starts_ER = starts_of(self.flows_2ER[1].T).T
        return rows_of(starts_ER[placed.expert_S], self.rows_SR, rows)


class HostCopy:
    """Numbers on their way to the host, while the device is given further work.

    Args:
        numbers: int64 [n].
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self._event = None
        if numbers.is_cuda:
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[int]:
        """Return the numbers, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._numbers.tolist()
        return found


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
        self._copies = plan.layers[layer].copies
        self._ranks = ranks
        self.experts = plan.layers[layer].experts_of(self.rank)
        """Experts in this rank's seats, ascending."""
        empty = plan.room.rank_seats - len(self.experts)
        self._seats = (*self.experts, *[None] * empty) if seats is None else tuple(seats)
        self._placements = dict[torch.device, Placement]()

    def placement(self, device: torch.device) -> Placement:
        """Return the plan on `device`, to which it is copied once."""
        if device not in self._placements:
            copies_ER = torch.zeros(len(self._copies), self._ranks, dtype=torch.int64, device="cpu")
            for expert, held in enumerate(self._copies):
                for holder, count in held:
                    copies_ER[expert, holder] = count
            experts = [0 if one is None else one for one in self._seats]
            taken = [int(one is not None) for one in self._seats]
            self._placements[device] = Placement(
                rank=self.rank,
                nproc=self._nproc,
                ends_EB=copies_before(copies_ER).to(device),
                expert_S=torch.tensor(experts, dtype=torch.int64, device=device),
                taken_S=torch.tensor(taken, dtype=torch.int64, device=device),
            )
        return self._placements[device]

    def route(self, expert_NK: torch.Tensor, additions: Additions = IN_ONE_REDUCTION) -> TokenRoute:
        """Find the way of each token. Collective.

        Args:
            expert_NK: [N, K], the experts that each token of this rank has chosen.
        """
        placed, ranks, experts = self.placement(expert_NK.device), self._ranks, len(self._copies)
        # Count the assignments, and sort them while the counts of the other ranks arrive.
        expert_P = expert_NK.reshape(-1)
        own_E = count_by_expert(expert_P, experts)
        tokens_RE = own_E.new_empty(ranks, experts)
        gathering = dist.all_gather(
            list(tokens_RE.unbind()), own_E, group=self.group.now, async_op=True
        )
        by_expert = sort_by_expert(expert_NK, by_choice=additions.by_choice)
        self.group.wait(gathering)
        make_possible(tokens_RE, own_E, self.rank)
        # Plan. The order of what is sent needs no number on the host.
        planned = DispatchPlan.of(tokens_RE, placed)
        copied = HostCopy(planned.numbers)
        order = planned.order(by_expert)
        order_back = inverse_of(order)
        numbers = iter(copied.read())
        sent_rows, received_rows = list(islice(numbers, ranks)), list(islice(numbers, ranks))
        arrival = planned.arrival(sum(received_rows), placed)
        return TokenRoute(
            seat_rows=list(islice(numbers, len(self._seats))),
            tokens_E=list(islice(numbers, experts)),
            routed_E=list(islice(numbers, experts)),
            total_E=planned.total_E,
            rows_S=planned.rows_S,
            expert_NK=expert_NK,
            additions=additions,
            order=order,
            order_back=order_back,
            arrival=arrival,
            arrival_back=inverse_of(arrival),
            sent_rows=sent_rows,
            received_rows=received_rows,
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


def count_by_expert(expert_P: torch.Tensor, experts: int) -> torch.Tensor:
    """Count the assignments to each expert: int64 [experts]. `bincount` would wait for the
    device."""
    counts = torch.zeros(experts, dtype=torch.int64, device=expert_P.device)
    numbers_P = expert_P.to(torch.int64)
    return counts.scatter_add_(0, numbers_P, torch.ones_like(numbers_P))


def make_possible(tokens_RE: torch.Tensor, own_E: torch.Tensor, rank: int) -> None:
    """Make counts possible ones, in place. An all-gather of NCCL that its world has ended leaves
    any numbers, and the device would refuse lengths that contradict each other by an assertion,
    after which the process cannot use it any more. Counts that have arrived stay as they are.

    Args:
        tokens_RE: [R, E], int64, the counts of all ranks.
        own_E: [E], int64, those of `rank`.
    """
    tokens_RE.clamp_(0, _TOKENS_MAX)
    tokens_RE[rank] = own_E


def sort_by_expert(expert_NK: torch.Tensor, *, by_choice: bool) -> torch.Tensor:
    """Sort assignments by their experts; those of one expert by tokens or, with `by_choice`, by
    choices and then by tokens. Return [N·K], numbers of assignments."""
    if not by_choice:
        return expert_NK.reshape(-1).argsort(stable=True)
    tokens, choices = expert_NK.shape
    listed = torch.arange(tokens * choices, device=expert_NK.device).view(tokens, choices)
    return listed.T.reshape(-1)[expert_NK.T.reshape(-1).argsort(stable=True)]


def _sequence(expert_NK: torch.Tensor, order: Order) -> torch.Tensor | None:
    """Return [N, K], the places of each token's choices in the order in which they are added; None
    for one reduction."""
    if order is Order.CHOICES:
        return None
    return expert_NK.argsort(dim=1, descending=order is Order.EXPERTS_DOWN, stable=True)
