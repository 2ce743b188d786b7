"""A bit flips in one replica, in real processes: its rank is named, and its member moves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import corrupt_trainer
import pytest
import torch
from local_jobs import PATIENT, make_job

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.corruption import Proof
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import Phase

WAIT_S = 120.0
FLIPS = 12
WRONG = 1


def job_of(directory: Path, ranks: int) -> MoETrainingJob:
    command = [sys.executable, corrupt_trainer.__file__, str(FLIPS), str(WRONG), str(directory)]
    return make_job(
        "corrupt",
        command,
        nodes=ranks,
        snapshot={"memoryPerNode": "64Mi", "compareReplicasEvery": 1},
        failurePolicy={"onCorruption": "Replace", "spares": 1, "detection": PATIENT},
    )


def train(directory: Path, ranks: int) -> tuple[str, Status]:
    """Train to the end. Return the node on which the wrong rank began, and the last status."""

    async def run() -> tuple[str, Status]:
        job = job_of(directory, ranks)
        async with LocalCluster(job, LocalSettings(directory=directory / "run")) as cluster:
            await cluster.wait_for(lambda status: bool(status.members), timeout_s=WAIT_S)
            began = cluster.status.members[WRONG].node
            await cluster.wait_for(lambda status: status.phase is Phase.COMPLETE, timeout_s=WAIT_S)
            return began or "", cluster.status

    return asyncio.run(run())


def check_named(status: Status, began: str, proof: Proof) -> None:
    """Check that the wrong rank was named, and that its member has left the node where it began."""
    last = status.last_corruption
    assert last is not None
    assert (last.proof, last.ranks, last.member, last.node) == (proof, (WRONG,), WRONG, began)
    assert last.step == FLIPS and last.unit == "layer1/dense", "it is found in the same step"
    assert began not in {member.node for member in status.members}
    assert status.restarts == 0


def check_bytes(directory: Path, ranks: int) -> None:
    """Check that all ranks have ended with the state of an undisturbed run."""
    expected = corrupt_trainer.undisturbed(ranks)
    for rank in range(ranks):
        found = torch.load(directory / f"rank{rank}.pt")
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.timeout(300)
def test_a_flip_in_one_of_three_replicas_is_named_and_undone(directory: Path) -> None:
    began, status = train(directory, 3)
    check_named(status, began, Proof.MAJORITY)
    assert status.recoveries == 1
    check_bytes(directory, 3)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_flip_in_one_of_two_replicas_is_named_after_both_have_repeated_the_steps(
    directory: Path,
) -> None:
    began, status = train(directory, 2)
    check_named(status, began, Proof.REPEATED)
    assert status.recoveries == 2
    check_bytes(directory, 2)
