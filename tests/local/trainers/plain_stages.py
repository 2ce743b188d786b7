"""The model of `train_moe_pipeline.py`, whose stages send with `torch.distributed` itself: the
session knows of them by the topology only, and no message is logged.

Arguments are those of the example, and each rank appends the same lines to `log-<rank>`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from train_moe import CHOICES, MasterAdamW, MoE, Passages
from train_moe_pipeline import Stage, parse_args, reduce_gradients, run_microbatches, state_sha256

import holdfast
from holdfast import elastic


class PlainStages:
    """What the example asks of a `Pipeline`, without a log."""

    def __init__(self, world: elastic.World, topology: holdfast.Topology) -> None:
        self.world, self.topology = world, topology
        replicas = topology.dp
        stages = [range(at, at + replicas) for at in range(0, world.size, replicas)]
        self.group = world.group(stages)
        self.stage = topology.coordinates(world.rank).pp
        self.is_first, self.is_last = self.stage == 0, self.stage == topology.pp - 1

    def send_activation(self, microbatch: int, tensor: Tensor) -> None:
        del microbatch
        dist.send(_bytes_of(tensor.contiguous()), self.world.rank + self.topology.dp)

    def send_gradient(self, microbatch: int, tensor: Tensor) -> None:
        del microbatch
        dist.send(_bytes_of(tensor.contiguous()), self.world.rank - self.topology.dp)

    def receive_activation(self, microbatch: int, into: Tensor) -> Tensor:
        del microbatch
        dist.recv(_bytes_of(into), self.world.rank - self.topology.dp)
        return into

    def receive_gradient(self, microbatch: int, into: Tensor) -> Tensor:
        del microbatch
        dist.recv(_bytes_of(into), self.world.rank + self.topology.dp)
        return into

    def add_up(self, tensor: Tensor) -> Tensor:
        self.world.wait(dist.all_reduce(tensor, async_op=True))
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """A view as bytes: gloo does not send bfloat16."""
    return tensor.detach().view(-1).view(torch.uint8)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world = elastic.init("gloo")
    topology = holdfast.Topology(dp=world.size // args.stages, pp=args.stages)
    stages: Any = PlainStages(world, topology)
    alone = world.group([[rank] for rank in range(world.size)])
    layer = stages.stage
    torch.manual_seed(layer)
    stage = Stage(layer, args.stages, 1, alone)
    model = nn.ModuleDict({f"layer{layer}": stage})
    for name, p in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    model.to(torch.bfloat16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    data = Passages(args.seq + 1)
    replica = topology.coordinates(world.rank).dp
    sampler = holdfast.RecoverableSampler(data, rank=replica, replicas=topology.dp)
    loader = DataLoader(data, args.microbatches, sampler=sampler, generator=torch.Generator())
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"sampler": sampler},
        topology=topology,
        world=world,
    )
    (moe,) = (part for part in model.modules() if isinstance(part, MoE))
    for step in session.steps(args.steps, seed=args.seed):
        with step:
            if step.resumed:
                batches = itertools.chain.from_iterable(itertools.repeat(loader))
            bytes_BT = next(batches)
            optimizer.zero_grad()
            loss = run_microbatches(stages, stage, bytes_BT, args.microbatches)
            mean_loss = reduce_gradients(stages, model, loss)
            optimizer.step()
            sampler.advance(len(bytes_BT))
            session.count_tokens(layer, moe.routed_E, CHOICES * len(bytes_BT) * args.seq)
            if args.directory:
                line: dict[str, Any] = {"step": step, "loss": mean_loss, "epoch": session.epoch}
                line |= {"time": time.time(), "pid": os.getpid()}
                line["state"] = state_sha256(model, optimizer)
                with (args.directory / f"log-{world.rank}").open("a") as log:
                    log.write(json.dumps(line) + "\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
