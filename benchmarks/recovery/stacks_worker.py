"""A small loop under DDP, FSDP2 or HSDP, for `benchmarks.recovery.stacks`.

    python stacks_worker.py LAYOUT STEPS FOLDER [--restart]

Each rank appends its step, epoch, pid and the time to `FOLDER/<rank>`, and ends with a line that
has the hash of its state.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

WIDTH, BATCH, LAYERS = 128, 8, 4


def main() -> None:
    layout, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    world = holdfast.elastic.init("gloo", stay="--restart" not in sys.argv)
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if layout == "ddp":
        model = world.ddp(model)
    else:
        two = layout == "hsdp"
        mesh = init_device_mesh(
            "cpu",
            (2, world.size // 2) if two else (world.size,),
            mesh_dim_names=("replicate", "shard") if two else None,
        )
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    with (folder / f"{world.rank}").open("a", buffering=1) as log:
        for step in session.steps(steps, seed=1):
            with step:
                generator = torch.Generator().manual_seed(1000 * int(step) + world.rank)
                inputs = torch.randn(BATCH, WIDTH, generator=generator)
                optimizer.zero_grad()
                (model(inputs) - inputs).square().mean().backward()
                optimizer.step()
                time.sleep(0.01)
                log.write(f"{int(step)} {world.epoch} {os.getpid()} {time.time()}\n")
        digest = hashlib.sha256()
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            for tensor in (parameter, *(state[name] for name in sorted(state))):
                local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
                digest.update(local.detach().numpy().tobytes())
        log.write(f"end {digest.hexdigest()}\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
