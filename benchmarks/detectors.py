"""What it costs a step that hangs, stragglers, slow links and wrong bytes are looked for.

    make bench NAME=detectors ARGS="--rounds 100"

One real job runs several times side by side, each with its own daemons and launchers: with every
detector off, with all of them on, and with all of them on and steps that are executed again. They
take turns, a block of steps each; while one trains, all processes of the others are stopped. So
pairs of blocks are seconds apart, and what a detector does beside training delays only its own job.

- *Off*: `onStraggler: Ignore`, no comparison of replicas, a fixed `hangSeconds`; sessions do not
  measure the parts of steps, daemons do not probe links, launchers do not watch for work.
- *On*: `onStraggler: Report`, replicas compared in each save, links probed, work watched, and a
  limit for hangs that is learned.
- *Steps executed again*: `repeatStepsShare`, which is off by default and costs what it is told to.

Every tenth step saves, so replicas are compared as often as by default in a job that saves at every
step. A step waits as long as a GPU would compute, or lets one compute where there is one. Besides
the time of a step, the processor time of all processes of a job is measured: on a node without an
idle core it is what a step may get longer by.

Figures are means of all rounds without a tenth at each end, which other work on the machine has
spoilt, with the interval that holds the true one with a probability of 95 % (bootstrap). Ends with
1 unless that interval lies below the goal, and no detector raised an alarm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.json_report import verdict, write_json
from benchmarks.machine import facts
from benchmarks.measure import Figure
from benchmarks.targets import TARGETS
from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_cli.local.commands import Commands
from holdfast_cli.local.processes import ProcessId, marked_processes, send
from holdfast_core.errors import HoldfastError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.reconciler.observe.views import EventReason

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("detectors_worker.py")
NODES = 3
"""Fewest nodes of a job whose links are measured."""
SAVE_STEPS = 10
BLOCK_STEPS = 2 * SAVE_STEPS
"""Steps of a block, so that each has the same number of saves."""
LEFT_OUT = 3
"""First rounds that do not count: arenas, parity and the first windows."""
TRIMMED = 0.1
SAMPLES, SEED = 4000, 0
PARTS = {"daemons": "daemon", "trainers": "agent"}
"""Processes whose processor time is added up, and how a local run marks them."""
SHARE = 0.05
"""Part of the time in which the third job executes steps again."""
START_S, BLOCK_S = 180.0, 120.0
DAEMON_OFF = """
import sys
from holdfast_daemon import __main__ as daemon
from holdfast_daemon.net import links
links.FIRST_S = links.PERIOD_S = 1e6
sys.exit(daemon.main())
"""
LAUNCHER_OFF = """
import sys
from holdfast import launch
from holdfast._launch import work
work.WATCH_S = 1e6
sys.exit(launch.main())
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run the job."""

    name: str
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    failure_policy: Mapping[str, Any] = field(default_factory=dict)
    off: bool = False
    """Whether processes also leave out what no field of a job turns off."""


OFF = Way(
    name="off",
    snapshot={"compareReplicasEvery": 0},
    failure_policy={"onStraggler": "Ignore", "detection": {"hangSeconds": 600}},
    off=True,
)
ON = Way(name="on", snapshot={"compareReplicasEvery": 1})
REPEATING = Way(name="repeating", snapshot=ON.snapshot, failure_policy={"repeatStepsShare": SHARE})
ALARMS = {
    EventReason.STRAGGLER,
    EventReason.SLOW_LINKS,
    EventReason.HANG_INSPECTED,
    EventReason.CORRUPTION,
    EventReason.REPLICAS_DIVERGED,
    EventReason.STEPS_NOT_REPEATED,
    EventReason.NODE_AVOIDED,
}
"""Events of detectors: each of them is a false alarm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How long a run is, and how much each step does."""

    rounds: int = 100
    """Blocks of each job."""
    step_ms: float = 100.0
    """Time for which a GPU computes in a step."""
    nbytes: int = 16 << 20
    """State of a replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Cost of a step, as a mean of one block."""

    step_s: float
    used_s: Mapping[str, float]
    """Processor time of a node's `daemons`, and of its launcher and rank (`trainers`)."""


