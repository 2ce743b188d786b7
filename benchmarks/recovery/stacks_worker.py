"""A small loop under DDP, FSDP2 or HSDP, for `benchmarks.recovery.stacks`.

python stacks_worker.py LAYOUT STEPS FOLDER [--restart]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from benchmarks.recovery.stacks_model import StepLog, backward, make_model, state_sha256


def main() -> None:
    layout, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    world = holdfast.elastic.init("gloo", stay="--restart" not in sys.argv)
    model: nn.Module = make_model()
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
    log = StepLog(folder, world.rank)
    for step in session.steps(steps, seed=1):
        with step:
            optimizer.zero_grad()
            backward(model, int(step), world.rank)
            optimizer.step()
            log.completed(int(step), world.epoch)
    log.end(state_sha256(model, optimizer))
    session.close()
    world.close()


if __name__ == "__main__":
    main()
