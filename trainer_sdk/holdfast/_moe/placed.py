"""Experts of a transformers model that an expert plan places on ranks.

A MoE block of transformers gives the choices of its router and their weights to its experts, which
are one module with stacked weights. `PlacedExperts` takes that module's place, so everything else
of the block stays: the router, experts that all tokens share, noise. The class of the experts
itself computes the rows of this rank's seats, by the implementation that the model's configuration
names; so any layout of weights, bias and activation will do.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from holdfast._elastic.world import WorldGroup
from holdfast._moe.dispatcher import Additions, Order
from holdfast._moe.layer import ExpertLayer
from holdfast._moe.seats import ExpertSeats
from holdfast._state.dtensors import is_dtensor
from holdfast_core.elastic_experts.plans import ExpertPlan
from holdfast_core.errors import InvalidJobError

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""What the experts of transformers take."""
_ADDITIONS = {
    "eager": Additions(answers=Order.EXPERTS, gradients=Order.EXPERTS_DOWN, by_choice=True),
    "grouped_mm": Additions(gradients=Order.EXPERTS),
}
"""Implementations of experts → the orders in which they add; others add a token's rows at once."""


class PlacedExperts(ExpertLayer, ExpertSeats):
    """Experts of a MoE block of transformers, in the place and under the names of the original
    module, with stacks of this rank's seats instead of all experts.

    Args:
        original: the experts of the block, with their weights.
        plan: places the copies of experts on ranks; equal on all ranks.
        layer: number of this layer in the plan.
        group: the group of all ranks.

    Raises:
        InvalidJobError: the plan is for another number of ranks or experts, or the experts are not
            such a module.
    """

    def __init__(
        self, original: nn.Module, plan: ExpertPlan, layer: int, group: WorldGroup
    ) -> None:
        super().__init__()
        self.num_experts = number_of_experts(original)
        planned = len(plan.layers[layer].copies)
        if planned != self.num_experts:
            raise InvalidJobError(
                f"the expert plan has {planned} experts in layer {layer}, and the model "
                f"{self.num_experts}; plan for the experts that the model has"
            )
        self.set_plan(plan, layer, group)
        seats = plan.room.rank_seats
        self.set_seats(self.dispatcher.experts, seats)
        self.captured = self.captured_by_plan()
        for name, whole in original.named_parameters():
            stack = whole.new_zeros(seats, *whole.shape[1:])
            with torch.no_grad():
                for expert, seat in self.seat_of.items():
                    stack[seat] = whole[expert]
            self.register_parameter(name, nn.Parameter(stack, requires_grad=whole.requires_grad))
        # A copy of the module without memory of its own, for as many experts as there are seats.
        template = copy.copy(original)
        template._parameters = {
            name: nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad)
            for name, one in self.named_parameters()
        }
        template.num_experts = seats  # type: ignore[assignment]  # no tensor
        self._template = (template,)

    @property
    def experts(self) -> ExpertSeats:  # type: ignore[override]  # this module is the seats as well
        """The seats of this layer."""
        return self

    def train(self, mode: bool = True) -> PlacedExperts:
        """Set the mode of the experts, too."""
        self._template[0].train(mode)
        return super().train(mode)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted answers of the experts [N, D]. All ranks call it together, and run
        its backward pass together.

        Args:
            hidden_states: [N, D], the tokens of this rank; N may differ between ranks.
            top_k_index: [N, K], the experts that each token has chosen.
            top_k_weights: [N, K].
        """
        config = getattr(self._template[0], "config", None)
        way = getattr(config, "_experts_implementation", None) or "eager"
        route = self.route(top_k_index, _ADDITIONS.get(way, Additions()))
        answers = self._answers(self.dispatcher.dispatch(hidden_states, route), route.rows_S)
        out_ND = self.dispatcher.combine(answers, route, top_k_weights)
        self.note_tokens(route)
        return out_ND

    def _answers(self, x_MD: torch.Tensor, rows_S: torch.Tensor) -> torch.Tensor:
        """Compute the answers of the experts, whose rows are ordered by seats."""
        nothing = self.no_rows(x_MD)
        if not x_MD.shape[0]:
            return nothing
        seats = torch.arange(len(rows_S), device=x_MD.device)
        seat_M1 = seats.repeat_interleave(rows_S, output_size=len(x_MD)).unsqueeze(1)
        once_M1 = x_MD.new_ones(x_MD.shape[0], 1)
        stacks: dict[str, Any] = dict(self.named_parameters())
        answer = functional_call(self._template[0], stacks, (x_MD, seat_M1, once_M1))
        return torch.cat([nothing, answer])


def number_of_experts(module: nn.Module) -> int:
    """Return the number of experts in a module of transformers that has all experts of a block.

    Raises:
        InvalidJobError: it is not such a module, or is divided between ranks; the message says why.
    """
    kind = type(module).__qualname__
    taken = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if taken[:3] != _ARGUMENTS:
        raise InvalidJobError(
            f"{kind} takes {taken}: only experts that take {_ARGUMENTS}, as those of transformers "
            f"5, can be placed; build other layers with holdfast.moe.MoELayer"
        )
    count = getattr(module, "num_experts", None)
    stacked = {name: tuple(one.shape) for name, one in module.named_parameters()}
    if not isinstance(count, int) or not stacked:
        raise InvalidJobError(f"{kind} does not say how many experts it has (num_experts={count})")
    odd = [n for n, shape in stacked.items() if "." in n or shape[:1] != (count,)]
    odd += [name for name, _ in module.named_buffers()]
    if odd:
        raise InvalidJobError(
            f"{kind} has {odd} beside stacks of its {count} experts: what experts share would be "
            f"trained on each rank by itself"
        )
    if getattr(module, "_is_expert_parallel", False) or any(map(is_dtensor, module.parameters())):
        raise InvalidJobError(
            f"{kind} is divided between ranks already: load the model without expert parallelism "
            f"and tensor parallelism of transformers"
        )
    return count


def blocks_of(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each MoE block of a transformers model with its experts, in the order of the model.

    Raises:
        InvalidJobError: a block has experts that cannot be placed.
    """
    for path, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module) or isinstance(module, ExpertLayer):
            continue
        if isinstance(experts, ExpertLayer):
            raise InvalidJobError(f"{path}.experts are placed already")
        number_of_experts(experts)
        yield module, experts


@torch.no_grad()
def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the model with all experts, from the ranks that hold them, as the
    model had it before `place_experts`. Collective; all ranks get it.

    Returns:
        Tensors in host memory.
    """
    state = {name: one.detach().cpu() for name, one in model.state_dict().items()}
    for path, layer in model.named_modules():
        if not isinstance(layer, PlacedExperts):
            continue
        group = layer.dispatcher.group
        for name, stack in layer.named_parameters():
            whole = stack.new_zeros(layer.num_experts, *stack.shape[1:])
            for expert in layer.captured:
                whole[expert] = stack[layer.seat_of[expert]]
            # Each byte comes from one rank, and is zero on all others.
            parts = whole.view(-1).view(torch.uint8)
            group.wait(dist.all_reduce(parts, group=group.now, async_op=True))
            state[f"{path}.{name}" if path else name] = whole.cpu()
    return state
