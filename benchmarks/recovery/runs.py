"""Runs of the example on four virtual nodes, disturbed by SIGKILL.

A run with a spare has three faults: first a rank is killed, later a node with all its processes and
its memory, and last a rank again, while the control loop is away. A run without a spare loses a
node, and goes on with the three that are left.
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
from benchmarks.recovery.worker import EVERY_OTHER_VOTE
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.errors import UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.reconciler.observe.counters import Outcome

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "moe-job.yaml"
WORKER = Path(__file__).with_name("worker.py")
RANKS = 4
"""Ranks of the example's job, one on each node."""
EXPERTS, LAYERS = 8, 2
MODEL = ("--dim", "64", "--layers", f"{LAYERS}", "--experts", f"{EXPERTS}", "--batch", "1")
AWAY_S = 2.0
"""Seconds from a fault that happens while the control loop is away until the next one starts."""
LOOK_S = 0.05
ALONE_STEPS = 10
"""Least number of steps that training must complete without a control loop."""
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
    AWAY = "away"
    """A rank, while there is no control loop. Training has gone on without it; what is lost waits
    for the next one, because only it begins an epoch."""

    @property
    def words(self) -> str:
        """The fault in words."""
        match self:
            case Kind.FEWER:
                return "node lost, no spare"
            case Kind.AWAY:
                return f"rank lost, control loop back {AWAY_S:g} s later"
            case _:
                return f"{self} lost"


WITH_SPARE = (Kind.RANK, Kind.NODE, Kind.AWAY)
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
    every_other_vote: bool = False
    """Whether ranks vote in even steps only."""
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
    def log(self) -> Path:
        """The example's log of its steps."""
        return self.folder / "steps.jsonl"

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
    options = [EVERY_OTHER_VOTE] if plan.every_other_vote else []
    container["command"] = ["python", str(WORKER), *options, str(plan.workers)]
    container["args"] = [
        *(*MODEL, "--seq", "64", "--steps", str(plan.steps)),
        *("--log-file", str(plan.log)),
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
    job, settings = make_job(plan), LocalSettings(directory=run_directory)
    cluster, events = LocalCluster(job, settings), []
    await cluster.start()
    try:
        for number, kind in enumerate(plan.kinds, 1):
            at_step = number * plan.steps // (len(plan.kinds) + 2)
            status = await _ready(cluster, kind, at_step)
            if kind is Kind.AWAY:
                await cluster.detach()
                await _train_alone(plan)
            faults.append(await _disturb(cluster, status, plan.rank, kind))
            if kind is Kind.AWAY:
                await asyncio.sleep(AWAY_S)
                events += cluster.events
                cluster = LocalCluster(job, settings)
                await cluster.start()
        outcome = await cluster.finished(timeout_s=WITHIN_S)
        events += cluster.events
    finally:
        await cluster.stop()
    hash_file = plan.folder / "sha256"
    complete = outcome is Outcome.COMPLETE and hash_file.exists()
    return Run(
        mode=plan.mode,
        sha256=hash_file.read_text().strip() if complete else "",
        faults=tuple(faults),
        traces=traces.read(run_directory, plan.workers, plan.log, tuple(events), plan.ranks),
    )


async def _ready(cluster: LocalCluster, kind: Kind, at_step: int) -> Status:
    """Wait until all ranks have completed `at_step`, a snapshot of this epoch is protected and,
    before a node is killed, an agent is ready on the spare."""
    needs_standby = kind in (Kind.NODE, Kind.FEWER)
    return await cluster.wait_for(
        lambda status: (
            has_completed(status, RANKS, at_step) and (not needs_standby or _has_standby(status))
        ),
        timeout_s=WITHIN_S,
        what=f"step {at_step}",
    )


async def _train_alone(plan: Plan) -> None:
    """Wait until training has completed ALONE_STEPS steps.

    Raises:
        UnreachableError: it has not in WITHIN_S.
    """

    def logged() -> int:
        return plan.log.read_bytes().count(b"\n")

    before = logged()
    try:
        async with asyncio.timeout(WITHIN_S):
            while logged() < before + ALONE_STEPS:
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise UnreachableError(
            f"training completed {logged() - before} steps in {WITHIN_S:g} s without a control loop"
        ) from None


async def _disturb(cluster: LocalCluster, status: Status, rank: int, kind: Kind) -> Fault:
    """Kill a rank or its node."""
    member = status.local.member_of(rank)
    assert member is not None
    at = time.time()
    if kind in (Kind.RANK, Kind.AWAY):
        await cluster.kill_rank(rank)
    else:
        await cluster.kill_node(member.node)
    return Fault(kind=kind, rank=rank, at=at, epoch=status.epoch)


def _has_standby(status: Status) -> bool:
    """Whether an agent waits on the spare, or there is no spare any more."""
    return all(node.standby == "ready" for node in status.local.nodes if node.role == "spare")


def has_completed(status: Status, size: int, step: int) -> bool:
    """Whether `size` ranks train, have completed `step`, and are protected in their epoch."""
    ranks = [rank for member in status.local.members for rank in member.ranks]
    return (
        len(ranks) == size
        and all(rank.state == "HEALTHY" and rank.pid and rank.step >= step for rank in ranks)
        and status.protected.startswith(f"{status.epoch}.")
    )
