"""Trains four replicas, of which one does what a file asks of it, once: it hangs, is slow, or flips
a bit.

    culprit_trainer.py DIRECTORY PACE_S

Between its own work and its optimizer's, each step sleeps for `PACE_S` seconds. A file `fault-RANK`
in `DIRECTORY` has the name of the fault. The rank takes it away, and suffers it from its next step
on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast

DIRECTORY = Path(sys.argv[1])
PACE_S = float(sys.argv[2])
WORK_S = 0.003
"""Processor time of each step, at least."""
SLOW_SHARE, SLOW_S_MAX = 0.5, 2.0
"""Part of the last step for which a slow rank works longer than the others, and the most of it."""


class Fault:
    """What is wrong with this rank."""

    def __init__(self, rank: int) -> None:
        self._file = DIRECTORY / f"fault-{rank}"
        self.name = ""

    def look(self) -> None:
        """Take the fault that a file asks for, if there is one."""
        if self._file.exists():
            self.name = self._file.read_text()
            self._file.rename(self._file.with_suffix(".suffered"))


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Batches; one of them never comes if that is the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fault.name == "data":
            os.read(os.open(DIRECTORY / "data.fifo", os.O_RDWR), 1)
        return torch.full((8,), 0.001 * index)


class Model(nn.Module):
    """Two layers, between which a bit flips, of what goes forward or back, if that is the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.flips = ""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        work(WORK_S)
        hidden = nn.functional.gelu(self.first(batch))
        if self.flips == "wrong_activation":
            flip(hidden)
        elif self.flips == "wrong_gradient":
            hidden.register_hook(flipped)
        out: torch.Tensor = self.second(hidden)
        return out


def flip(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 22)


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    flip(other)
    return other


def write_to_storage() -> None:
    """Open a file on a mount that does not answer."""
    (DIRECTORY / "mount.fifo").open("wb").close()


def add_up(tensor: torch.Tensor, groups: list[Any]) -> None:
    for group in groups:
        dist.all_reduce(tensor, group=group)


def add_up_backwards(tensor: torch.Tensor, groups: list[Any]) -> None:
    add_up(tensor, groups[::-1])


def barrier(group: Any) -> None:
    dist.barrier(group=group)


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def main() -> None:
    world = holdfast.elastic.init("gloo", stay=False)
    groups = [dist.new_group() for _ in range(3)]
    torch.manual_seed(0)
    model, fault = Model(), Fault(world.rank)
    replica = world.ddp(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    batches, executed, began_s = iter([torch.empty(0)]), 0, time.monotonic()
    for step in session.steps(10**9):
        fault.look()
        if fault.name == "leaves":
            break
        with step:
            if step.resumed:
                data = torch.utils.data.Subset(Data(fault), range(int(step), 10**6))
                batches = iter(torch.utils.data.DataLoader(data, num_workers=0))
            executed = executed + 1 if step.resumed else 0
            if fault.name == "storage":
                write_to_storage()
            # A wrong value comes once in each step, and not when the step is executed again.
            model.flips = fault.name if executed == 0 else ""
            optimizer.zero_grad()
            if fault.name == "slow":
                work(min(SLOW_SHARE * (time.monotonic() - began_s), SLOW_S_MAX))
            began_s = time.monotonic()
            replica(next(batches)).square().sum().backward()
            (add_up_backwards if fault.name == "order" else add_up)(torch.zeros(1), groups[:2])
            time.sleep(PACE_S)
            optimizer.step()
            if fault.name in ("flip", "moment"):
                moment = optimizer.state[model.second.weight]["exp_avg"]
                flip(model.second.weight if fault.name == "flip" else moment)
                fault.name = ""
    barrier(groups[2])


main()
