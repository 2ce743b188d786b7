"""Layers with uneven copies on several ranks, beside one dense layer that computes the same."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from holdfast import elastic, moe
from holdfast_core.elastic_experts.plans import LayerPlan, choose_capturers

DIM, HIDDEN = 8, 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A world, its plan, and how tokens are routed."""

    copies: tuple[tuple[tuple[int, int], ...], ...]
    """For each expert its (rank, number of copies)."""
    ranks: int
    nproc: int = 1
    top_k: int = 1
    batch: tuple[int, ...] = ()
    """Tokens of each rank; 7 of rank 0, 8 of rank 1 and so on without."""
    favourite: int | None = None
    """Expert that all tokens choose first."""
    shunned: int | None = None
    """Expert that no token chooses."""

    def plan(self) -> moe.ExpertPlan:
        """An expert plan with these copies, whatever a planner would say of them."""
        experts = len(self.copies)
        seats = max(
            sum(any(r == rank for r, _ in held) for held in self.copies)
            for rank in range(self.ranks)
        )
        room = moe.ExpertRoom(
            nodes=self.ranks // self.nproc, nproc=self.nproc, rank_seats=max(seats, experts)
        )
        made = moe.plan_experts([[1] * experts], room, min_copies=1)
        layer = LayerPlan(copies=self.copies, tokens=(1,) * experts)
        parts = {name: getattr(made, name) for name in made.__slots__}
        capturers = choose_capturers([layer], self.ranks)
        return moe.ExpertPlan(**{**parts, "layers": (layer,), "capturers": capturers})

    @property
    def batches(self) -> tuple[int, ...]:
        return self.batch or tuple(7 + rank for rank in range(self.ranks))

    def tokens(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The tokens of each rank."""
        draw = torch.Generator()
        draw.manual_seed(11)
        return [torch.randn(n, DIM, generator=draw, dtype=dtype) for n in self.batches]

    def steer(self, gate: moe.Gate) -> None:
        """Make the gate favour and shun experts, by the first coordinate of tokens."""
        with torch.no_grad():
            for expert, value in ((self.favourite, 50.0), (self.shunned, -50.0)):
                if expert is not None:
                    gate.weight[expert] = 0
                    gate.weight[expert, 0] = value


def join(
    rank: int, port: int, ranks: int, backend: str = "gloo"
) -> tuple[elastic.World, elastic.WorldGroup]:
    """Join a world as torchrun's workers do."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    world = elastic.init(backend, stay=False)
    return world, world.group([range(ranks)])


def make_layer(
    shape: Shape, group: elastic.WorldGroup, dtype: torch.dtype, expert: Any = HIDDEN
) -> moe.MoELayer:
    torch.manual_seed(5)
    layer = moe.MoELayer(DIM, expert, shape.plan(), 0, group, top_k=shape.top_k, seed=3)
    shape.steer(layer.gate)
    return layer.to(dtype)


def in_first_coordinate(tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tokens whose first coordinate is positive, for `Shape.steer`."""
    return [torch.cat([one[:, :1].abs() + 1, one[:, 1:]], dim=1) for one in tokens]


class Dense:
    """All experts and all tokens in one process, as formulas."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        experts = len(shape.copies)
        torch.manual_seed(5)
        self.gate = moe.Gate(DIM, experts, shape.top_k)
        shape.steer(self.gate)
        self.gate.to(dtype)
        held = moe.SeatedExperts(DIM, HIDDEN, range(experts), experts)
        held.initialize("3/0")
        held.to(dtype)
        self.w_in, self.w_out = held.w_in, held.w_out

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs, weights, chosen = self.gate(x)
        out = torch.zeros_like(x)
        for expert in range(len(self.w_in)):
            weight = (weights * (chosen == expert)).sum(1, keepdim=True).to(x.dtype)
            out = out + weight * (F.gelu(x @ self.w_in[expert]) @ self.w_out[expert])
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.w_in))
        portion = (counts / counts.sum()).to(probs)
        return out, len(counts) * (portion * probs.mean(0)).sum()


def backward(out: torch.Tensor, balance: torch.Tensor, tokens: int) -> None:
    """Backward pass of a loss that is a mean over all ranks' tokens."""
    ((out * torch.cos(out.detach())).sum() / tokens + 0.1 * balance).backward()


@torch.no_grad()
def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found - expected).abs().max()) / scale if scale else float(found.abs().sum())


def every(world: Any, group: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Equally large tensors of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(world.size)]
    torch.distributed.all_gather(found, tensor.contiguous(), group=group.now)
    return found
