"""A stage of `benchmarks.interference`: computes, waits for the other stage, and saves each step.

python -m benchmarks.bubbles_worker --rank 0 --socket PATH --bytes N --out FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from benchmarks.states import State

STAGES = 2
JOB = "bubbles"
MICROBATCHES = 2
STEPS = 12
STEPS_LEFT_OUT = 5
"""Steps of each way that are not timed: a schedule relies on the bubbles of four earlier ones."""

WIDTH = 1024
"""Edge of the matrices that are multiplied, so that a computation reads memory all the time."""

NO_SAVES, UNMARKED, MARKED = "no saves", "waits not marked", "waits marked as bubbles"
WAYS = (NO_SAVES, UNMARKED, MARKED)

Waits = Callable[[], AbstractContextManager[None]]


class Stage:
    """One of two stages: the first computes a microbatch, then the second one its forward and
    backward pass, then the first one the backward pass. Each waits while the other computes."""

    def __init__(self, rank: int, products: int) -> None:
        self._rank, self._products = rank, products
        self._matrix, self._message = torch.ones(WIDTH, WIDTH), torch.zeros(1024)

    def step(self, waits: Waits) -> None:
        for _ in range(MICROBATCHES):
            if self._rank == 0:
                self._compute()
                dist.send(self._message, 1)
                self._receive(1, waits)
                self._compute()
            else:
                self._receive(0, waits)
                self._compute()
                self._compute()
                dist.send(self._message, 0)

    def _receive(self, source: int, waits: Waits) -> None:
        with waits():
            dist.recv(self._message, source)

    def _compute(self) -> None:
        for _ in range(self._products):
            self._matrix @ self._matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--products", type=int, required=True, help="of a pass of a microbatch")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=STAGES)
    state, stage = State(options.bytes), Stage(options.rank, options.products)
    session = holdfast.init(
        model=state.model,
        optimizer=state.optimizer,
        topology=holdfast.Topology(dp=1, pp=STAGES),
        socket=options.socket,
        job=JOB,
    )
    if session.restore() is not None:
        raise RuntimeError("a new job restored something")
    session.prepare()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    number = 0
    for _ in range(options.rounds):
        for way in WAYS:
            taken = []
            for _ in range(STEPS):
                dist.barrier()
                began_s = time.perf_counter()
                stage.step(session.bubble if way == MARKED else nullcontext)
                state.optimizer.step()  # waits until the tensors may change
                taken.append(time.perf_counter() - began_s)
                number += 1
                if way != NO_SAVES:
                    session.save(number)
            times[way].append(statistics.fmean(taken[STEPS_LEFT_OUT:]))
    dist.barrier()
    session.close()
    options.out.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
