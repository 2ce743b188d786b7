"""Pipeline stages whose modules torch wraps: DDP averages over the ranks of a stage, FSDP2 and
tensor parallelism divide a stage's parameters among them, and HSDP has as many replicas as ranks.

Arguments, faults and the lines of the logs are those of `pipeline_trainer`, with `--wrap` besides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pipeline_trainer import change_steps, save_every
from staying_trainer import Faults
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast import elastic

WIDTH, BATCH = 16, 4
WAYS = ("ddp", "fsdp", "hsdp", "tp")


def make_stage(way: str, pipeline: elastic.Pipeline) -> tuple[nn.Module, nn.Module]:
    """A stage of two layers, and what runs it."""
    stages, ranks = pipeline.topology.pp, pipeline.topology.dp * pipeline.topology.tp
    torch.manual_seed(pipeline.stage)
    layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    stage = nn.ModuleDict({f"stage{pipeline.stage}": layers})
    if way == "ddp":
        return stage, pipeline.world.ddp(layers, group=pipeline.group)
    names = ("pp", "ranks", "shard")
    whole = init_device_mesh("cpu", (stages, ranks, 1), mesh_dim_names=names)
    mesh = whole["ranks", "shard"] if way == "hsdp" else whole["ranks"]
    if way in ("fsdp", "hsdp"):
        fully_shard(layers, mesh=mesh)
    else:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(layers, mesh, plan, src_data_rank=None)
    return stage, layers


def run_step(pipeline: elastic.Pipeline, module: nn.Module, x_BD: torch.Tensor) -> float:
    """Forward and backward of one micro-batch; the loss of all pipelines."""
    if not pipeline.is_first:
        x_BD = pipeline.receive_activation(0, torch.empty_like(x_BD)).requires_grad_()
    out_BD = module(x_BD)
    loss = torch.zeros(1)
    if pipeline.is_last:
        mean = out_BD.square().mean()
        mean.backward()
        loss += mean.detach()
    else:
        pipeline.send_activation(0, out_BD.detach())
        out_BD.backward(pipeline.receive_gradient(0, torch.empty_like(out_BD)))
    if not pipeline.is_first:
        assert x_BD.grad is not None
        pipeline.send_gradient(0, x_BD.grad)
    return float(pipeline.add_up(loss))


def digest(stage: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this rank's parts of parameters and states."""
    hashed = hashlib.sha256()
    for _, p in sorted(stage.named_parameters()):
        for _, value in (("", p), *sorted(optimizer.state[p].items())):
            local = value.to_local() if isinstance(value, DTensor) else value
            hashed.update(local.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def main(directory: Path, argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--log-mib", type=float, default=64)
    parser.add_argument("--wrap", choices=WAYS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world = elastic.init("gloo")
    ranks = world.size // args.stages
    degrees = {"dp": 1, "tp": ranks} if args.wrap == "tp" else {"dp": ranks}
    topology = holdfast.Topology(pp=args.stages, **degrees)
    pipeline = elastic.Pipeline(world, topology, log_bytes=int(args.log_mib * 2**20))
    stage, module = make_stage(args.wrap, pipeline)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    session = holdfast.init(
        model=stage, optimizer=optimizer, topology=topology, world=world, pipeline=pipeline
    )
    replica = topology.coordinates(world.rank).dp
    for step in session.steps(args.steps):
        with step:
            draw = torch.Generator().manual_seed(1000 * replica + step)
            optimizer.zero_grad()
            loss = run_step(pipeline, module, torch.randn(BATCH, WIDTH, generator=draw))
            optimizer.step()
            line: dict[str, Any] = {"step": step, "loss": loss, "epoch": session.epoch}
            line |= {"time": time.time(), "pid": os.getpid(), "logged": pipeline.log.nbytes}
            line["state"] = digest(stage, optimizer)
            with (directory / f"log-{world.rank}").open("a") as log:
                log.write(json.dumps(line) + "\n")
    session.close()
    world.close()


if __name__ == "__main__":
    every, diverge, given, *rest = sys.argv[1:]
    save_every(int(every))
    faults = Faults(Path(given), int(os.environ["RANK"]))
    change_steps(faults, diverge=diverge == "diverge")
    main(Path(given), rest)
