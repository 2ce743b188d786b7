"""A small trainer that trains in worlds of any size, in processes that stay or start again.

Each process appends a line for each step to `log-<pid>`. A file `fault-<pid>`, or `fault-new` for
the next process that starts, makes it fail at a point, as in `staying_trainer`. A step trains
`BATCH` samples on each rank. Gradients are rounded so that their sum is exact, whatever order the
ranks are added in: `History` in one process finds the same bytes for the same sequence of sizes.
With `--transformers` the model is that of `huggingface_trainer`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import itertools
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from staying_trainer import Faults, watch_calls
from torch import nn
from torch.utils.data import DataLoader

import holdfast

SAMPLES, BATCH, WIDTH = 30_000, 2, 8
PACE_S = 0.03
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


class Task(Protocol):
    """A model, and what it learns."""

    def make_model(self) -> nn.Module:
        """The model before its first step; torch's generator is in a certain state then."""

    def loss(self, model: nn.Module, indices: list[int]) -> torch.Tensor:
        """Loss of a batch of samples."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(inputs)
        return output


class Regression:
    """Random inputs, and in the last column targets."""

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(2)
        self._data = torch.randn(SAMPLES, WIDTH + 1, generator=seeded)

    def make_model(self) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, indices: list[int]) -> torch.Tensor:
        batch = self._data[indices]
        found: torch.Tensor = (model(batch[:, :-1]).squeeze(1) - batch[:, -1]).square().mean()
        return found


def task_of(*, transformers: bool) -> Task:
    """The task; torch is all that is imported unless it is that of a model of transformers."""
    if not transformers:
        return Regression()
    found: Task = importlib.import_module("huggingface_trainer").PassagesTask()
    return found


def compute_gradients(task: Task, model: nn.Module, indices: list[int]) -> None:
    """Put the rounded gradients of a batch into the parameters."""
    task.loss(model, indices).backward()
    for parameter in model.parameters():
        if parameter.grad is None:  # of an expert without a token
            parameter.grad = torch.zeros_like(parameter)
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

    def __init__(self, task: Task) -> None:
        self._task = task
        model = task.make_model()
        self._after = [(model, make_optimizer(model), [0], torch.get_rng_state())]
        """Model, optimizer, number of samples used, and state of torch's generator, which is the
        same on all ranks, after each step."""

    def run(self, step: int, batches: list[list[int]]) -> str:
        """Run `step` after the one before it, and forget all later ones; return the state's
        hash."""
        del self._after[step:]
        model, optimizer, used, generator = copy.deepcopy(self._after[step - 1])
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for indices in batches:
            torch.set_rng_state(generator)
            model.zero_grad()
            compute_gradients(self._task, model, indices)
            for one, parameter in zip(total, model.parameters(), strict=True):
                assert parameter.grad is not None
                one.add_(parameter.grad)
        for one, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = one / len(batches)
        optimizer.step()
        after = [used[0] + sum(map(len, batches))]
        self._after.append((model, optimizer, after, torch.get_rng_state()))
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
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(FileNotFoundError):
        (args.directory / "fault-new").rename(args.directory / f"fault-{os.getpid()}")
    faults = Faults(args.directory, os.getpid())
    watch_calls(faults)
    faults.at("start")
    world = holdfast.elastic.init("gloo", stay=args.stay, any_size=True)
    faults.at("joined")
    task = task_of(transformers=args.transformers)
    model = task.make_model()
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
                        generator=torch.Generator(),  # each new iterator draws a number
                    )
                    batches = itertools.chain.from_iterable(itertools.repeat(loader))
                indices = next(batches)
                time.sleep(PACE_S)
                optimizer.zero_grad()
                compute_gradients(task, model, indices)
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