class TurnTaker:
    """One of the jobs.

    Args:
        folder: for its sockets and files.
    """

    def __init__(self, way: Way, folder: Path, size: Size) -> None:
        self._folder = folder
        for name in ("turn", "done"):
            os.mkfifo(folder / name)
        self._turn, self._done = (os.open(folder / name, os.O_RDWR) for name in ("turn", "done"))
        self.cluster = LocalCluster(_job(way, folder, size), _settings(way, folder / "run"))
        self._processes: dict[str, list[ProcessId]] = {}

    async def start(self) -> None:
        """Wait until the job could train its first block, and stop it."""
        await asyncio.to_thread(self._read_done, START_S)
        directory = self.cluster.directory
        nodes = [member.node or "" for member in self.cluster.status.members]
        for part, what in PARTS.items():
            marks = [directory.mark(node, what) for node in nodes]
            self._processes[part] = [each for mark in marks for each in marked_processes(mark)]
        self._send(signal.SIGSTOP)

    async def train(self) -> Block:
        """Let the job train a block while the others are stopped."""
        self._send(signal.SIGCONT)
        before = {what: self._processor_s(what) for what in self._processes}
        os.write(self._turn, b"\n")
        seconds = await asyncio.to_thread(self._read_done, BLOCK_S)
        used = {what: self._processor_s(what) - before[what] for what in self._processes}
        self._send(signal.SIGSTOP)
        return Block(
            step_s=seconds / BLOCK_STEPS,
            used_s={what: each / BLOCK_STEPS / NODES for what, each in used.items()},
        )

    def close(self) -> None:
        """Let its processes run again, so that they can be ended."""
        self._send(signal.SIGCONT)
        os.close(self._turn)
        os.close(self._done)

    def _send(self, number: signal.Signals) -> None:
        for processes in self._processes.values():
            for process in processes:
                send(process, number)

    def _processor_s(self, what: str) -> float:
        return sum(_processor_s(process.pid) for process in self._processes[what])

    def _read_done(self, within_s: float) -> float:
        """Wait for the end of a block; returns its seconds."""
        ready, _, _ = select.select([self._done], [], [], within_s)
        if not ready:
            raise HoldfastError(f"a block did not end; see {self._folder}/run/logs")
        return float(os.read(self._done, 64))


def _processor_s(pid: int) -> float:
    """Processor time of a process and its threads, also of those that have ended: the clock that
    clock_getcpuclockid(3) returns for it."""
    return time.clock_gettime(~pid << 3 | 2)


def _job(way: Way, folder: Path, size: Size) -> MoETrainingJob:
    command = [sys.executable, str(WORKER), "--folder", str(folder), "--block", str(BLOCK_STEPS)]
    command += ["--compute", str(1e-3 * size.step_ms), "--bytes", str(size.nbytes)]
    command += ["--off"] if way.off else []
    # Daemons are stopped for as long as others train.
    detection = {"missedHeartbeats": 600, **way.failure_policy.get("detection", {})}
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": way.name},
            "spec": {
                "nodes": NODES,
                "nprocPerNode": 1,
                "parallelism": {"dp": NODES},
                "snapshot": {"interval": {"steps": SAVE_STEPS}, **way.snapshot},
                "failurePolicy": {**way.failure_policy, "detection": detection},
                "trainer": {
                    "template": {"spec": {"containers": [{"name": "trainer", "command": command}]}}
                },
            },
        }
    )


def _settings(way: Way, directory: Path) -> LocalSettings:
    if not way.off:
        return LocalSettings(directory=directory)
    commands = Commands(
        daemon_program=(sys.executable, "-c", DAEMON_OFF),
        agent_program=(sys.executable, "-c", LAUNCHER_OFF),
    )
    return LocalSettings(directory=directory, commands=commands)


async def measure(
    ways: Sequence[Way], folder: Path, size: Size
) -> tuple[dict[str, list[Block]], list[str]]:
    """Let the jobs take turns; returns the blocks of each way, of equal rounds, and the false
    alarms of all of them."""
    blocks: dict[str, list[Block]] = {way.name: [] for way in ways}
    alarms = []
    async with AsyncExitStack() as stack:
        takers: dict[str, TurnTaker] = {}
        for way in ways:
            (folder / way.name).mkdir()
            taker = takers[way.name] = TurnTaker(way, folder / way.name, size)
            await stack.enter_async_context(taker.cluster)
            stack.callback(taker.close)
            await taker.start()
        for number in range(-LEFT_OUT, size.rounds):
            order = list(takers) if number % 2 == 0 else list(takers)[::-1]
            for name in order:
                block = await takers[name].train()
                if number >= 0:
                    blocks[name].append(block)
        for name, taker in takers.items():
            events = (event for event in taker.cluster.events if event.reason in ALARMS)
            alarms += [f"false alarm ({name}): {event.message}" for event in events]
    return blocks, alarms


