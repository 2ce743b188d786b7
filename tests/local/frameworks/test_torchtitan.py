"""torchtitan on two nodes of two ranks: ranks are killed or stopped, and each rank ends with the
losses and the bytes of a run of torchtitan alone. With our override, all processes start again;
with our `train`, only that of the lost rank.

`make test-torchtitan` runs this in an environment that has torchtitan.
"""

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
from fault_files import fail_at, pending_faults
from local_jobs import PATIENT, job_file
from world_sizes import is_recovered

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import parse_job
from holdfast_operator.reconciler.observe.counters import Outcome

pytest.importorskip("torchtitan")
from torchtitan_assets import make_assets

NODES, RANKS_PER_NODE = 2, 2
STEPS, HOLD = 8, 4
"""The run waits in step `HOLD` until a rank has been killed."""
STAYING_STEPS = 60
WAIT_S = 300.0
HANG_S = 20.0
"""Time after which a step without progress counts as hung, if ranks are stopped."""
OVERRIDE = ("--override.imports", "holdfast.integrations.torchtitan.protect")
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Degrees of parallelism."""

    name: str
    arguments: tuple[str, ...] = ()
    """Of torchtitan."""
    job: Mapping[str, int]
    """The same, as the job states it."""


EP = (
    *("--parallelism.expert_parallel_degree", "2"),
    *("--parallelism.spmd_backend", "partial_dtensor"),  # the default needs more than gloo has
)
TP = ("--parallelism.tensor_parallel_degree", "2")
PP = (
    *("--parallelism.pipeline_parallel_degree", "2"),
    *("--parallelism.spmd_backend", "partial_dtensor"),
)
HSDP = (
    *("--parallelism.data_parallel_replicate_degree", "2"),
    *("--parallelism.data_parallel_shard_degree", "2"),
)
CASES = (
    Case(name="EP and FSDP2", arguments=EP, job={"dp": 4, "ep": 2}),
    Case(name="TP and FSDP2", arguments=TP, job={"dp": 2, "tp": 2}),
    Case(name="FSDP2", job={"dp": 4}),
    Case(name="HSDP", arguments=HSDP, job={"dp": 4}),
    Case(name="TP, EP and FSDP2", arguments=(*TP, *EP), job={"dp": 2, "tp": 2}),
    Case(name="PP and FSDP2", arguments=PP, job={"dp": 2, "pp": 2}),
)
IN_CI = 2
"""The first of these run everywhere; between them they have all kinds of shards."""


@pytest.fixture
def assets(directory: Path) -> Path:
    return make_assets(directory / "assets")


def command(
    case: Case,
    assets: Path,
    to: Path,
    *more: str,
    script: str = "torchtitan_trainer",
    steps: int = STEPS,
) -> list[str]:
    """Trainer and arguments of a run that writes into `to`."""
    to.mkdir()
    return [
        str(Path(__file__).parents[1].joinpath("trainers", f"{script}.py")),
        *("--module", script, "--config", "tiny_moe"),
        *("--training.steps", str(steps)),
        *("--hf_assets_path", str(assets / "tokenizer")),
        *("--dataloader.dataset_path", str(assets / "data")),
        *("--dump_folder", str(to)),
        *case.arguments,
        *more,
    ]


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    log = folder / f"log-{rank}"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def losses(folder: Path, rank: int) -> dict[int, float]:
    """Loss of each step; of one that was repeated, the newest."""
    return {line["step"]: line["loss"] for line in lines(folder, rank)}


def ranks() -> range:
    return range(NODES * RANKS_PER_NODE)


def job_of(case: Case, arguments: list[str], cache: Path, hang_s: float = WAIT_S) -> dict[str, Any]:
    return job_file(
        "torchtitan",
        [sys.executable, *arguments],
        nodes=NODES,
        nproc=RANKS_PER_NODE,
        env=OFFLINE | {"HF_HOME": str(cache)},
        parallelism=dict(case.job),
        snapshot={"interval": {"steps": 1}, "memoryPerNode": "64Mi"},
        redundancy={"type": "RAIM5", "raim5": {"groupSize": NODES}},
        failurePolicy={
            "spares": 0,
            "maxRestarts": 1000,
            "detection": PATIENT | {"hangSeconds": hang_s},
        },
    )


async def run_killed(case: Case, assets: Path, directory: Path) -> None:
    """Run a job, and kill a rank in a step when all have come that far."""
    folder = directory / "killed"
    arguments = command(case, assets, folder, *OVERRIDE)
    (folder / "hold").write_text(str(HOLD))
    document = job_of(case, arguments, directory / "cache")
    cluster = LocalCluster(parse_job(document), LocalSettings(directory=directory / "memory"))
    async with cluster:
        await cluster.wait_for(
            lambda status: (
                bool(status.protected) and all(HOLD in losses(folder, rank) for rank in ranks())
            ),
            timeout_s=WAIT_S,
        )
        await cluster.kill_rank(1)
        (folder / "hold").unlink()
        assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
        (recovery,) = cluster.status.local.recoveries
        assert recovery.restored_step in range(1, HOLD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What a rank suffers in one of its steps."""

    rank: int
    point: str
    kind: str = "SIGKILL"


