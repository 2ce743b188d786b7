"""A Mixture-of-Experts layer whose experts lie where an expert plan says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn

from holdfast._elastic.world import WorldGroup
from holdfast._moe.dispatcher import Dispatcher
from holdfast_core.elastic_experts.loads import LoadHistory
from holdfast_core.elastic_experts.moving import seats_after
from holdfast_core.elastic_experts.plans import ExpertPlan
from holdfast_core.errors import InvalidJobError

_ALIGNED_BYTES = 16
"""Rows of a grouped matrix product begin at multiples of it."""
_CUDA_CAPABILITY = (8, 0)


class SeatedExperts(nn.Module):
    """Experts in the seats of one rank: two linear layers each, with GELU between them, stacked
    over the seats. Empty seats hold zeros.

    Args:
        dim: width D of tokens.
        hidden: width F between the two layers.
        experts: experts of the first seats; the others are empty.
        seats: number of seats S.
    """

    def __init__(self, dim: int, hidden: int, experts: Sequence[int], seats: int) -> None:
        super().__init__()
        self.seat_experts = (*experts, *[None] * (seats - len(experts)))
        """For each seat its expert, or None."""
        self.captured = frozenset(experts)
        """Experts that this rank captures in snapshots."""
        self.w_in = nn.Parameter(torch.zeros(seats, dim, hidden))
        self.w_out = nn.Parameter(torch.zeros(seats, hidden, dim))

    @property
    def seat_of(self) -> dict[int, int]:
        """Seat of each expert that is here, by the experts' numbers."""
        held = enumerate(self.seat_experts)
        return dict(sorted((expert, seat) for seat, expert in held if expert is not None))

    @torch.no_grad()
    def initialize(self, seed: str) -> None:
        """Draw weights that depend on `seed` and the expert only: equal on all of its copies."""
        for expert, seat in self.seat_of.items():
            draw = torch.Generator()
            draw.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{expert}".encode()) >> 1)
            for weight in (self.w_in, self.w_out):
                drawn = torch.empty(weight.shape[1:], device="cpu").normal_(generator=draw)
                weight[seat] = drawn * weight.shape[1] ** -0.5

    def forward(self, x_MD: torch.Tensor, seat_rows: Sequence[int]) -> torch.Tensor:
        """Answers of the experts.

        Args:
            x_MD: rows of the first seat, of the second, and so on.
            seat_rows: number of rows of each seat.
        """
        hidden_MF = F.gelu(_by_seat(x_MD, self.w_in, seat_rows))
        return _by_seat(hidden_MF, self.w_out, seat_rows)


def _by_seat(x: torch.Tensor, weight: torch.Tensor, seat_rows: Sequence[int]) -> torch.Tensor:
    """Product of each seat's rows with its matrix."""
    if x.shape[0] and _has_grouped(x, weight):
        ends = torch.tensor(seat_rows, device="cpu").cumsum(0).to(x.device, torch.int32)
        product: torch.Tensor = F.grouped_mm(x, weight, offs=ends)
        if product.requires_grad:
            product.register_hook(torch.Tensor.contiguous)  # torch demands it of the gradient
        return product
    parts = x.split(list(seat_rows))
    # All seats take part, so that each has a gradient, if only zeros.
    return torch.cat([part @ one for part, one in zip(parts, weight, strict=True)])


