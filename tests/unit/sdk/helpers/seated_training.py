"""Training of a model whose experts lie in seats, on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dense_moe import DIM, HIDDEN
from torch import nn

from holdfast import elastic, moe
from holdfast._state.capture import LiveState
from holdfast_core.topology import Topology

LAYERS, EXPERTS = 2, 4


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Trainer:
    """A model of two layers and its optimizer."""

    def __init__(
        self,
        group: elastic.WorldGroup,
        ranks: int,
        make: Any,
        loads: list[list[int]],
        expert: Any = HIDDEN,
        kind: str = "cpu",
    ) -> None:
        self.kind = kind
        room = moe.ExpertRoom(nodes=ranks, rank_seats=3)
        plan = moe.plan_experts(loads, room)
        torch.manual_seed(5)
        self.layers: Any = nn.ModuleList(
            moe.MoELayer(DIM, expert, plan, at, group) for at in range(LAYERS)
        ).to(kind)
        self.optimizer = make(self.layers.parameters())
        self.gradients = moe.SummedGradients(self.layers, group)
        self.live = LiveState(self.layers, [self.optimizer], Topology(dp=ranks), 0)

    def train(self, rank: int) -> None:
        x = torch.randn(6 + rank, DIM, generator=torch.Generator().manual_seed(rank))
        x = x.to(self.kind)
        self.optimizer.zero_grad()
        for layer in self.layers:
            x = x + layer(x)[0]
        (x.square().sum() / 21).backward()
        self.gradients.sum()
        self.gradients.clip(1.0)
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """State of the experts in seats by name, in host memory."""
        found = self.live.discover()
        return {one.name: one.tensor.cpu().clone() for one in found if one.seats is not None}


def every(own: Any) -> list[Any]:
    """The objects of all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
