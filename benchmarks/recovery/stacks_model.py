"""The model, data and step log of the loops that `benchmarks.recovery.stacks` measures."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, BATCH, LAYERS = 128, 8, 4
PACE_S = 0.01


def make_model() -> nn.Sequential:
    """The same parameters in each process."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def backward(model: nn.Module, step: int, rank: int) -> None:
    """Add up the gradients of the batch that `rank` has in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    (model(inputs) - inputs).square().mean().backward()


def state_sha256(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hash of this rank's parameters and optimizer state."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
            digest.update(local.detach().numpy().tobytes())
    return digest.hexdigest()


class StepLog:
    """Appends a rank's completed steps to `folder/<rank>`, each with the epoch, the process and the
    time, and last the hash of its final state."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"{rank}").open("a", buffering=1)

    def completed(self, step: int, epoch: int) -> None:
        """Log a step, and rest a moment."""
        self._file.write(f"{step} {epoch} {os.getpid()} {time.time()}\n")
        time.sleep(PACE_S)

    def end(self, sha256: str) -> None:
        """Log the end."""
        self._file.write(f"end {sha256}\n")
