"""A trainer with experts of each rank's own, which dies in its first steps where a file says so.

Each rank appends a line for each step to `log-<rank>`: the step, its epoch and its process. Faults
are as in `staying_trainer`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from staying_trainer import PACE_S, Faults
from torch import nn

import holdfast
from holdfast.elastic import World

EXPERTS, WIDTH = 4, 4


class Model(nn.Module):
    """A layer that all ranks hold, and one rank's share of the experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(self.gate(x)) for expert in self.experts]).sum(0)


def add_up(world: World, model: Model) -> None:
    """Add the gradients of all ranks: experts get those of their holders, here one and the same
    number on all ranks."""
    for parameter in model.gate.parameters():
        assert parameter.grad is not None
        world.wait(dist.all_reduce(parameter.grad, async_op=True))
    for parameter in model.experts.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--ep", type=int, required=True)
    parser.add_argument("--stay", action="store_true", help="never report that nothing can be kept")
    args = parser.parse_args()
    if args.stay:
        World.begin_alone = lambda self, *, held_beside: None  # type: ignore[method-assign]
    world = holdfast.elastic.init("gloo")
    faults = Faults(args.directory, world.rank)
    faults.at("before-init")
    model = Model(EXPERTS // args.ep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: faults.at("before-vote"))
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        topology=holdfast.Topology(dp=world.size, ep=args.ep),
        world=world,
    )
    optimizer.register_step_pre_hook(lambda *_: faults.at("after-vote"))
    optimizer.register_step_post_hook(lambda *_: faults.at("after-optimizer"))
    with (args.directory / f"log-{world.rank}").open("a", buffering=1) as log:
        for step in session.steps(10**6):
            with step:
                time.sleep(PACE_S)
                optimizer.zero_grad()
                x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(int(step)))
                loss = model(x).square().mean()
                faults.at("forward")
                loss.backward()
                add_up(world, model)
                optimizer.step()
                log.write(json.dumps([int(step), world.epoch, os.getpid()]) + "\n")


if __name__ == "__main__":
    main()
