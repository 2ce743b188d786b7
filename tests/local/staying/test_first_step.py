"""One rank is killed in the first step, before anything is protected: the job goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import first_step_trainer
import pytest
from local_jobs import PATIENT, make_job

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.status import Phase

WAIT_S = 150.0
POINTS = ("before-init", "forward", "before-vote", "after-vote", "after-optimizer")


@dataclass(frozen=True)
class Shape:
    nodes: int
    nproc: int
    ep: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.nproc


def job_of(shape: Shape, directory: Path, *options: str) -> Any:
    script = [sys.executable, first_step_trainer.__file__, "--directory", str(directory)]
    return make_job(
        "first",
        [*script, "--ep", str(shape.ep), *options],
        nodes=shape.nodes,
        nproc=shape.nproc,
        parallelism={"dp": shape.ranks, "ep": shape.ep},
        redundancy={"type": "RAIM5" if shape.nodes > 1 else "None"},
        snapshot={"memoryPerNode": "16Mi"},
        failurePolicy={"maxRestarts": 3, "reformSeconds": 12, "detection": PATIENT},
    )


def lines(directory: Path, rank: int) -> list[list[int]]:
    """[step, epoch, process] of each step that a rank has run."""
    try:
        text = (directory / f"log-{rank}").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


async def survive(shape: Shape, directory: Path, killed: int, point: str, *options: str) -> Status:
    """Run a job whose rank `killed` dies at its first arrival at `point`, until it has protected
    something in a later epoch, or all ranks run steps there where one node protects nothing."""
    (directory / f"fault-{killed}").write_text(f"{point} SIGKILL")
    job = job_of(shape, directory, *options)
    cluster = LocalCluster(job, LocalSettings(directory=directory / "run"))

    def recovered(status: Status) -> bool:
        assert status.phase is not Phase.FAILED, status.local.reason
        last = [lines(directory, rank)[-1:] for rank in range(shape.ranks)]
        if shape.nodes == 1:
            return status.epoch > 1 and all(one and one[0][1] == status.epoch for one in last)
        return status.epoch > 1 and status.protected.startswith(f"{status.epoch}.")

    await cluster.start()
    try:
        return await cluster.wait_for(recovered, timeout_s=WAIT_S, what="steps after the kill")
    finally:
        await cluster.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_neighbours_that_hold_what_a_lost_rank_held_stay_although_nothing_is_protected(
    tmp_path: Path,
) -> None:
    """All of the job is on one node, whose loss would leave nothing."""
    shape = Shape(1, 4, 2)
    status = asyncio.run(survive(shape, tmp_path, 3, "forward"))
    assert status.epoch == 2
    for rank in range(shape.ranks):
        processes = {pid for _, _, pid in lines(tmp_path, rank)}
        assert len(processes) == 1 and lines(tmp_path, rank)[-1][1] == 2
    assert lines(tmp_path, 0)[0][0] == 1 and lines(tmp_path, 3)[0][0] in (1, 2)


ALONE, TOGETHER = Shape(4, 1, 4), Shape(2, 2, 4)
"""Each rank, or each member, holds experts that no other has."""
REPLICATED = (Shape(4, 1, 2), Shape(2, 2, 1))
SLOW = {
    (ALONE, "forward"),
    (ALONE, "after-vote"),
    (TOGETHER, "forward"),
    *((shape, "forward") for shape in REPLICATED),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shape", "point"),
    [
        pytest.param(
            shape,
            point,
            marks=pytest.mark.slow if (shape, point) in SLOW else pytest.mark.exhaustive,
            id=f"{shape.nodes}x{shape.nproc}-ep{shape.ep}-{point}",
        )
        for shape, point in itertools.product((ALONE, TOGETHER, *REPLICATED), POINTS)
    ],
)
def test_a_rank_that_is_killed_in_the_first_step_costs_one_restart(
    shape: Shape, point: str, tmp_path: Path
) -> None:
    killed = shape.ranks - 1
    status = asyncio.run(survive(shape, tmp_path, killed, point))
    assert status.epoch == 2, "all that restart do so together"
    for rank in range(shape.ranks):
        steps = [step for step, epoch, _ in lines(tmp_path, rank) if epoch == 2]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert steps[0] in (1, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_survivors_that_were_kept_for_nothing_end_so_that_all_begin_anew_together(
    tmp_path: Path,
) -> None:
    status = asyncio.run(survive(ALONE, tmp_path, 2, "forward", "--stay"))
    assert status.epoch == 3, "the loss, and one restart of all"
    processes = {pid for rank in range(4) for _, epoch, pid in lines(tmp_path, rank) if epoch == 3}
    assert len(processes) == 4
    assert status.last_failure is None or status.last_failure.exit_code == 128 + signal.SIGKILL
