"""The example with uneven copies trains with real processes, loses a rank and a node, and ends with
the bytes of a run that lost nothing."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.cli.demo import EXAMPLES
from holdfast_operator.local import LocalCluster, LocalSettings
from holdfast_operator.reconciler.counters import Outcome

WAIT_S = 250.0
SMALL = ("--dim", "32", "--layers", "2", "--experts", "4", "--seats", "3", "--seq", "32", "--stay")
STEPS = 60


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        yield Path(path)


def small_job(directory: Path) -> MoETrainingJob:
    """The example's, with three ranks."""
    document = yaml.safe_load((EXAMPLES / "moe-elastic-job.yaml").read_text(encoding="utf-8"))
    spec = document["spec"]
    spec |= {"nodes": 3, "parallelism": {"dp": 3, "ep": 3}, "redundancy": {"type": "RAIM5"}}
    spec["snapshot"]["memoryPerNode"] = "256Mi"
    container = spec["trainer"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", str(EXAMPLES / "train_moe_elastic.py")]
    files = ("--log-file", str(directory / "log"), "--hash-file", str(directory / "hash"))
    container["args"] = [*SMALL, "--steps", str(STEPS), *files]
    return parse_job(document)


async def run(directory: Path, *, faults: bool) -> int:
    """Run the job to its end; the number of its last epoch."""
    async with LocalCluster(
        small_job(directory), LocalSettings(directory=directory / "run")
    ) as cluster:
        if faults:
            await cluster.wait_for(
                lambda s: s.step >= 3 and s.protected.startswith("1."), timeout_s=WAIT_S
            )
            await cluster.kill_rank(1)
            await cluster.wait_for(lambda s: s.protected.startswith("2."), timeout_s=WAIT_S)
            await cluster.kill_node(cluster.status.members[2].node)
        assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
        return cluster.status.epoch


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_run_that_lost_a_rank_and_a_node_ends_with_the_same_bytes(directory: Path) -> None:
    hashes = []
    for name in ("undisturbed", "faulty"):
        of_run = directory / name
        of_run.mkdir()
        epoch = asyncio.run(run(of_run, faults=name == "faulty"))
        hashes.append((of_run / "hash").read_text())
        lines = [json.loads(line) for line in (of_run / "log").read_text().splitlines()]
        assert {line["step"] for line in lines} == set(range(1, STEPS + 1))
    assert epoch >= 3
    assert hashes[0] == hashes[1]
