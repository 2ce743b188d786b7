"""Gradients of a model with uneven copies of experts, summed over the ranks.

Each holder of an expert has the gradient of the tokens that it got. Two uneven all-to-alls on one
group add them up for all experts of all layers: each holder owns a range of the expert's gradient,
receives it from all holders, adds in the order of ranks and sends the sum back. So all copies get
equal bits, in an order that no timing changes, and no expert needs a process group of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from holdfast._elastic.world import WorldGroup
from holdfast._moe.exchanging import exchange
from holdfast._moe.layer import ExpertLayer
from holdfast_core.errors import InvalidJobError


@dataclass(frozen=True, slots=True)
class HeldExpert:
    """One expert of one layer that this rank holds."""

    layer: int
    expert: int
    seat: int
    parameters: tuple[nn.Parameter, ...]
    """Stacks, whose first dimension counts seats."""
    holders: tuple[int, ...]

    @property
    def trained(self) -> list[nn.Parameter]:
        """Stacks that have gradients."""
        return [one for one in self.parameters if one.requires_grad]

    def numel(self) -> int:
        """Number of elements of the gradient."""
        return sum(one[0].numel() for one in self.trained)

    def range_of(self, rank: int) -> tuple[int, int]:
        """Start and end of the part of the gradient that holder `rank` adds up."""
        at, count, numel = self.holders.index(rank), len(self.holders), self.numel()
        return numel * at // count, numel * (at + 1) // count

    def size_for(self, rank: int) -> int:
        """Length of the part of holder `rank`."""
        start, end = self.range_of(rank)
        return end - start

    def gradient(self) -> torch.Tensor:
        """The gradient, flat."""
        grads = [one.grad for one in self.trained]
        assert all(grad is not None for grad in grads)
        return torch.cat([grad[self.seat].reshape(-1) for grad in grads if grad is not None])

    def set_gradient(self, flat: torch.Tensor) -> None:
        for one, part in zip(
            self.trained, flat.split([p[0].numel() for p in self.trained]), strict=True
        ):
            assert one.grad is not None
            one.grad[self.seat] = part.view_as(one.grad[self.seat])


def moe_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the model's layers with uneven copies, in their order in the model.

    Raises:
        InvalidJobError: the model has no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, ExpertLayer)]
    if not layers:
        raise InvalidJobError(
            "this model has no holdfast.moe.MoELayer, and no experts that were placed"
        )
    return layers


def held_experts(layers: Sequence[ExpertLayer]) -> list[HeldExpert]:
    """Return the experts in this rank's seats, ordered by layer and expert."""
    return [
        HeldExpert(
            layer=at,
            expert=expert,
            seat=seat,
            parameters=tuple(layer.experts.parameters()),
            holders=tuple(rank for rank, _ in layer.plan.layers[layer.layer].copies[expert]),
        )
        for at, layer in enumerate(layers)
        for expert, seat in layer.experts.seat_of.items()
    ]


