"""`make bench NAME=recovery ARGS=--stacks`: time from the kill of a rank to the next step of all
ranks, for loops under DDP, FSDP2 and HSDP and for frameworks, on two nodes of two ranks each: with
processes that stay, and with all of them started again.

In each run of a row, one rank after another is killed by SIGKILL, as often as there are
repetitions. A run counts only if its final state has the bytes of an undisturbed run, and exactly
the processes stayed that should.

The restarts are those of the same trainer without a `world`, and of torchtitan with the override.
Rows that end in `-preloaded` have `HOLDFAST_PRELOAD`.

torchft trains the loop's model under its own DDP, with a replica group for each rank. torchrun
starts a killed process again, and every step needs all four, as in the other rows.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recovery.runs import Mode
from benchmarks.recovery.stacks_jobs import (
    LOOK_S,
    RANKS,
    TORCHFT_WORKER,
    WITHIN_S,
    Job,
    holdfast_job,
    torchft_job,
)
from holdfast_core.errors import HoldfastError, UnreachableError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCHFT = "torchft"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A way to train."""

    name: str
    worker: str
    """Script of the ranks."""
    argument: str = ""
    """Argument of the script; of torchft's lighthouse, if the script is torchft's."""
    kill_every: int
    """Number of steps from a kill to the next. A recovery and the protection after it may take
    longer than that now and then, but not on average: training would end before the last kill."""
    preload: str = ""
    """Modules that the launchers import before they fork workers."""
    packages: str = ""
    """Name of the packages that have an environment of their own."""
    modes: tuple[Mode, ...] = tuple(Mode)

    def steps(self, repetitions: int) -> int:
        """Number of steps of a run with `repetitions` kills."""
        return (repetitions + 2) * self.kill_every


_LOOP, _FRAMEWORK, _TITAN = "stacks_worker.py", "frameworks_worker.py", "torchtitan_worker.py"
_PRELOADS = {
    "huggingface": "holdfast.integrations.huggingface,transformers.models.mixtral.modeling_mixtral",
    "lightning": "holdfast.integrations.lightning,torchdata.stateful_dataloader",
    # The second one prepares torchtitan for a machine without a GPU, before it is imported.
    "torchtitan": "pyarrow,torchtitan_on_cpu,holdfast.integrations.torchtitan,"
    "torch._inductor.compile_fx,torch.distributed.pipelining.schedules",
}
_LIGHTHOUSES = {"torchft": "", "torchft-at-once": "--join_timeout_ms=100"}


def _framework(name: str) -> Iterator[Stack]:
    """The rows of a framework."""
    titan = name == "torchtitan"
    for suffix, preload in (("", ""), ("-preloaded", _PRELOADS[name])):
        yield Stack(
            name=name + suffix,
            worker=_TITAN if titan else _FRAMEWORK,
            argument=name,
            kill_every=6 if titan else 30,
            preload=preload,
            packages=name if titan else "",
        )


STACKS = (
    *(
        Stack(name=layout, worker=_LOOP, argument=layout, kill_every=60)
        for layout in ("ddp", "fsdp2", "hsdp")
    ),
    *(stack for name in _PRELOADS for stack in _framework(name)),
    *(
        Stack(
            name=name,
            worker=TORCHFT_WORKER.name,
            argument=argument,
            kill_every=60,
            packages=TORCHFT,
            modes=(Mode.STAY,),
        )
        for name, argument in _LIGHTHOUSES.items()
    ),
)
NAMES = tuple(stack.name for stack in STACKS)


