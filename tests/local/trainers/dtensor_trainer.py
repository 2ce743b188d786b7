"""A small trainer whose processes stay, with a model that torch shards over the ranks or repeats.

Each rank appends a line for each step to `log-<rank>`, with the hash of its shards of parameters
and optimizer states. Faults are those of `staying_trainer`. Each step computes the same in every
run, so a run that was disturbed has to log the hashes of one that was not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from staying_trainer import Faults, watch_calls
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import holdfast

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit/sdk/helpers"))

WIDTH, BATCH, BLOCKS = 16, 8, 3
LATE = 4
"""The step in which the script makes groups that it did not have before."""
COLLECTIVES = {
    "all_gather_single": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "_broadcast_coalesced": "broadcast",
    "new_group": "new-group",
}
"""Functions of torch.distributed, and what their points are called: before the call, and where it
has returned, perhaps before the collective is over."""
PACE_S = 0.02
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


class Points(nn.Module):
    """Points in the middle of a forward and of a backward pass."""

    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self._at = at

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._at("forward")
        if inputs.requires_grad:
            inputs.register_hook(lambda gradient: self._at("backward"))
        return inputs


class Model(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.points, self.last = Points(at), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            inputs = inputs + block(inputs)
            if number == BLOCKS // 2:
                inputs = self.points(inputs)
        output: torch.Tensor = self.last(inputs)
        return output


def shard(model: Model, layout: str, ranks: int) -> None:
    """Shard `model` as people do, over ordinary device meshes."""
    over: Any
    if layout == "fsdp2":
        over = init_device_mesh("cpu", (ranks,))
    elif layout == "hsdp":
        over = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            # None: a process that joins later makes no collective here.
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
        over = mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
            digest.update(local.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def watch_collectives(faults: Faults) -> None:
    """Make the collectives of FSDP2, of experts and of DDP's constructor points."""
    for name, point in COLLECTIVES.items():
        faults.before(dist, name, f"before-{point}", f"in-{point}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=["ddp", "fsdp2", "hsdp", "tp"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--constructs", action="store_true", help="make a DDP in each world")
    parser.add_argument("--backend", default="gloo", help="with nccl in it: gloo plays NCCL")
    parser.add_argument("--pace", type=float, default=PACE_S, help="pause in each step, in s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    faults = Faults(args.directory, int(os.environ["RANK"]))
    watch_collectives(faults)
    watch_calls(faults)

    with_nccl = "nccl" in args.backend
    if with_nccl:
        from played_nccl import play_nccl  # needs torch 2.15

        play_nccl("cpu")
    world = holdfast.elastic.init(args.backend, nccl_stays=with_nccl)
    model: Any = Model(faults.at)
    if args.layout == "ddp":
        model = world.ddp(model)
    else:
        shard(model, args.layout, world.size)
    if args.compile:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    topology = holdfast.Topology(dp=world.size // 2, tp=2) if args.layout == "tp" else None
    session = holdfast.init(model=model, optimizer=optimizer, topology=topology, world=world)
    pairs: list[Any] = []
    log = (args.directory / f"log-{world.rank}").open("a", buffering=1)
    for step in session.steps(args.steps, seed=5):
        with step:
            faults.at("begin")
            if int(step) >= LATE and not pairs:
                halves = range(0, world.size, 2)
                pairs = [dist.new_group([first, first + 1]) for first in halves]
            if args.constructs and step.resumed:
                # Its constructor compares shapes and broadcasts weights.
                DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
            optimizer.zero_grad()
            data_rank = world.rank // 2 if args.layout == "tp" else world.rank
            generator = torch.Generator().manual_seed(100 * int(step) + data_rank)
            inputs = torch.randn(BATCH, WIDTH, generator=generator)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            received = torch.empty(world.size)
            dist.all_to_all_single(received, loss.detach().repeat(world.size))
            if int(step) >= LATE:  # a line may be of an earlier step
                dist.all_reduce(loss.detach(), group=pairs[world.rank // 2])
            faults.at("before-optimizer")
            optimizer.step()
            faults.at("after-optimizer")
            time.sleep(args.pace)
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            line = {
                "step": int(step),
                "epoch": world.epoch,
                "pid": os.getpid(),
                "hash": state_hash(model, optimizer),
                "graphs": graphs,
            }
            log.write(json.dumps(line) + "\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