def _has_grouped(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch has a grouped matrix product for these."""
    if not hasattr(F, "grouped_mm") or x.dtype != weight.dtype:
        return False
    if any(size * x.itemsize % _ALIGNED_BYTES for size in weight.shape[1:]):
        return False
    if x.device.type == "cuda":
        capable = torch.cuda.get_device_capability(x.device) >= _CUDA_CAPABILITY
        return capable and x.dtype == torch.bfloat16
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


class Gate(nn.Module):
    """Chooses K of E experts for each token, by a linear layer and softmax.

    Args:
        dim: width D of tokens.
        experts: E.
        top_k: K. Weights of several choices add up to 1; a single choice has its probability.

    Raises:
        InvalidJobError: when K is not 1 to E.
    """

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise InvalidJobError(f"top_k={top_k} of {experts} experts: give 1 to {experts}")
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, dim).normal_(std=dim**-0.5))

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Probabilities [N, E] in at least float32, and of the choices, best first, weights and
        experts [N, K]."""
        logits = F.linear(x_ND, self.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        probs_NE = logits.to(wide).softmax(-1)
        weights_NK, expert_NK = probs_NE.topk(self.top_k)
        if self.top_k > 1:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return probs_NE, weights_NK, expert_NK


class MoELayer(nn.Module):
    """Gate, dispatcher and seated experts. Every token reaches all experts that it has chosen.

    What the layer computes does not depend on the plan, nor on how a batch is divided among ranks,
    but for the order in which numbers are added.

    Args:
        dim: width D of tokens.
        hidden: width of the experts' inner layer.
        plan: where copies lie; equal on all ranks.
        layer: number of this layer in the plan.
        group: all ranks: `world.group([range(world.size)])`.
        top_k: experts of each token.
        seed: of the experts' weights, with `layer`. The gate draws from torch's generator, so seed
            that equally on all ranks.

    Raises:
        InvalidJobError: when the plan is for another number of ranks, or `top_k` is not 1 to the
            number of experts.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        plan: ExpertPlan,
        layer: int,
        group: WorldGroup,
        *,
        top_k: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.plan, self.layer = plan, layer
        self.dispatcher = Dispatcher(plan, layer, group)
        self.gate = Gate(dim, len(plan.layers[layer].copies), top_k)
        self.experts = SeatedExperts(dim, hidden, self.dispatcher.experts, plan.room.rank_seats)
        self.experts.initialize(f"{seed}/{layer}")
        self.experts.captured = self._captured()
        self.history = LoadHistory(plan.layers[layer].tokens)
        """Tokens that all ranks routed to each expert lately."""
        self.tokens_E: list[int] = []
        """Those of the newest batch."""
        self.routed_E: list[int] = []
        """Tokens of the newest batch that this rank routed, for `Session.count_tokens`."""

    def take_seats(self, plan: ExpertPlan) -> None:
        """Seat the experts that this rank has in another plan; whoever stays keeps its seat. No
        weights are moved."""
        group, before = self.dispatcher.group, self.experts.seat_experts
        experts = plan.layers[self.layer].experts_of(dist.get_rank(group.now))
        self.experts.seat_experts = seats_after(before, experts)
        self.dispatcher = Dispatcher(plan, self.layer, group, self.experts.seat_experts)
        self.plan = plan
        self.experts.captured = self._captured()

    def _captured(self) -> frozenset[int]:
        """Experts that the plan has this rank capture."""
        capturers, rank = self.plan.capturers[self.layer], self.dispatcher.rank
        return frozenset(expert for expert, one in enumerate(capturers) if one == rank)

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' weighted answers, and this rank's part of the load-balancing loss. All ranks
        call it together, and go through its backward pass together.

        The loss is E · Σ_e f_e · P_e with the portion of all ranks' choices f_e and the mean of all
        ranks' probabilities P_e: parts of ranks add up to it, however tokens are divided.

        Args:
            x_ND: [N, D], this rank's tokens; N may differ between ranks, and be 0.
        """
        probs_NE, weights_NK, expert_NK = self.gate(x_ND)
        route = self.dispatcher.route(expert_NK)
        answers = self.experts(self.dispatcher.dispatch(x_ND, route), route.seat_rows)
        out_ND = self.dispatcher.combine(answers, route, weights_NK.to(x_ND.dtype))
        total_E = route.tokens.sum(0)
        self.tokens_E = total_E.tolist()
        self.routed_E = route.tokens[self.dispatcher.rank].tolist()
        self.history.add(self.tokens_E)
        choices = max(1, int(total_E.sum()))
        portion_E = (total_E / choices).to(probs_NE)
        mean_E = probs_NE.sum(0) / max(1, choices // self.gate.top_k)
        return out_ND, len(total_E) * (portion_E * mean_E).sum()
