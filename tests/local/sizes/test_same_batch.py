"""A job under DDP goes on with fewer nodes, and with more again, and learns from the same batches:
its losses are those of one process, and no step is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import same_batch_trainer
from fault_files import fail_at
from local_jobs import short_folder
from same_batch_trainer import BATCH, LIMIT, History, Line
from test_fewer_nodes import START_S, Run, lose
from world_sizes import is_protected

from holdfast_cli.local import Status
from holdfast_core.batches import plan_batch
from holdfast_core.states import RestoreSource
from holdfast_core.topology import Topology

WAIT_S = 100.0
TOLERANCE = 1e-9


FRAMEWORKS = Path(__file__).parents[1].joinpath("trainers", "same_batch_framework_trainer.py")


def make_run(directory: Path, layout: str = "ddp", **spec: Any) -> Run:
    return run_of(directory, same_batch_trainer.__file__, "--layout", layout, **spec)


def run_of(directory: Path, script: str, *arguments: str, preload: str = "", **spec: Any) -> Run:
    env = [{"name": "HOLDFAST_PRELOAD", "value": preload}]
    command = [sys.executable, script, "--directory", str(directory), *arguments]
    containers = [{"name": "trainer", "command": command, "env": env}]
    trainer = {"template": {"spec": {"containers": containers}}}
    return Run(directory, stay=True, trainer=trainer, **spec)


def lines_of(directory: Path) -> dict[int, list[Line]]:
    """Steps that each process has run, by process id."""
    found = {}
    for path in directory.glob("log-*"):
        whole = path.read_text().split("\n")[:-1]
        found[int(path.name.removeprefix("log-"))] = [Line(**json.loads(one)) for one in whole]
    return found


def newest(directory: Path, rank: int, epoch: int) -> int:
    """Process that has trained as `rank` in `epoch`."""
    found = lines_of(directory).items()
    return next(
        p for p, lines in found if lines and (lines[-1].rank, lines[-1].epoch) == (rank, epoch)
    )


async def kill_in(run: Run, point: str, rank: int) -> Status:
    """Have a rank die at a point of a step; wait until all ranks train again."""
    before = run.cluster.status
    process = newest(run.directory, rank, before.epoch)
    fail_at(run.directory, process, point)
    size = len(before.local.members)
    return await run.cluster.wait_for(
        lambda status: is_protected(status, size, before.epoch), timeout_s=WAIT_S, what=point
    )


def check(lines: dict[int, list[Line]], tp: int = 1) -> list[int]:
    """Check each step against an undisturbed run; return the sizes of the worlds, in order."""
    history = History()
    history.run(max(line.step for each in lines.values() for line in each))
    steps: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in (line for each in lines.values() for line in each):
        steps[line.epoch, line.step].append(line)
        plan = plan_batch(
            BATCH,
            rank=line.rank,
            size=line.size,
            micro_batch=LIMIT,
            topology=Topology(dp=line.size // tp, tp=tp),
        )
        whole = history.samples[line.step - 1]
        assert line.passes == [whole[part.start : part.end] for part in plan.micro_batches], line
        assert line.loss == pytest.approx(history.losses[line.step - 1], rel=TOLERANCE), line
    assert all(len({line.hash for line in ranks}) == 1 for ranks in steps.values())
    assert {step for _, step in steps} == set(range(1, len(history.losses) + 1))
    return list(_changes(ranks[0].size for _, ranks in sorted(steps.items())))


def _changes(sizes: Iterator[int]) -> Iterator[int]:
    last = 0
    for size in sizes:
        if size != last:
            yield size
        last = size


async def change(run: Run) -> None:
    """Let ranks die between two passes of a step and before its optimizer, and a node go and
    return."""
    first = await run.wait_size(4, 0, "the first steps", START_S)
    await kill_in(run, "last-pass", 2)
    (home,) = [one.node for one in run.cluster.status.local.members if one.index == 1]
    await lose(run, 1, left=3)
    smaller = await kill_in(run, "before-optimizer", 0)
    await run.cluster.start_node(home)
    grown = await run.wait_size(4, smaller.epoch, "four members again", START_S)
    assert grown.epoch == first.epoch + 4
    for recovery in grown.local.recoveries:
        assert (recovery.source, recovery.lost_steps) == (RestoreSource.LIVE, 0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_nodes_become_three_and_four_again_and_learn_the_same() -> None:
    async def train(run: Run) -> None:
        try:
            await run.cluster.start()
            await change(run)
        finally:
            await run.cluster.stop()
            print(run.report())

    with short_folder() as path:
        run = make_run(path)
        asyncio.run(train(run))
        lines = lines_of(run.directory)
        assert check(lines) == [4, 3, 4]
        # Rank 3 was in all worlds, in the process that it began with, and ran each step once.
        (member,) = [each for each in lines.values() if (each[0].rank, each[0].epoch) == (3, 1)]
        assert {line.size for line in member} == {3, 4}
        assert [line.step for line in member] == list(range(1, len(member) + 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("huggingface", marks=pytest.mark.exhaustive),
        pytest.param("counting", marks=pytest.mark.exhaustive),
        "lightning",
    ],
)
def test_a_framework_goes_on_with_fewer_nodes_and_with_more_and_learns_the_same(
    framework: str,
) -> None:
    async def train(run: Run) -> None:
        try:
            await run.cluster.start()
            await run.wait_size(3, 0, "the first steps", START_S)
            (home,) = [one.node for one in run.cluster.status.local.members if one.index == 1]
            smaller = await lose(run, 1, left=2)
            await run.cluster.start_node(home)
            await run.wait_size(3, smaller.epoch, "three members again", START_S)
        finally:
            await run.cluster.stop()
            print(run.report())

    with short_folder() as path:
        nodes = {"nodes": 3, "parallelism": {"dp": 3}}
        preload = "lightning" if framework == "lightning" else "huggingface"
        run = run_of(
            path,
            str(FRAMEWORKS),
            framework,
            preload=f"holdfast.integrations.{preload}",
            **nodes,
        )
        asyncio.run(train(run))
        assert check(lines_of(run.directory)) == [3, 2, 3]
