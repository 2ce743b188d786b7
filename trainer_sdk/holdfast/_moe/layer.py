"""A Mixture-of-Experts layer whose experts an expert plan places on ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast._elastic.world import WorldGroup
from holdfast._moe.dispatcher import IN_ONE_REDUCTION, Additions, Dispatcher, TokenRoute
from holdfast._moe.modules import MakeExpert, SeatedModules
from holdfast._moe.seats import ExpertSeats
from holdfast_core.elastic_experts.loads import LoadHistory
from holdfast_core.elastic_experts.moving import seats_after
from holdfast_core.elastic_experts.plans import ExpertPlan
from holdfast_core.errors import InvalidJobError

_ACTIVE_DDP = "_active_ddp_module"
"""Attribute of the class by which torch knows the DDP whose forward pass runs."""
_ALIGNED_BYTES = 16
"""Rows of a grouped matrix product start at multiples of this."""
_CUDA_CAPABILITY = (8, 0)


class SeatedExperts(ExpertSeats):
    """The experts in the seats of one rank. Each has two linear layers with GELU between them,
    stacked over the seats. Empty seats hold zeros.

    Args:
        dim: width D of tokens.
        hidden: width F between the two layers.
        experts: the experts in the first seats; the other seats are empty.
        seats: number of seats S.
    """

    def __init__(self, dim: int, hidden: int, experts: Sequence[int], seats: int) -> None:
        super().__init__()
        self.set_seats(experts, seats)
        self.w_in = nn.Parameter(torch.zeros(seats, dim, hidden))
        self.w_out = nn.Parameter(torch.zeros(seats, hidden, dim))

    @torch.no_grad()
    def initialize(self, seed: str) -> None:
        """Draw weights that depend only on `seed` and the expert, so all of its copies are
        equal."""
        for expert, seat in self.seat_of.items():
            draw = torch.Generator()
            draw.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{expert}".encode()) >> 1)
            for weight in (self.w_in, self.w_out):
                drawn = torch.empty(weight.shape[1:], device="cpu").normal_(generator=draw)
                weight[seat] = drawn * weight.shape[1] ** -0.5

    def forward(
        self, x_MD: torch.Tensor, seat_rows: Sequence[int], rows_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the answers of the experts.

        Args:
            x_MD: [M, D], the rows for the first seat, then for the second, and so on.
            seat_rows: number of rows for each seat.
            rows_S: int64 [S], the same on the device of `x_MD`; copied there unless given.
        """
        if rows_S is None:
            rows_S = torch.tensor(seat_rows, device=x_MD.device)
        hidden_MF = F.gelu(_by_seat(x_MD, self.w_in, seat_rows, rows_S))
        return _by_seat(hidden_MF, self.w_out, seat_rows, rows_S)


