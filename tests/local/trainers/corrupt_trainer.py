"""Trains replicas of a small model, of which one flips a bit once; what they end with is exact.

    corrupt_trainer.py FLIPS RANK DIRECTORY

At step `FLIPS`, rank `RANK` flips a bit of its parameters, once in the job: a file in `DIRECTORY`
remembers it. Each rank leaves its state there when it ends.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

STEPS = 24
WAIT_S = 60.0

Sum = Callable[[torch.Tensor], object]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, add_up: Sum) -> None:
    """Train one step. All ranks have the same batch, so sums do not depend on their order."""
    optimizer.zero_grad()
    model(torch.arange(16.0).view(2, 8) * 0.01 * step).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        add_up(parameter.grad)
        parameter.grad.mul_(0.25)
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of the training state, in one order."""
    return [
        tensor.detach().clone()
        for parameter in model.parameters()
        for tensor in (parameter, *dict(sorted(optimizer.state[parameter].items())).values())
    ]


def undisturbed(ranks: int) -> list[torch.Tensor]:
    """The state with which ranks end in which nothing goes wrong."""
    model, optimizer = model_and_optimizer()

    def add_up(gradient: torch.Tensor) -> None:
        own = gradient.clone()
        for _ in range(ranks - 1):
            gradient.add_(own)

    for step in range(1, STEPS + 1):
        train(model, optimizer, step, add_up)
    return state_of(model, optimizer)


def main() -> None:
    flips, wrong, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = model_and_optimizer()
    with holdfast.init(model=model, optimizer=optimizer) as session:
        for step in range((session.restore() or 0) + 1, STEPS + 1):
            train(model, optimizer, step, dist.all_reduce)
            if rank == wrong and step == flips and not (directory / "flipped").exists():
                (directory / "flipped").touch()
                with torch.no_grad():
                    weight = model.get_parameter("1.weight").view(-1)[:1]
                    weight.view(torch.int32).bitwise_xor_(1 << 21)
            error = session.save(step).protected.exception(WAIT_S)
            while isinstance(error, holdfast.ReplicasDivergedError):
                signal.pause()  # until its launcher ends this process
    torch.save(state_of(model, optimizer), directory / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