def packages_of(names: Collection[str]) -> set[str]:
    """The packages with an environment of their own that the stacks with `names` need."""
    return {stack.packages for stack in STACKS if stack.name in names and stack.packages}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What was measured of a stack in one mode."""

    name: str
    mode: Mode
    seconds: tuple[float, ...] = ()
    """Seconds from each kill to the next step of all ranks."""
    failed: str = ""
    """Why nothing was measured."""


def measure(
    folder: Path,
    repetitions: int,
    names: Collection[str],
    sites: Mapping[str, Path],
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure the stacks with `names`, and yield what was measured of each mode.

    Args:
        sites: folders of packages that have an environment of their own, by name.
        progress: gets a line when a run has begun, and after each kill.
    """
    for stack in STACKS:
        if stack.name not in names:
            continue
        expected: list[str] = []
        for mode, kills in ((Mode.STAY, 0), *((mode, repetitions) for mode in stack.modes)):
            steps = stack.steps(repetitions)
            where = folder / f"{stack.name}-{mode if kills else 'undisturbed'}"
            progress(f"{where.name}: {steps} steps")
            try:
                took_s, ends = asyncio.run(
                    _run(
                        _job(stack, mode, steps, where, sites), mode, where, stack, kills, progress
                    )
                )
                if kills and ends != expected:
                    raise UnreachableError("other bytes than an undisturbed run")
            except HoldfastError as error:
                yield Row(name=where.name, mode=mode, failed=str(error))
                break
            if kills:
                yield Row(name=stack.name, mode=mode, seconds=took_s)
            else:
                expected = ends


def _job(
    stack: Stack, mode: Mode, steps: int, folder: Path, sites: Mapping[str, Path]
) -> AbstractAsyncContextManager[Job]:
    paths = [ROOT, ROOT / "examples", ROOT / "tests" / "local" / "trainers"]
    if stack.packages:
        paths.append(sites[stack.packages])
    path = os.pathsep.join(map(str, paths))
    if stack.worker == TORCHFT_WORKER.name:
        return torchft_job(steps, stack.argument.split(), sites[TORCHFT], path, folder)
    command = [sys.executable, str(HERE / stack.worker), stack.argument, f"{steps}", str(folder)]
    command += ["--restart"] if mode is Mode.RESTART else []
    variables = {"PYTHONPATH": path, "HOLDFAST_PRELOAD": stack.preload, "HF_HUB_OFFLINE": "1"}
    return holdfast_job(command, variables, folder)


async def _run(
    made: AbstractAsyncContextManager[Job],
    mode: Mode,
    folder: Path,
    stack: Stack,
    kills: int,
    progress: Callable[[str], None],
) -> tuple[tuple[float, ...], list[str]]:
    """Carry out a run. Return the seconds from each kill to the next step of all ranks, and the
    last line of each rank."""
    folder.mkdir(parents=True)
    took_s = []
    async with made as job:
        for kill in range(kills):
            after, victim = (kill + 1) * stack.kill_every, kill % RANKS

            def reached(after: int = after) -> bool:
                return all(len(lines) and int(lines[-1][0]) >= after for lines in _steps(folder))

            await job.wait_until(reached, f"kill {kill + 1}, after step {after}")
            logged, at = _steps(folder), time.time()
            before = [lines[-1] for lines in logged]
            await job.kill(victim, int(before[victim][2]))
            first = await _first_steps(folder, logged)
            changed = [rank for rank in range(RANKS) if first[rank][2] != before[rank][2]]
            if changed != ([victim] if mode is Mode.STAY else list(range(RANKS))):
                raise UnreachableError(f"after kill {kill + 1}, ranks {changed} are new processes")
            took_s.append(max(float(line[3]) for line in first) - at)
            progress(
                f"{folder.name}: {kill + 1} of {kills}, rank {victim}: {took_s[-1]:.2f} s, "
                f"load {os.getloadavg()[0]:.1f}"
            )
        await job.completed()
    ends = [(folder / f"{rank}").read_text().splitlines()[-1] for rank in range(RANKS)]
    return tuple(took_s), ends


async def _first_steps(folder: Path, before: list[list[list[str]]]) -> list[list[str]]:
    """Wait for the first step of each rank in another epoch or another process than in the last
    line of `before`: a process that does not stay does not know its epoch."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                newer = [
                    [line for line in lines[len(old) :] if line[1:3] != old[-1][1:3]]
                    for lines, old in zip(_steps(folder), before, strict=True)
                ]
                if all(newer):
                    return [lines[0] for lines in newer]
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise UnreachableError(f"no step of all ranks in {WITHIN_S:g} s after a kill") from None


def _steps(folder: Path) -> list[list[list[str]]]:
    """The words of the lines that each rank has logged about its steps."""
    return [_steps_of(folder / f"{rank}") for rank in range(RANKS)]


def _steps_of(file: Path) -> list[list[str]]:
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    return [line.split() for line in text.split("\n")[:-1] if not line.startswith("end")]