async def run_staying(case: Case, faults: list[Fault], assets: Path, directory: Path) -> None:
    """Run a job in which only lost processes start again, with one fault after the other, the first
    of them in the first step, before anything is protected."""
    folder = directory / "killed"
    arguments = command(
        case, assets, folder, script="staying_torchtitan_trainer", steps=STAYING_STEPS
    )
    early, *faults = faults
    fail_at(folder, early.rank, early.point, early.kind)
    document = job_of(case, arguments, directory / "cache", HANG_S)
    cluster = LocalCluster(parse_job(document), LocalSettings(directory=directory / "memory"))
    try:
        async with cluster:
            for fault in faults:
                await _suffer(cluster, folder, fault)
            assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
    finally:
        for log in sorted((directory / "memory" / "logs").glob("*")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")


async def _suffer(cluster: LocalCluster, folder: Path, fault: Fault) -> None:
    """Let `fault` happen in a run that is protected, and check which processes stay."""

    def works(status: Status) -> bool:
        """Whether all ranks have completed steps since the last fault, and are protected."""
        return (
            not pending_faults(folder)
            and all(len(lines(folder, rank)) > counts[rank] + 1 for rank in ranks())
            and status.protected.startswith(f"{status.epoch}.")
            and is_recovered(status)
        )

    counts = [len(lines(folder, rank)) for rank in ranks()]
    await cluster.wait_for(works, timeout_s=WAIT_S, what=f"steps before {fault}")
    before, epoch = [lines(folder, rank)[-1]["pid"] for rank in ranks()], cluster.status.epoch
    fail_at(folder, fault.rank, fault.point, fault.kind)
    await cluster.wait_for(
        lambda status: (
            status.epoch > epoch
            and is_recovered(status)
            and lines(folder, fault.rank)[-1]["pid"] != before[fault.rank]
        ),
        timeout_s=WAIT_S,
        what=f"the recovery from {fault}",
    )
    counts = [len(lines(folder, rank)) for rank in ranks()]
    await cluster.wait_for(works, timeout_s=WAIT_S, what=f"steps after {fault}")
    after = [lines(folder, rank)[-1]["pid"] for rank in ranks()]
    changed = [rank for rank in ranks() if after[rank] != before[rank]]
    # A rank that waits for a stopped one may be ended with it.
    assert changed == [fault.rank] or fault.kind == "SIGSTOP", (fault, changed)


def run_whole(case: Case, assets: Path, directory: Path, steps: int = STEPS) -> None:
    """Run torchtitan alone."""
    folder = directory / "whole"
    arguments = command(case, assets, folder, steps=steps)
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={len(ranks())}"]
    environment = os.environ | OFFLINE | {"HF_HOME": str(directory / "cache")}
    subprocess.run(
        [sys.executable, *launcher, *arguments], check=True, timeout=WAIT_S, env=environment
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CASES[:IN_CI]),
        *(pytest.param(case, id=case.name, marks=pytest.mark.exhaustive) for case in CASES[IN_CI:]),
    ],
)
def test_a_run_that_loses_a_rank_ends_like_one_of_torchtitan_alone(
    case: Case, assets: Path, directory: Path
) -> None:
    asyncio.run(run_killed(case, assets, directory))
    run_whole(case, assets, directory)
    killed, whole = directory / "killed", directory / "whole"
    for rank in ranks():
        assert len({line["pid"] for line in lines(killed, rank)}) == 2
        assert losses(killed, rank) == losses(whole, rank)
        assert list(losses(whole, rank)) == list(range(1, STEPS + 1))
        states = [json.loads((folder / f"state-{rank}").read_text()) for folder in (killed, whole)]
        assert states[0] == states[1]


FAULTS = [
    Fault(rank=3, point="forward"),
    Fault(rank=1, point="forward"),
    Fault(rank=2, point="backward"),
    Fault(rank=0, point="before-norm"),
    Fault(rank=3, point="in-optimizer"),
    Fault(rank=1, point="step-end"),
]
STAYING = {
    "FSDP2": (CASES[2], FAULTS),
    "HSDP": (CASES[3], FAULTS),
    "FSDP2, hangs": (CASES[2], [FAULTS[0], Fault(rank=2, point="backward", kind="SIGSTOP")]),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row == "FSDP2" else pytest.mark.exhaustive) for row in STAYING],
)
def test_only_the_process_of_a_lost_rank_starts_again_in_a_loop_that_is_entered_again(
    row: str, assets: Path, directory: Path
) -> None:
    case, faults = STAYING[row]
    asyncio.run(run_staying(case, faults, assets, directory))
    run_whole(case, assets, directory, STAYING_STEPS)
    killed, whole = directory / "killed", directory / "whole"
    completed: set[int] = set()
    for rank in ranks():
        expected = losses(whole, rank)
        for line in lines(killed, rank):
            assert line["loss"] == expected[line["step"]], (rank, line)
            completed.add(line["step"])
        states = [json.loads((folder / f"state-{rank}").read_text()) for folder in (killed, whole)]
        assert states[0] == states[1]
    assert completed == set(range(1, STAYING_STEPS + 1))