def _by_seat(
    x: torch.Tensor, weight: torch.Tensor, seat_rows: Sequence[int], rows_S: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of each seat with its matrix."""
    if x.shape[0] and _has_grouped(x, weight):
        ends = rows_S.cumsum(0, dtype=torch.int32)
        product: torch.Tensor = F.grouped_mm(x, weight, offs=ends)
        if product.requires_grad:
            product.register_hook(torch.Tensor.contiguous)  # Torch needs a contiguous gradient.
        return product
    parts = x.split(list(seat_rows))
    # Include seats without rows, so that each seat has a gradient, even if it is zero.
    return torch.cat([part @ one for part, one in zip(parts, weight, strict=True)])


def _has_grouped(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch has a grouped matrix product for these tensors."""
    if not hasattr(F, "grouped_mm") or x.dtype != weight.dtype:
        return False
    if any(size * x.itemsize % _ALIGNED_BYTES for size in weight.shape[1:]):
        return False
    if x.device.type == "cuda":
        return x.dtype == torch.bfloat16 and (
            torch.cuda.get_device_capability(x.device) >= _CUDA_CAPABILITY
        )
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


class Gate(nn.Module):
    """Chooses K of E experts for each token, with a linear layer and softmax.

    Args:
        dim: width D of tokens.
        experts: number E of experts.
        top_k: number K of choices. The weights of several choices add up to 1; the weight of a
            single choice is its probability.

    Raises:
        InvalidJobError: K is not between 1 and E.
    """

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise InvalidJobError(f"top_k={top_k} of {experts} experts: give 1 to {experts}")
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, dim).normal_(std=dim**-0.5))

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the probabilities [N, E] in at least float32, and the weights and the experts
        [N, K] of the choices, best first."""
        logits = F.linear(x_ND, self.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        probs_NE = logits.to(wide).softmax(-1)
        weights_NK, expert_NK = probs_NE.topk(self.top_k)
        if self.top_k > 1:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return probs_NE, weights_NK, expert_NK


class ExpertLayer(nn.Module):
    """A layer whose experts an expert plan places on ranks: the base of `MoELayer` and
    `PlacedExperts`."""

    experts: ExpertSeats
    plan: ExpertPlan
    layer: int
    """Number of this layer in the plan."""
    dispatcher: Dispatcher
    history: LoadHistory
    """Tokens that all ranks routed to each expert in recent batches."""
    tokens_E: list[int]
    """Tokens that all ranks routed to each expert in the newest batch."""
    routed_E: list[int]
    """Tokens that this rank routed to each expert in the newest batch, which a session counts."""

    def set_plan(self, plan: ExpertPlan, layer: int, group: WorldGroup) -> None:
        """Take the first plan, before there are experts."""
        self.plan, self.layer = plan, layer
        self.dispatcher = Dispatcher(plan, layer, group)
        self.history = LoadHistory(plan.layers[layer].tokens)
        self.tokens_E, self.routed_E = [], []

    def take_seats(self, plan: ExpertPlan) -> None:
        """Assign this rank's seats to its experts in another plan. Experts that stay keep their
        seats. This moves no weights."""
        group, before = self.dispatcher.group, self.experts.seat_experts
        experts = plan.layers[self.layer].experts_of(dist.get_rank(group.now))
        self.experts.seat_experts = seats_after(before, experts)
        self.dispatcher = Dispatcher(plan, self.layer, group, self.experts.seat_experts)
        self.plan = plan
        self.experts.captured = self.captured_by_plan()

    def captured_by_plan(self) -> frozenset[int]:
        """Return the experts that this rank captures according to the plan."""
        capturers, rank = self.plan.capturers[self.layer], self.dispatcher.rank
        return frozenset(expert for expert, one in enumerate(capturers) if one == rank)

    def route(self, expert_NK: torch.Tensor, additions: Additions = IN_ONE_REDUCTION) -> TokenRoute:
        """Find the way of each token; see `Dispatcher.route`. Collective.

        Raises:
            InvalidJobError: a `DistributedDataParallel` will average the gradients of the experts.
        """
        averaging = getattr(DistributedDataParallel, _ACTIVE_DDP, None)
        if (
            averaging is not None
            and torch.is_grad_enabled()
            and dist.get_world_size(averaging.process_group) > 1
            and any(parameter.requires_grad for parameter in self.experts.parameters())
        ):
            raise InvalidJobError(
                "DistributedDataParallel averages the gradients of experts in seats as if all "
                "ranks had the same experts: leave it out, and sum gradients with "
                "holdfast.moe.SummedGradients"
            )
        return self.dispatcher.route(expert_NK, additions)

    def note_tokens(self, route: TokenRoute) -> None:
        """Count the tokens of a batch."""
        self.tokens_E, self.routed_E = route.tokens_E, route.routed_E
        self.history.add(self.tokens_E)


class MoELayer(ExpertLayer):
    """A gate, a dispatcher and seated experts. Every token reaches all experts that it has chosen.

    Except for the order of additions, the result depends neither on the plan nor on how a batch is
    divided over ranks.

    Args:
        dim: width D of tokens.
        expert: width of the inner layer of experts with two linear layers and GELU, or a function
            that makes the expert of a number, a module of any kind that maps rows [M, D] to rows
            [M, D]; see `SeatedModules`.
        plan: places the copies of experts on ranks; equal on all ranks.
        layer: number of this layer in the plan.
        group: the group of all ranks: `world.group([range(world.size)])`.
        top_k: number of experts for each token.
        seed: determines, with `layer`, the weights of the experts. The gate draws from torch's
            generator, so seed that equally on all ranks.

    Raises:
        InvalidJobError: the plan is for another number of ranks, `top_k` is not between 1 and the
            number of experts, or `SeatedModules` refuses the experts.
    """

    def __init__(
        self,
        dim: int,
        expert: int | MakeExpert,
        plan: ExpertPlan,
        layer: int,
        group: WorldGroup,
        *,
        top_k: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.set_plan(plan, layer, group)
        self.gate = Gate(dim, len(plan.layers[layer].copies), top_k)
        held, seats, seeded = self.dispatcher.experts, plan.room.rank_seats, f"{seed}/{layer}"
        if isinstance(expert, int):
            built_in = SeatedExperts(dim, expert, held, seats)
            built_in.initialize(seeded)
            self.experts = built_in
        else:
            self.experts = SeatedModules(expert, held, seats, dim=dim, seed=seeded)
        self.experts.captured = self.captured_by_plan()

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted answers of the experts [N, D], and this rank's part of the
        load-balancing loss. All ranks call it together, and run its backward pass together.

        The loss is E · Σ_e f_e · P_e, where f_e is the fraction of all ranks' choices and P_e the
        mean of all ranks' probabilities. The parts of all ranks add up to it, however tokens are
        divided.

        Args:
            x_ND: [N, D], the tokens of this rank; N may differ between ranks, and may be 0.
        """
        probs_NE, weights_NK, expert_NK = self.gate(x_ND)
        route = self.route(expert_NK)
        rows_MD = self.dispatcher.dispatch(x_ND, route)
        answers = self.experts(rows_MD, route.seat_rows, route.rows_S)
        out_ND = self.dispatcher.combine(answers, route, weights_NK.to(x_ND.dtype))
        self.note_tokens(route)
        total_E, choices = route.total_E, max(1, sum(route.tokens_E))
        # By a tensor: devices multiply by the reciprocal of a number, which rounds differently.
        portion_E = (total_E / total_E.sum().clamp(min=1)).to(probs_NE)
        mean_E = probs_NE.sum(0) / max(1, choices // self.gate.top_k)
        return out_ND, len(total_E) * (portion_E * mean_E).sum()