def compared(
    values: Sequence[float], unit: str, seconds: Sequence[float], floors: Sequence[float]
) -> Figure:
    """The mean of all rounds without a tenth at each end, and its interval of 95 %."""
    numbers = np.random.default_rng(SEED)
    drawn = numbers.choice(np.asarray(values), (SAMPLES, len(values)))
    low, high = np.quantile([_trimmed(each) for each in drawn], (0.025, 0.975))
    return Figure(
        value=_trimmed(np.asarray(values)),
        unit=unit,
        low=float(low),
        high=float(high),
        repetitions=len(values),
        seconds=float(np.median(seconds)),
        floor_seconds=float(np.median(floors)),
        note="low and high: interval of 95 % of the mean",
    )


def _trimmed(values: Any) -> float:
    cut = int(TRIMMED * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


def figures_of(blocks: Mapping[str, Sequence[Block]]) -> dict[str, Figure]:
    """Figures of all ways, each beside the job in which everything is off."""
    floors, rows = blocks[OFF.name], {}
    for name, key in ((ON.name, "detectors"), (REPEATING.name, "detectors_repeating")):
        pairs = list(zip(blocks.get(name, ()), floors, strict=False))
        if not pairs:
            continue
        rows[key] = compared(
            [100 * (ours.step_s / floor.step_s - 1) for ours, floor in pairs],
            "%",
            [ours.step_s for ours, _ in pairs],
            [floor.step_s for _, floor in pairs],
        )
        for part in PARTS:
            used = [[each.used_s[part] for each in column] for column in zip(*pairs, strict=True)]
            more = [1e3 * (ours - floor) for ours, floor in zip(*used, strict=True)]
            rows[f"{key}_{part}"] = compared(more, "ms", *used)
    return rows


def shown(figure: Figure) -> str:
    """The figure with its interval."""
    return f"{figure.value:.3f} {figure.unit} ({figure.low:.3f} … {figure.high:.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 unless the interval lies below the goal without an alarm."""
    parser = argparse.ArgumentParser(
        prog="make bench NAME=detectors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, usual = parser.add_argument, Size()
    add("--rounds", type=int, default=usual.rounds, help="blocks of each job (%(default)s)")
    add(
        "--step-ms",
        type=float,
        default=usual.step_ms,
        help="time for which a GPU computes in a step (%(default)g)",
    )
    add("--bytes", type=int, default=usual.nbytes, help="state of a replica (%(default)s)")
    add("--alone", action="store_true", help="without the job that executes steps again")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "detectors.json")
    options = parser.parse_args(argv)
    if options.rounds < 3:
        parser.error("give at least 3 rounds")
    size = Size(rounds=options.rounds, step_ms=options.step_ms, nbytes=options.bytes)
    machine = facts()
    ways = [OFF, ON, *([] if options.alone else [REPEATING])]
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:
        blocks, alarms = asyncio.run(measure(ways, Path(folder), size))
    rows = figures_of(blocks)
    write_json(options.output, rows, {}, {**machine, **asdict(size), "false_alarms": alarms}, {})
    for key, name in (
        ("detectors", "all detectors"),
        ("detectors_repeating", f"… and steps executed again, repeatStepsShare {SHARE:g}"),
    ):
        if key not in rows:
            continue
        print(f"{name}: a step is longer by {shown(rows[key])}")
        for part in PARTS:
            print(f"  processor time of a node's {part}: {shown(rows[f'{key}_{part}'])} a step")
    figure = rows["detectors"]
    target = next(each for each in TARGETS if each.key == "detectors")
    assert target.at_most is not None
    sure = figure.high <= target.at_most or figure.low > target.at_most
    met = f"{'met' if verdict(target, figure) else 'missed'}{'' if sure else ', not for sure'}"
    print(
        f"a step without them: {1e3 * figure.floor_seconds:.1f} ms; {figure.repetitions} rounds; "
        f"goal: at most {target.at_most:g} %, {met}; wrote {options.output}"
    )
    for alarm in alarms:
        print(alarm)
    return 0 if figure.high <= target.at_most and not alarms else 1


if __name__ == "__main__":
    raise SystemExit(main())
