"""Time from the kill of a rank to the next step of all ranks, for loops under DDP, FSDP2 and HSDP
and for frameworks, on two nodes of two ranks each: with processes that stay, and with all of them
started again.

A framework is measured with `HOLDFAST_PRELOAD`, and without it. A run counts only if its final
state has the bytes of an undisturbed run, and exactly the processes stayed that should.

The restarts are those of the same trainer without a `world`, and of torchtitan with the override.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Figure
from benchmarks.recovery.figures import figure
from benchmarks.recovery.runs import Mode
from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_core.errors import UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.reconciler.observe.counters import Outcome

HERE = Path(__file__).parent
EXAMPLES, TESTS = HERE.parents[1] / "examples", HERE.parents[1] / "tests" / "local"


@dataclass(frozen=True, slots=True)
class Stack:
    """A way to train."""

    name: str
    worker: str
    trains_with: str
    """Argument of the worker."""
    preload: str = ""
    """Modules that the launchers import before they fork workers."""
    packages: str = ""
    """Name of the packages that have an environment of their own."""


_LOOP, _FRAMEWORK, _TITAN = "stacks_worker.py", "frameworks_worker.py", "torchtitan_worker.py"
_TRANSFORMERS = "holdfast.integrations.huggingface,transformers.models.mixtral.modeling_mixtral"
_LIGHTNING = "holdfast.integrations.lightning,torchdata.stateful_dataloader"
_TORCHTITAN = "torchtitan"
STACKS = (
    *(Stack(layout, _LOOP, layout) for layout in ("ddp", "fsdp2", "hsdp")),
    Stack("huggingface", _FRAMEWORK, "huggingface"),
    Stack("huggingface, preloaded", _FRAMEWORK, "huggingface", _TRANSFORMERS),
    Stack("lightning", _FRAMEWORK, "lightning"),
    Stack("lightning, preloaded", _FRAMEWORK, "lightning", _LIGHTNING),
    Stack(_TORCHTITAN, _TITAN, "torchtitan", packages=_TORCHTITAN),
)
NAMES = tuple(stack.name for stack in STACKS)
NODES, NPROC = 2, 2
RANKS = NODES * NPROC
STEPS = 200
KILL_AT = 60
WITHIN_S = 600.0
"""Upper limit for whatever a run waits for; frameworks take long to import."""


def packages_of(names: Collection[str]) -> set[str]:
    """The packages with an environment of their own that the stacks with `names` need."""
    return {stack.packages for stack in STACKS if stack.name in names and stack.packages}


def measure(
    folder: Path, repetitions: int, names: Collection[str], sites: Mapping[str, Path]
) -> Iterator[tuple[str, Mode, Figure]]:
    """Yield the seconds of each mode of the stacks with `names`.

    Args:
        sites: folders of packages that have an environment of their own, by name.

    Raises:
        UnreachableError: a run failed a check, or did not end.
    """
    stacks = [stack for stack in STACKS if stack.name in names]
    seconds: dict[tuple[Stack, Mode], list[float]] = {}
    expected = {
        stack: asyncio.run(
            _run(stack, Mode.STAY, folder / f"{stack.name}-undisturbed", sites, None)
        )[1]
        for stack in stacks
    }
    # Alternate, so that other work on this machine disturbs all of them alike.
    for repetition in range(repetitions):
        turns = [(stack, mode) for stack in stacks for mode in Mode]
        for stack, mode in turns[:: 1 if repetition % 2 == 0 else -1]:
            where = folder / f"{stack.name}-{mode}-{repetition + 1}"
            took_s, hashes = asyncio.run(_run(stack, mode, where, sites, repetition % RANKS))
            if hashes != expected[stack]:
                raise UnreachableError(f"{where.name}: other bytes than an undisturbed run")
            seconds.setdefault((stack, mode), []).append(took_s)
    for stack in stacks:
        for mode in Mode:
            yield stack.name, mode, figure(seconds[stack, mode])


def _make_job(stack: Stack, mode: Mode, folder: Path, sites: Mapping[str, Path]) -> MoETrainingJob:
    command = [sys.executable, str(HERE / stack.worker), stack.trains_with, str(STEPS), str(folder)]
    command += ["--restart"] if mode is Mode.RESTART else []
    paths = [EXAMPLES, TESTS, *([sites[stack.packages]] if stack.packages else [])]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HOLDFAST_PRELOAD": stack.preload,
        "HF_HUB_OFFLINE": "1",
    }
    env = [{"name": name, "value": value} for name, value in variables.items()]
    containers = [{"name": "trainer", "command": command, "env": env}]
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "stacks"},
            "spec": {
                "nodes": NODES,
                "nprocPerNode": NPROC,
                "parallelism": {"dp": RANKS},
                "snapshot": {"memoryPerNode": "64Mi"},
                "redundancy": {"type": "RAIM5", "raim5": {"groupSize": NODES}},
                "failurePolicy": {
                    "spares": 0,
                    "detection": {"heartbeatSeconds": 0.5, "missedHeartbeats": 8},
                },
                "trainer": {"template": {"spec": {"containers": containers}}},
            },
        }
    )


async def _run(
    stack: Stack, mode: Mode, folder: Path, sites: Mapping[str, Path], victim: int | None
) -> tuple[float, list[str]]:
    """Carry out a run in which `victim` is killed. Return the seconds to the next step of all
    ranks, and the hash of each rank's final state."""
    folder.mkdir(parents=True)
    settings = LocalSettings(directory=folder / "run")
    took_s = 0.0
    async with LocalCluster(_make_job(stack, mode, folder, sites), settings) as cluster:
        await cluster.wait_for(
            lambda status: (
                status.protected.startswith(f"{status.epoch}.")
                and all(len(_steps(folder, rank)) > KILL_AT for rank in range(RANKS))
            ),
            timeout_s=WITHIN_S,
            what=f"step {KILL_AT}",
        )
        if victim is not None:
            before, at = [_steps(folder, rank)[-1] for rank in range(RANKS)], time.time()
            await cluster.kill_rank(victim)
            first = await _first_steps(folder, before)
            took_s = max(float(line[3]) for line in first) - at
            changed = [rank for rank in range(RANKS) if first[rank][2] != before[rank][2]]
            if changed != ([victim] if mode is Mode.STAY else list(range(RANKS))):
                raise UnreachableError(f"{folder.name}: ranks {changed} have another process")
        if await cluster.finished(timeout_s=WITHIN_S) is not Outcome.COMPLETE:
            raise UnreachableError(f"{folder.name}: the job did not complete")
    ends = [(folder / f"{rank}").read_text().splitlines()[-1] for rank in range(RANKS)]
    return took_s, ends


async def _first_steps(folder: Path, before: list[list[str]]) -> list[list[str]]:
    """Wait for the first step of each rank in another epoch or another process than `before`: a
    process that does not stay does not know its epoch."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            newer = [
                [line for line in _steps(folder, rank) if line[1:3] != before[rank][1:3]]
                for rank in range(RANKS)
            ]
            if all(newer):
                return [lines[0] for lines in newer]
            await asyncio.sleep(0.05)


def _steps(folder: Path, rank: int) -> list[list[str]]:
    """The lines that a rank has written about steps."""
    try:
        text = (folder / f"{rank}").read_text()
    except FileNotFoundError:
        return []
    return [line.split() for line in text.split("\n")[:-1] if not line.startswith("end")]
