"""A small trainer that trains in worlds of any size, in processes that stay or start again.

Each process appends a line for each step to `log-<pid>`. A file `fault-<pid>`, or `fault-new` for
the next process that starts, makes it fail at a point, as in `staying_trainer`. A step trains
`BATCH` samples on each rank. Gradients are rounded so that their sum is exact, whatever order the
ranks are added in: `History` in one process finds the same bytes for the same sequence of sizes.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from staying_trainer import Faults, watch_calls
from torch import nn
from torch.utils.data import DataLoader

import holdfast

SAMPLES, BATCH, WIDTH = 30_000, 2, 8
PACE_S = 0.03
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(inputs)
        return output


def samples() -> torch.Tensor:
    """The data set: inputs, and in the last column targets."""
    return torch.randn(SAMPLES, WIDTH + 1, generator=torch.Generator().manual_seed(2))


def compute_gradients(model: nn.Module, data: torch.Tensor, indices: list[int]) -> None:
    """Put the rounded gradients of a batch into the parameters."""
    batch = data[indices]
    loss = (model(batch[:, :-1]).squeeze(1) - batch[:, -1]).square().mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2**12).round_().div_(2**12)


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            found.update(state[name].numpy().tobytes())
    return found.hexdigest()[:16]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Line:
    """One step that a process has run."""

    step: int
    epoch: int
    rank: int
    size: int
    samples: list[int]
    hash: str
    resumed: bool


class History:
    """Training from the beginning in one process, with the batches that ranks have logged."""

    def __init__(self) -> None:
        model, self._data = Model(), samples()
        optimizer = make_optimizer(model)
        self._after = [(model, optimizer, [0])]
        """Model, optimizer and number of samples used, after each step."""

    def run(self, step: int, batches: list[list[int]]) -> str:
        """Run `step` after the one before it, and forget all later ones; return the state's
        hash."""
        del self._after[step:]
        model, optimizer, used = copy.deepcopy(self._after[step - 1])
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for indices in batches:
            model.zero_grad()
            compute_gradients(model, self._data, indices)
            for one, parameter in zip(total, model.parameters(), strict=True):
                assert parameter.grad is not None
                one.add_(parameter.grad)
        for one, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = one / len(batches)
        optimizer.step()
        self._after.append((model, optimizer, [used[0] + sum(map(len, batches))]))
        return state_hash(model, optimizer)

    def used(self, step: int) -> int:
        """Number of samples that were used up to `step`."""
        return self._after[step][2][0]


def sampler_of(rank: int, size: int) -> holdfast.RecoverableSampler:
    return holdfast.RecoverableSampler(range(SAMPLES), rank=rank, replicas=size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--stay", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(FileNotFoundError):
        (args.directory / "fault-new").rename(args.directory / f"fault-{os.getpid()}")
    faults = Faults(args.directory, os.getpid())
    watch_calls(faults)
    faults.at("start")
    world = holdfast.elastic.init("gloo", stay=args.stay, any_size=True)
    faults.at("joined")
    model, data = Model(), samples()
    optimizer = make_optimizer(model)
    sampler = sampler_of(world.rank, world.size)
    session = holdfast.init(
        model=model, optimizer=optimizer, stateful={"sampler": sampler}, world=world
    )
    with (args.directory / f"log-{os.getpid()}").open("a", buffering=1) as log:
        for step in session.steps(args.steps):
            with step:
                if step.resumed:
                    sampler.split(rank=world.rank, replicas=world.size)
                    loader: DataLoader[int] = DataLoader(
                        range(SAMPLES),  # type: ignore[arg-type]
                        BATCH,
                        sampler=sampler,
                        collate_fn=list,
                    )
                    batches = itertools.chain.from_iterable(itertools.repeat(loader))
                indices = next(batches)
                time.sleep(PACE_S)
                optimizer.zero_grad()
                compute_gradients(model, data, indices)
                faults.at("backward")
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    world.wait(dist.all_reduce(parameter.grad, async_op=True))
                    parameter.grad.div_(world.size)
                optimizer.step()
                sampler.advance(BATCH)
                line = {
                    "step": int(step),
                    "epoch": session.epoch,
                    "rank": world.rank,
                    "size": world.size,
                    "samples": indices,
                    "hash": state_hash(model, optimizer),
                    "resumed": step.resumed,
                }
                log.write(json.dumps(line) + "\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
