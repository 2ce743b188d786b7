"""The loops of frameworks in processes that stay: a rank dies at each point of a step, the others
keep their processes, and the run ends like one that nothing disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_files import fail_at
from local_jobs import PATIENT, make_job
from world_sizes import is_recovered

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.reconciler.observe.counters import Outcome

TRAINERS = Path(__file__).resolve().parents[1] / "trainers"
EXAMPLES = TRAINERS.parents[2] / "examples"
NODES, NPROC = 2, 2
RANKS = NODES * NPROC
STEPS = 150
WAIT_S = 240.0


def job_of(script: Path, folder: Path, options: tuple[str, ...]) -> MoETrainingJob:
    command = [sys.executable, str(script), "--steps", str(STEPS), "--directory", str(folder)]
    return make_job(
        "frameworks",
        [*command, *options],
        nodes=NODES,
        nproc=NPROC,
        env={
            "PYTHONPATH": os.pathsep.join([str(TRAINERS), str(EXAMPLES)]),
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_PRELOAD": PRELOADED[script],
        },
        snapshot={"interval": {"steps": 1}, "memoryPerNode": "64Mi"},
        redundancy={"type": "RAIM5", "raim5": {"groupSize": 2}},
        failurePolicy={
            "spares": 0,
            "maxRestarts": 1000,
            "detection": PATIENT | {"hangSeconds": 60},
        },
    )


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"log-{rank}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def end(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"end-{rank}").read_text())
    return found


@dataclass(frozen=True)
class Fault:
    """A rank that is killed at a point."""

    rank: int
    point: str


async def run_disturbed(
    script: Path, folder: Path, memory: Path, faults: list[Fault], *options: str
) -> None:
    """Run the job to its end with one fault after the other, the first of them in the first step;
    check after each other one that the processes of the other node have stayed."""
    folder.mkdir()
    early, *faults = faults
    (folder / f"fault-{early.rank}").write_text(f"{early.point} SIGKILL")
    cluster = LocalCluster(job_of(script, folder, options), LocalSettings(directory=memory))
    try:
        async with cluster:
            for fault in faults:
                await _suffer(cluster, folder, fault)
            assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
            assert cluster.status.recoveries == 1 + len(faults)
    finally:
        for log in sorted((memory / "logs").glob("*")):
            print(f"--- {log.name}\n{log.read_text()[-6000:]}")


async def _suffer(cluster: LocalCluster, folder: Path, fault: Fault) -> None:
    counts = [0] * RANKS

    def works(status: Status) -> bool:
        """Whether every rank has completed steps since the fault, and all of them are protected."""
        return (
            all(len(lines(folder, rank)) > counts[rank] + 2 for rank in range(RANKS))
            and not (folder / f"fault-{fault.rank}").exists()
            and status.protected.startswith(f"{status.epoch}.")
            and is_recovered(status)
        )

    await cluster.wait_for(works, timeout_s=WAIT_S, what=f"the steps before {fault}")
    epoch = cluster.status.epoch
    before = [lines(folder, rank)[-1]["pid"] for rank in range(RANKS)]
    fail_at(folder, fault.rank, fault.point)
    await cluster.wait_for(
        lambda status: status.epoch > epoch, timeout_s=WAIT_S, what=f"the end of {fault}"
    )
    await cluster.wait_for(
        lambda status: (
            is_recovered(status) and lines(folder, fault.rank)[-1]["pid"] != before[fault.rank]
        ),
        timeout_s=WAIT_S,
        what=f"the recovery from {fault}",
    )
    counts[:] = [len(lines(folder, rank)) for rank in range(RANKS)]
    await cluster.wait_for(works, timeout_s=WAIT_S, what=f"the steps after {fault}")
    node = fault.rank // NPROC
    for rank in range(RANKS):
        if rank // NPROC != node:
            assert lines(folder, rank)[-1]["pid"] == before[rank], (fault, rank)


def run_undisturbed(script: Path, folder: Path, *options: str) -> None:
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={RANKS}"]
    arguments = ["--steps", str(STEPS), "--directory", str(folder), *options]
    subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        check=True,
        timeout=WAIT_S,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(TRAINERS), str(EXAMPLES)]), "OMP_NUM_THREADS": "1"},
    )


def check_alike(disturbed: Path, whole: Path) -> None:
    """Check that each step was the same in both runs, and that both end in the same way."""
    completed: set[int] = set()
    for rank in range(RANKS):
        expected = {line["step"]: _lasting(line) for line in lines(whole, rank)}
        for line in lines(disturbed, rank):
            assert _lasting(line) == expected[line["step"]], (rank, line)
        completed |= {line["step"] for line in lines(disturbed, rank)}
        ends = [end(folder, rank) for folder in (disturbed, whole)]
        for one in ends:
            del one["pid"]
        assert ends[0] == ends[1], rank
    # A rank that died in a step has no line for it, if the others completed it.
    assert completed == set(range(1, STEPS + 1))


def _lasting(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("pid", "time")}


HUGGING_FACE = TRAINERS / "staying_huggingface_trainer.py"
LIGHTNING = TRAINERS / "staying_lightning_trainer.py"
PRELOADED = {
    HUGGING_FACE: "holdfast.integrations.huggingface,transformers.models.mixtral.modeling_mixtral",
    LIGHTNING: "holdfast.integrations.lightning,torchdata.stateful_dataloader",
}
FAULTS = [
    Fault(3, "forward"),  # before anything is protected
    Fault(1, "forward"),
    Fault(2, "backward"),
    Fault(0, "before-optimizer"),
    Fault(3, "in-optimizer"),
    Fault(1, "evaluation"),
    Fault(2, "step-end"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "faults", "options"),
    [
        pytest.param(HUGGING_FACE, [FAULTS[0], FAULTS[5]], (), id="huggingface"),
        pytest.param(
            HUGGING_FACE,
            [*FAULTS, Fault(0, "save")],
            (),
            id="huggingface, everywhere",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            HUGGING_FACE,
            FAULTS[:3],
            ("--sorts",),
            id="huggingface, sorted buckets",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            HUGGING_FACE,
            FAULTS,
            ("--sharded",),
            id="huggingface, FSDP2",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(LIGHTNING, FAULTS, (), id="lightning", marks=pytest.mark.exhaustive),
        pytest.param(
            LIGHTNING,
            FAULTS[1:3],
            ("--sharded",),
            id="lightning, FSDP2",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_loop_of_a_framework_keeps_the_processes_that_are_left(
    directory: Path, script: Path, faults: list[Fault], options: tuple[str, ...]
) -> None:
    killed, whole = directory / "killed", directory / "whole"
    asyncio.run(run_disturbed(script, killed, directory / "memory", faults, *options))
    run_undisturbed(script, whole, *options)
    check_alike(killed, whole)
