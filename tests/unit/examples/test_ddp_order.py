"""What docs/trainer.md says of DDP's first step after a restart, shown with three processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

WORLD = 3
"""With two ranks a sum has one order only."""


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5)


def _gradients(model: DistributedDataParallel, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    model.zero_grad()
    model(torch.randn(16, 256)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    undisturbed = _model()
    _gradients(undisturbed, rank, 1)
    second = _gradients(undisturbed, rank, 2)
    restarted = _gradients(_model(), rank, 2)
    warm = _model()
    _gradients(warm, rank, 7)
    warmed = _gradients(warm, rank, 2)
    if rank == 0:
        found = {
            "restarted": torch.equal(restarted, second),
            "close": torch.allclose(restarted, second),
            "warmed": torch.equal(warmed, second),
        }
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pass_before_the_first_step_makes_it_agree_to_the_bit(tmp_path: Path) -> None:
    spawn(_rank, (str(tmp_path),), WORLD)
    found = json.loads((tmp_path / "found").read_text())
    assert found == {"restarted": False, "close": True, "warmed": True}
