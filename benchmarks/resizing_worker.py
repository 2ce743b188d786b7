"""A small loop under FSDP2 or HSDP in worlds of any size, for `benchmarks.resizing`.

    python resizing_worker.py LAYOUT FOLDER [--restart]

Each process appends the number of ranks, its rank, the step and the time to `FOLDER/<pid>`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

WIDTH, BATCH, LAYERS = 128, 24, 4


def main() -> None:
    layout, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    world = holdfast.elastic.init("gloo", stay="--restart" not in sys.argv, any_size=True)

    def build() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        two = layout == "hsdp"
        mesh = init_device_mesh(
            "cpu",
            (world.size // 2, 2) if two else (world.size,),
            mesh_dim_names=("replicate", "shard") if two else None,
        )
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    model = world.sharded(build)
    optimizer = torch.optim.AdamW(model.parameters())
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    with (folder / f"{os.getpid()}").open("a", buffering=1) as log:
        for step in session.steps(10**6, seed=1):
            with step:
                plan = world.batch_plan(BATCH)
                optimizer.zero_grad()
                for part in plan.micro_batches:
                    generator = torch.Generator().manual_seed(1000 * int(step) + part.start)
                    inputs = torch.randn(part.end - part.start, WIDTH, generator=generator)
                    loss = (model(inputs) - inputs).square().mean()
                    (loss * part.averaged_weight).backward()
                optimizer.step()
                time.sleep(0.01)
                log.write(f"{world.size} {world.rank} {int(step)} {time.time()}\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
