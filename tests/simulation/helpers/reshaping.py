"""Model of a job whose worlds have other sizes, and read each other's sparse windows.

One seed decides the topologies of a few worlds that follow one another, how many steps each one
trains, and who reads which old rank's snapshot. Ranks are threads with real sessions over real
snapshots in files; their windows repeat the optimizer, so any world can read their frames. A world
may end within a window, or before it has saved anything, and then the next one goes on from an
older line, perhaps that of a world before it. After each restore and each step every rank must have
the bytes of a run in one world.
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from worlds import EXPERTS, WAIT_S, Ranks, State, whole_state

from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.snapshots.generations import Generation
from holdfast_core.topology import Topology

OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"optimizer": "adamw"},
    {"optimizer": "sgd"},
    {"optimizer": "masters", "dtype": torch.bfloat16},
)
STACK = "layers.1.experts.w"
STEPS_MAX = 24
"""Most steps of a schedule."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One world of a schedule."""

    topology: Topology
    window: int
    steps: int
    """Steps that it trains."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one seed decides."""

    seed: int
    case: int
    """Index of its optimizer."""
    worlds: tuple[World, ...]

    @classmethod
    def of(cls, seed: int) -> Schedule:
        rng = random.Random(seed)
        pp = rng.choice((1, 1, 2))
        worlds = []
        for number in range(rng.choice((2, 3, 4))):
            dp, window = rng.randint(1, 4 // pp), rng.choice((2, 3))
            ep = rng.choice([ep for ep in range(1, dp + 1) if dp % ep == 0 and EXPERTS % ep == 0])
            # The first save captures everything, and windows follow.
            steps = rng.choice((0, 0, 1, 1 + window, 1 + window, 2 + window, 2 * window))
            worlds.append(
                World(
                    topology=Topology(dp=dp, ep=ep, pp=pp),
                    window=window,
                    steps=steps if number else max(1, steps),
                )
            )
        return cls(seed=seed, case=rng.randrange(len(OPTIMIZERS)), worlds=tuple(worlds))

    def reads(self, number: int, captured_by: int) -> list[list[int]]:
        """For each rank of world `number` the old ranks whose snapshots it reads."""
        rng = random.Random(f"{self.seed} {number}")
        size = self.worlds[number].topology.world_size
        reads: list[list[int]] = [[] for _ in range(size)]
        for old in range(captured_by):
            for reader in rng.sample(range(size), 2 if size > 1 and rng.random() < 0.1 else 1):
                reads[reader].append(old)
        for of_rank in reads:
            rng.shuffle(of_rank)
        return reads


@dataclass(frozen=True, kw_only=True)
class Captured:
    """The newest generation that all ranks of a world have committed."""

    line: Generation
    world_size: int
    is_window: bool


def without(step: int) -> str:
    """What has no gradient in a step."""
    return STACK if step % 5 == 3 else ""


@functools.cache
def undisturbed(case: int, pp: int) -> list[State]:
    """The state after each step of a run with one rank a stage; before the first one, none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        ranks = Ranks(Path(path), Topology(dp=1, pp=pp), **OPTIMIZERS[case])
        states: list[State] = [{}]
        for step in range(1, STEPS_MAX + 1):
            for rank in ranks.ranks:
                rank.train(step, without(step))
            states.append(whole_state(ranks.states()))
        ranks.close()
    return states


def check(ranks: Ranks, wanted: State, what: str) -> None:
    """Every rank has the bytes that it should have; statistics differ between replicas."""
    for rank in ranks.ranks:
        for name, tensor in rank.state().items():
            if name.endswith("(buffer)"):
                continue
            same = torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8),
                wanted[name].contiguous().view(-1).view(torch.uint8),
            )
            assert same, f"rank {rank.rank} has another {name} {what}"


def train(ranks: Ranks, world: World, epoch: int, after: int, counts: Counter[str]) -> int | None:
    """Train and save the steps of a world, and return the newest one whose snapshot is committed;
    None if there is none."""
    committed = None
    for number in range(1, world.steps + 1):
        step = after + number
        for rank in ranks.ranks:
            rank.train(step, without(step))
        handles = ranks.each(lambda rank, step=step: rank.session.save(step))  # type: ignore[misc]
        for handle in handles:
            handle.staged.result(WAIT_S)
        # The first save is committed by itself, and a window with its last one.
        if number == 1 or (number - 1) % world.window == 0:
            for handle in handles:
                handle.committed.result(WAIT_S)
            committed = step
            counts["window" if number > 1 else "whole"] += 1
    counts["cut off"] += world.steps > 1 and (world.steps - 1) % world.window > 0
    return committed


def play(schedule: Schedule) -> Counter[str]:
    """Train through the worlds of one schedule, and check each of them."""
    counts: Counter[str] = Counter()
    states = undisturbed(schedule.case, schedule.worlds[0].topology.pp)
    captured: Captured | None = None
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        for number, world in enumerate(schedule.worlds):
            epoch, size = number + 1, world.topology.world_size
            more: dict[str, Any] = {}
            if captured is not None:
                more = {
                    "captured_by": captured.world_size,
                    "reads": schedule.reads(number, captured.world_size),
                    "make_daemon": functools.partial(FakeDaemon, line=captured.line),
                }
            windows = SparseWindows(window=world.window, repeats=Repeats.OPTIMIZER)
            ranks = Ranks(
                Path(path),
                world.topology,
                epoch=epoch,
                settings={"policy": windows},
                **OPTIMIZERS[schedule.case],
                **more,
            )
            step = 0 if captured is None else captured.line.step
            assert set(ranks.restore()) == {step or None}, f"world {epoch} restores another step"
            if captured is not None:
                check(ranks, states[step], f"after world {epoch} has restored step {step}")
                counts["restored window" if captured.is_window else "restored whole"] += 1
                counts["of an older world"] += captured.line.epoch < epoch - 1
            committed = train(ranks, world, epoch, step, counts)
            check(ranks, states[step + world.steps], f"at the end of world {epoch}")
            ranks.close()
            if committed is not None:
                captured = Captured(
                    line=Generation(epoch, committed),
                    world_size=size,
                    is_window=committed > step + 1,
                )
    return counts


def run(first: int, count: int) -> Counter[str]:
    """Run `count` schedules; the summed counts of their events.

    Raises:
        AssertionError: when an invariant broke; the message begins with the seed.
    """
    total: Counter[str] = Counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks are threads already
    logging.disable(logging.ERROR)
    try:
        for seed in range(first, first + count):
            schedule = Schedule.of(seed)
            try:
                total.update(play(schedule))
            except Exception as error:
                raise AssertionError(f"seed {seed} failed: {error!r}\n{schedule}") from error
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    for name, count in sorted(run(options.first, options.count).items()):
        print(f"  {name:20} {count}")


if __name__ == "__main__":
    main()
