"""Runs of the example trainer: real processes, a real daemon, recoveries by SIGKILL.

A run is one rank. It is killed as soon as its log shows the wanted step, and started again in the
next epoch, where it restores from the daemon's memory. Which snapshot was the newest then, and so
how old each expert in it was, is left to chance.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec

from benchmarks.cluster import Cluster, Daemon
from holdfast_core.job.snapshots import PolicySpec
from holdfast_core.snapshots.membership import Redundancy

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
POLL_S = 0.005
STEP_WITHIN_S = 120.0
"""Upper limit for a step, including the start of a process."""

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(["torch", "torch._dynamo"])


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the trainer's log: a completed step."""

    step: int
    loss: float
    """Loss on the step's batch, which is new to the model, in nats per byte."""
    epoch: int
    lost: float
    """Portion of all routed tokens that recoveries have lost so far (PLT)."""
    boosted: int
    """Number of experts with more capacity, over all layers."""
    held_out: float | None = None
    """Loss on the held-out passages, after some of the last steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A completed run."""

    seed: int
    lines: tuple[Line, ...]
    """One line for each step, from its last execution."""
    restored: tuple[int, ...]
    """Steps after which recoveries resumed."""

    @property
    def held_out(self) -> float:
        """Mean over the last tenth of the steps: with Adam, single steps fluctuate."""
        return statistics.fmean(x.held_out for x in self.lines if x.held_out is not None)

    @property
    def lost(self) -> float:
        """PLT of the whole run."""
        return self.lines[-1].lost

    @property
    def boosted_steps(self) -> int:
        """Number of steps in which an expert had more capacity."""
        return sum(line.boosted > 0 for line in self.lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run to be carried out."""

    job: str
    seed: int
    arguments: tuple[str, ...]
    """Arguments of the example, without seed and files."""
    policy: PolicySpec
    kills: tuple[int, ...] = ()
    """Steps after which the trainer is killed, ascending."""


def carry_out(plan: Plan, cluster: Cluster, daemon: Daemon, folder: Path) -> Run:
    """Carry out a run.

    Raises:
        RuntimeError: when the trainer failed by itself; the message names the file with its output.
    """
    log, output = folder / f"{plan.job}.jsonl", folder / f"{plan.job}.log"
    arguments = [*plan.arguments, "--seed", str(plan.seed), "--log-file", str(log)]
    for epoch, kill_at in enumerate([*plan.kills, None], start=1):
        cluster.control.place(plan.job, epoch, [daemon.node], redundancy=Redundancy.NONE)
        variables = _variables(plan, daemon)
        process = _forking.Process(target=_train, args=(arguments, variables, output), daemon=True)
        process.start()
        if kill_at is not None:
            _wait_for(log, epoch, kill_at, process)
            process.kill()
        process.join()
        expected = 0 if kill_at is None else -signal.SIGKILL
        if process.exitcode != expected:
            raise RuntimeError(f"{plan.job} ended with {process.exitcode}; see {output}")
    cluster.control.drop(plan.job)
    return run_of(plan.seed, log)


def run_of(seed: int, log: Path) -> Run:
    """The run recorded in a complete log."""
    lines = [msgspec.json.decode(line, type=Line) for line in log.read_bytes().splitlines()]
    newest = {line.step: line for line in lines}
    first: dict[int, int] = {}
    for line in lines:
        first.setdefault(line.epoch, line.step)
    restored = tuple(step - 1 for epoch, step in sorted(first.items()) if epoch > 1)
    return Run(seed=seed, lines=tuple(newest[step] for step in sorted(newest)), restored=restored)


def _wait_for(log: Path, epoch: int, step: int, process: ForkServerProcess) -> None:
    """Wait until the trainer of `epoch` has completed `step`, or has ended.

    Raises:
        TimeoutError: when it makes no progress.
    """
    size, deadline = 0, time.monotonic() + STEP_WITHIN_S
    while process.is_alive():
        data = log.read_bytes() if log.exists() else b""
        if len(data) > size and data.endswith(b"\n"):
            size, deadline = len(data), time.monotonic() + STEP_WITHIN_S
            newest = msgspec.json.decode(data.splitlines()[-1], type=Line)
            if (newest.epoch, newest.step) >= (epoch, step):
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step in {STEP_WITHIN_S:g} s; see {log.with_suffix('.log')}")
        time.sleep(POLL_S)


def _variables(plan: Plan, daemon: Daemon) -> dict[str, str]:
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "HOLDFAST_SOCKET": str(daemon.socket),
        "HOLDFAST_JOB": plan.job,
        "HOLDFAST_POLICY": msgspec.json.encode(plan.policy).decode(),
    }


def _train(arguments: Sequence[str], variables: dict[str, str], output: Path) -> None:
    """Run the trainer in this process."""
    os.environ.update(variables)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    spec = importlib.util.spec_from_file_location("train_moe", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    example.main(list(arguments))
