"""A small trainer whose global batch is the same in worlds of any size, under DDP or with a model
that torch shards over the ranks.

Each process appends a line for each step to `log-<pid>`. A file `fault-<pid>` makes it fail at a
point, as in `staying_trainer`. Ranks compute their part of the batch in passes of at most `LIMIT`
samples, in float64: `History` in one process, which computes each batch at once, finds the same
losses except for rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from staying_trainer import Faults
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

import holdfast
from holdfast import Topology, elastic

SAMPLES, BATCH, LIMIT, WIDTH, SEED = 5000, 11, 2, 8, 5
"""Neither 3 nor 4 ranks divide the batch, and each of them needs two passes."""
PACE_S = 0.03
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


def samples() -> torch.Tensor:
    """The data set: inputs, and in the last column targets."""
    seeded = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, WIDTH + 1, generator=seeded, dtype=torch.float64)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1)
    return nn.Sequential(*layers).to(torch.float64)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch[:, :-1]).squeeze(1) - batch[:, -1]).square().mean()
    return loss


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def shard(model: nn.Module, layout: str, ranks: int) -> nn.Module:
    """Shard `model` as people do, over ordinary device meshes."""
    over: Any
    if layout == "fsdp2":
        over = init_device_mesh("cpu", (ranks,))
    elif layout == "hsdp":
        over = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        # None: a process that joins later makes no collective here.
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        over = mesh["dp"]
    fully_shard(model, mesh=over)
    return model


@dataclass(frozen=True)
class Line:
    """One step that a process has run."""

    step: int
    epoch: int
    rank: int
    size: int
    passes: list[list[int]]
    """Samples of each pass."""
    loss: float
    """Mean over the global batch."""
    hash: str
    """State before the step; empty for the first."""


@dataclass(frozen=True)
class Alone:
    """One rank without others."""

    rank: int = 0
    size: int = 1


class History:
    """Samples and losses of an undisturbed run in one process, which divides no batch."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        """Run the first `steps` steps."""
        model, data = make_model(), samples()
        optimizer = make_optimizer(model)
        batches = iter(holdfast.ElasticSampler(data, BATCH, Alone(), seed=SEED))
        for indices, _ in zip(batches, range(steps), strict=False):
            optimizer.zero_grad()
            loss = mean_loss(model, data[indices])
            loss.backward()
            optimizer.step()
            self.samples.append(indices)
            self.losses.append(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--layout", choices=["ddp", "fsdp2", "hsdp", "tp"], default="ddp")
    args = parser.parse_args()
    torch.set_num_threads(1)
    faults = Faults(args.directory, os.getpid())
    world = elastic.init("gloo", any_size=True)
    data, sharded = samples(), args.layout != "ddp"
    model: Any
    if sharded:
        model = world.sharded(lambda: shard(make_model(), args.layout, world.size))
    else:
        model = world.ddp(make_model())
    optimizer = make_optimizer(model)
    tp = 2 if args.layout == "tp" else 1
    topology = Topology(dp=world.size // tp, tp=tp)
    sampler = holdfast.ElasticSampler(
        data, BATCH, world, micro_batch=LIMIT, seed=SEED, topology=topology
    )
    loader: DataLoader[int] = DataLoader(
        range(SAMPLES),  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=list,
        generator=torch.Generator(),  # each new iterator draws a number
    )
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"sampler": sampler},
        topology=topology,
        world=world,
    )
    with (args.directory / f"log-{os.getpid()}").open("a", buffering=1) as log:
        for step in session.steps(10**6):
            with step:
                if step.resumed:
                    plan = world.batch_plan(BATCH, micro_batch=LIMIT, topology=topology)
                    batches = iter(loader)
                time.sleep(PACE_S)
                optimizer.zero_grad()
                # Before the optimizer: a collective that is cut off after it costs the step.
                before = state_hash(model, optimizer) if step > 1 else ""
                passes, total = [], torch.zeros((), dtype=torch.float64)
                for part in plan.micro_batches:
                    faults.at("last-pass" if part.last else "first-pass")
                    passes.append(next(batches))
                    if sharded:
                        model.module.set_requires_gradient_sync(part.last)
                    with model.no_sync() if not (sharded or part.last) else nullcontext():
                        loss = mean_loss(model, data[passes[-1]])
                        (loss * part.averaged_weight).backward()
                    total += loss.detach() * part.summed_weight / tp
                world.wait(dist.all_reduce(total, async_op=True))
                faults.at("before-optimizer")
                optimizer.step()
                sampler.advance()
                line = {
                    "step": int(step),
                    "epoch": world.epoch,
                    "rank": world.rank,
                    "size": world.size,
                    "passes": passes,
                    "loss": float(total),
                    "hash": before,
                }
                log.write(json.dumps(line) + "\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
