"""torchtitan's own `train` with our override, on two nodes of two ranks: a rank is killed in the
middle, and each rank ends with the losses and the bytes of a run of torchtitan alone.

`make test-torchtitan` runs this in an environment that has torchtitan.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_core.job.parsing import parse_job
from holdfast_operator.reconciler.observe.counters import Outcome

pytest.importorskip("torchtitan")
from torchtitan_assets import make_assets

NODES, RANKS_PER_NODE = 2, 2
STEPS, HOLD = 8, 4
"""The run waits in step `HOLD` until a rank has been killed."""
WAIT_S = 300.0
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
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def assets(directory: Path) -> Path:
    return make_assets(directory / "assets")


def command(case: Case, assets: Path, to: Path, *more: str) -> list[str]:
    """Trainer and arguments of a run that writes into `to`."""
    to.mkdir()
    return [
        str(Path(__file__).with_name("torchtitan_trainer.py")),
        *("--module", "torchtitan_trainer", "--config", "tiny_moe"),
        *("--training.steps", str(STEPS)),
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


def job_of(case: Case, arguments: list[str], cache: Path) -> dict[str, Any]:
    environment = OFFLINE | {"HF_HOME": str(cache)}
    container = {
        "name": "trainer",
        "command": [sys.executable],
        "args": arguments,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
    }
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "torchtitan"},
        "spec": {
            "nodes": NODES,
            "nprocPerNode": RANKS_PER_NODE,
            "parallelism": dict(case.job),
            "snapshot": {"interval": {"steps": 1}, "memoryPerNode": "64Mi"},
            "redundancy": {"type": "RAIM5", "raim5": {"groupSize": NODES}},
            "failurePolicy": {
                "spares": 0,
                "detection": {"heartbeatSeconds": 0.5, "missedHeartbeats": 8, "hangSeconds": 300},
            },
            "trainer": {"template": {"spec": {"containers": [container]}}},
        },
    }


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


def run_whole(case: Case, assets: Path, directory: Path) -> None:
    """Run torchtitan alone."""
    folder = directory / "whole"
    arguments = command(case, assets, folder)
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
