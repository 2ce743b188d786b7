"""A rank of `benchmarks.detectors`: trains a replica, and takes turns with the ranks of other jobs.

    detectors_worker.py --folder FOLDER --block STEPS --compute SECONDS --bytes N [--off]

Rank 0 waits for a byte in `FOLDER/turn` before each block of steps, and writes the block's seconds
into `FOLDER/done`; the other ranks wait for rank 0. Started by the launcher as a script.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast._copying.devices import Device
from holdfast._session import torch_waits
from holdfast._session.step_times import StepMeter
from holdfast_core.topology import Topology

WIDTH = 512
BYTES_PER_PARAMETER = 12
"""Of a float32 weight and Adam's two moments."""
PRODUCT = 4096
"""Rows of the matrices whose products a GPU computes."""


class Turns:
    """Blocks of steps that this job may train.

    Args:
        rank: of this process; only rank 0 asks for turns.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        names = ("turn", "done") if rank == 0 else ()
        self._files = [os.open(folder / name, os.O_RDWR) for name in names]
        self._began_s = 0.0

    def next(self) -> None:
        """End a block, and wait until the next one may begin."""
        dist.barrier()
        if self._rank == 0:
            turn, done = self._files
            os.write(done, f"{time.perf_counter() - self._began_s}\n".encode())
            os.read(turn, 1)
        dist.barrier()
        self._began_s = time.perf_counter()


def computing(seconds: float, device: torch.device) -> Callable[[], object]:
    """What computes for so long: a GPU. Without one, this process sleeps, as a thread does that
    waits for one."""
    if device.type != "cuda":
        return lambda: time.sleep(seconds)
    matrix = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=device)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()

    multiply(10)
    began_s = time.perf_counter()
    multiply(100)
    times = round(seconds / ((time.perf_counter() - began_s) / 100))
    return lambda: multiply(max(times, 1))


def measure_nothing(topology: Topology, rank: int, device: Device) -> StepMeter:
    """The meter of a session that does not measure the parts of its steps. Arguments are those of
    `torch_waits.measured`."""
    meter = StepMeter()
    meter.stop()
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--off", action="store_true")
    options = parser.parse_args()
    if options.off:
        torch_waits.measured = measure_nothing
    torch.set_num_threads(1)
    world = holdfast.elastic.init("gloo", stay=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layers = max(1, options.bytes // (BYTES_PER_PARAMETER * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
    replica = world.ddp(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compute, turns = computing(options.compute, device), Turns(options.folder, world.rank)
    batch, ended = torch.ones(8, WIDTH, device=device), 0
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    for step in session.steps(10**9):
        if int(step) >= ended:  # not if it is executed again
            ended = int(step) + options.block
            turns.next()
        with step:
            optimizer.zero_grad()
            loss = replica(batch).square().mean()
            compute()
            loss.backward()
            optimizer.step()


main()
