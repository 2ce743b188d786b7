"""Processes of two worlds: one rank is replaced between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from members import Members
from ranks import run_ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch

from holdfast import elastic
from holdfast._elastic.world import World

TIMEOUT_S = 150.0
RANKS, LOST = 4, 3
PROCESSES = [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)]
"""Rank and first world of each process: the last one takes the place of rank 3."""


def total_of(group: Any) -> float:
    """Sum of 2**rank over the ranks of `group`, so that it says who they are."""
    number = torch.tensor(float(2 ** dist.get_rank()))
    dist.all_reduce(number, group=group)
    return number.item()


class Process:
    """One process of a test, and the clock by which all of them agree.

    Args:
        named: further arguments of `elastic.init`.
    """

    def __init__(
        self, process: int, socket: str, port: str, backend: str = "gloo", **named: Any
    ) -> None:
        self.rank, self.first = PROCESSES[process]
        os.environ.update(HOLDFAST_SOCKET=socket, HOLDFAST_JOB="job", RANK=str(self.rank))
        os.environ["WORLD_SIZE"] = str(RANKS)
        torch.set_num_threads(1)
        self.clock: Any = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=TIMEOUT_S))
        self.clock.get(f"began-{self.first}")
        self.world: World = elastic.init(backend, **named)

    def change_world(self) -> bool:
        """Go from world 1 to world 2. Return False in the process that is lost."""
        self.clock.add("done-1", 1)
        if self.rank == LOST:
            self.clock.get("began-2")
            self.world.close()
            return False
        self.leave_world()
        self.world.join()
        return True

    def is_cut_off(self) -> bool:
        """End world 1. In the process that is lost, keep its connections until all others have left
        what they were waiting in, as those of a node that is cut off, and return True."""
        self.clock.add("done-1", 1)
        if self.rank == LOST:
            for other in range(LOST):
                self.clock.get(f"left-{other}")
            self.world.close()
        return self.rank == LOST

    def leave_world(self) -> None:
        """Leave world 1, once it has ended."""
        self.clock.set(f"left-{self.rank}", "")
        following = self.world._following
        assert following is not None and following.wait_newer(1, TIMEOUT_S)
        self.world.leave()

    def end(self) -> None:
        self.clock.add("done-2", 1)
        self.clock.get("began-3")
        self.world.close()


def run_worlds(body: Callable[..., None], directory: Path, *arguments: Any) -> None:
    """Run `body(process, socket, port, *arguments)` in each process."""
    worlds = {1: range(RANKS), 2: range(RANKS)}
    members = Members(directory / "socket", worlds)  # type: ignore[abstract]  # it serves two calls
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        with members.begin_all(clock):
            given = (str(directory / "socket"), str(clock.port), *arguments)
            run_ranks(body, given, len(PROCESSES))
    finally:
        members.stop()
