"""Runs of the example on four virtual nodes, disturbed by SIGKILL.

A run with a spare has two faults: first a rank is killed, later a node with all its processes and
its memory. A run without one loses a node, and goes on with the three that are left.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from benchmarks.recovery import traces
from benchmarks.recovery.traces import Traces
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.local import LocalCluster, LocalSettings, Status
from holdfast_operator.reconciler.counters import Outcome

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "moe-job.yaml"
WORKER = Path(__file__).with_name("worker.py")
RANKS = 4
"""Ranks of the example's job, one on each node."""
EXPERTS, LAYERS = 8, 2
MODEL = ("--dim", "64", "--layers", f"{LAYERS}", "--experts", f"{EXPERTS}", "--batch", "1")
WITHIN_S = 120.0
"""Upper limit for whatever a run waits for, the start of all processes included."""


class Mode(StrEnum):
    """Whether the processes of ranks that were not lost stay."""

    STAY = "stay"
    RESTART = "restart"


class Kind(StrEnum):
    """What is lost."""

    RANK = "rank"
    NODE = "node"
    """A node, while a spare is ready."""
    FEWER = "fewer"
    """A node, while there is no spare: the job goes on with fewer nodes."""

    @property
    def words(self) -> str:
        """The fault in words."""
        return "node lost, no spare" if self is Kind.FEWER else f"{self} lost"


WITH_SPARE = (Kind.RANK, Kind.NODE)
"""Faults of a run with a spare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault that was injected."""

    kind: Kind
    rank: int
    """The rank that was killed, by itself or with its node."""
    at: float
    """Time right before the kill, in seconds since the Unix epoch."""
    epoch: int
    """Epoch in which it happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run to be carried out."""

    mode: Mode
    steps: int
    folder: Path
    """Directory of the run, which is made."""
    rank: int = 0
    """The rank that is lost, each time."""
    kinds: tuple[Kind, ...] = WITH_SPARE
    """Faults, in this order, all in the first three quarters; none for an undisturbed run."""

    @property
    def fewer(self) -> bool:
        """Whether the run goes on with fewer nodes."""
        return Kind.FEWER in self.kinds

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of ranks in each epoch."""
        return RANKS, *(RANKS - (kind is Kind.FEWER) for kind in self.kinds)

    @property
    def workers(self) -> Path:
        """Folder of the workers' messages."""
        return self.folder / "workers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has ended."""

    mode: Mode
    sha256: str
    """Hash of the final state; empty when the run did not reach it."""
    faults: tuple[Fault, ...]
    traces: Traces


def make_job(plan: Plan) -> MoETrainingJob:
    """The job of the examples, with a small model."""
    document: dict[str, Any] = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    spec = document["spec"]
    spec["model"] = {"numExperts": EXPERTS, "numMoELayers": LAYERS}
    if plan.fewer:
        spec["minNodes"] = RANKS - 1
        spec["parallelism"] = {"dp": RANKS, "ep": 1}
        spec["failurePolicy"]["spares"] = 0
    container = spec["trainer"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", str(WORKER), str(plan.workers)]
    container["args"] = [
        *(*MODEL, "--seq", "64", "--steps", str(plan.steps)),
        *("--log-file", str(plan.folder / "steps.jsonl")),
        *("--hash-file", str(plan.folder / "sha256")),
        *(["--stay"] if plan.mode is Mode.STAY else []),
        *(["--ep", "1", "--hash-steps"] if plan.fewer else []),
    ]
    return parse_job(document)


def carry_out(plan: Plan) -> Run:
    """Run the example to its end.

    Raises:
        HoldfastError: the job failed before its faults, or something did not happen in time.
    """
    plan.workers.mkdir(parents=True)
    return asyncio.run(_carry_out(plan))


async def _carry_out(plan: Plan) -> Run:
    faults = []
    run_directory = plan.folder / "run"
    async with LocalCluster(make_job(plan), LocalSettings(directory=run_directory)) as cluster:
        for number, kind in enumerate(plan.kinds, 1):
            at_step = number * plan.steps // (len(plan.kinds) + 2)
            faults.append(await _disturb(cluster, plan.rank, kind, at_step))
        outcome = await cluster.finished(timeout_s=WITHIN_S)
        events = tuple(cluster.events)
    hash_file = plan.folder / "sha256"
    complete = outcome is Outcome.COMPLETE and hash_file.exists()
    steps = plan.folder / "steps.jsonl"
    return Run(
        mode=plan.mode,
        sha256=hash_file.read_text().strip() if complete else "",
        faults=tuple(faults),
        traces=traces.read(run_directory, plan.workers, steps, events, plan.ranks),
    )


async def _disturb(cluster: LocalCluster, rank: int, kind: Kind, at_step: int) -> Fault:
    """Kill a rank or its node, once all ranks have completed `at_step`, a snapshot of this epoch is
    protected and, before a node is killed, an agent is ready on the spare."""
    status = await cluster.wait_for(
        lambda status: _completed(status, at_step) and (kind is Kind.RANK or _has_standby(status)),
        timeout_s=WITHIN_S,
        what=f"step {at_step}",
    )
    member = status.member_of(rank)
    assert member is not None
    at = time.time()
    if kind is Kind.RANK:
        await cluster.kill_rank(rank)
    else:
        await cluster.kill_node(member.node)
    return Fault(kind=kind, rank=rank, at=at, epoch=status.epoch)


def _has_standby(status: Status) -> bool:
    """Whether an agent waits on the spare, or there is no spare any more."""
    return all(node.standby == "ready" for node in status.nodes if node.role == "spare")


def _completed(status: Status, step: int) -> bool:
    ranks = [rank for member in status.members for rank in member.ranks]
    return (
        len(ranks) == RANKS
        and all(rank.state == "HEALTHY" and rank.pid and rank.step >= step for rank in ranks)
        and status.protected.startswith(f"{status.epoch}.")
    )