class SummedGradients:
    """Sums the gradients of a model over all ranks, and clips them.

    Divide the loss by the number of tokens of all ranks, not of one rank. Then the sums are the
    gradients of the mean over all tokens, however tokens are divided over ranks.

    Args:
        model: a model with at least one `MoELayer`. Except for experts, its parameters are equal on
            all ranks.
        group: the group of all ranks.

    Raises:
        InvalidJobError: the model has no `MoELayer`, or its experts have several dtypes.
    """

    def __init__(self, model: nn.Module, group: WorldGroup) -> None:
        self._group = group
        layers = self._layers = moe_layers(model)
        self._arrange()
        self._experts = [len(layer.plan.layers[layer.layer].copies) for layer in layers]
        stacks = [one for layer in layers for one in layer.experts.parameters()]
        self._stacks = [one for one in stacks if one.requires_grad]
        dtypes = {one.dtype for one in self._stacks}
        if len(dtypes) > 1:
            raise InvalidJobError(
                f"experts of dtypes {sorted(map(str, dtypes))}: their gradients are exchanged "
                f"together, so give all of them the same dtype"
            )
        seated = set(map(id, stacks))
        self._dense = [p for p in model.parameters() if id(p) not in seated and p.requires_grad]
        self._device = stacks[0].device

    def _arrange(self) -> None:
        """Note which ranks hold which experts in the present plan."""
        self._plan = self._layers[0].plan
        self._rank, self._size = dist.get_rank(self._group.now), self._plan.room.ranks
        self._held = held_experts(self._layers)
        self._copied = [one for one in self._held if len(one.holders) > 1]

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the gradients of all parameters over all ranks. Collective; call it after the
        backward pass.

        Gradients are added in at least float32; a parameter without one here counts as zeros.
        """
        if self._layers[0].plan is not self._plan:  # the world has changed
            self._arrange()
        for p in (*self._dense, *self._stacks):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self._sum_dense()
        if self._stacks:
            self._sum_experts()

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is at most `max_norm`; return what it was.
        Collective, after `sum`. Each expert counts once, so the norm does not depend on the plan.
        """
        starts = [0, *accumulate(self._experts)]
        squares = torch.zeros(starts[-1], dtype=torch.float64, device=self._device)
        for one in self._held:
            if one.holders[0] == self._rank and one.trained:
                at = starts[one.layer] + one.expert
                squares[at] = one.gradient().double().square().sum()
        self._group.wait(dist.all_reduce(squares, group=self._group.now, async_op=True))
        total = squares.sum()
        for p in self._dense:
            if p.grad is not None:
                total = total + p.grad.double().square().sum()
        norm = float(total.sqrt())
        if norm > max_norm:
            for p in (*self._dense, *self._stacks):
                if p.grad is not None:
                    p.grad.mul_(max_norm / norm)
        return norm

    def _sum_dense(self) -> None:
        grads = [p.grad for p in self._dense if p.grad is not None]
        if not grads:
            return
        flat = torch.cat([_wide(grad).reshape(-1) for grad in grads])
        self._group.wait(dist.all_reduce(flat, group=self._group.now, async_op=True))
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))

    def _between(self, rank: int) -> Iterator[HeldExpert]:
        """Experts that both this rank and `rank` hold, in an order that both have."""
        return (one for one in self._copied if rank in one.holders)

    def _sum_experts(self) -> None:
        ranks = range(self._size)
        mine = [[one.size_for(self._rank) for one in self._between(rank)] for rank in ranks]
        theirs = [[one.size_for(rank) for one in self._between(rank)] for rank in ranks]
        flats = {id(one): one.gradient() for one in self._copied}
        parts = [
            flats[id(one)][slice(*one.range_of(rank))]
            for rank in ranks
            for one in self._between(rank)
        ]
        sums: dict[int, torch.Tensor] = {}
        for rank, arrived in zip(ranks, self._exchange(parts, theirs, mine), strict=True):
            for one, part in zip(self._between(rank), arrived, strict=True):
                before = sums.get(id(one))
                sums[id(one)] = _wide(part) if before is None else before + part
        totals = [
            sums[id(one)].to(self._stacks[0].dtype) for rank in ranks for one in self._between(rank)
        ]
        for rank, returned in zip(ranks, self._exchange(totals, mine, theirs), strict=True):
            for one, part in zip(self._between(rank), returned, strict=True):
                flats[id(one)][slice(*one.range_of(rank))] = part
        for one in self._copied:
            one.set_gradient(flats[id(one)])

    def _exchange(
        self,
        parts: Sequence[torch.Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
    ) -> Iterator[Sequence[torch.Tensor]]:
        """Send parts, in the order of ranks; for each rank, the parts that it has sent.

        Args:
            sent, received: for each rank the lengths of the parts to it, and from it.
        """
        flat = torch.cat([self._stacks[0].new_empty(0), *parts]).view(-1, 1)
        taken = exchange(self._group, flat, list(map(sum, sent)), list(map(sum, received)))
        for sizes, part in zip(
            received, taken.view(-1).split(list(map(sum, received))), strict=True
        ):
            yield part.split(list(sizes))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
