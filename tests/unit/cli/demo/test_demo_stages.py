"""The demo in which a pipeline stage is lost: its job, and what it makes of the ranks' logs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from holdfast_cli.demo.stages import (
    SCRIPT,
    WINDOW,
    StageLoss,
    TrainedStep,
    account,
    stages_job,
)
from holdfast_cli.main import build_parser
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_operator.reconciler.report.recoveries import Recovery

RECOVERY = Recovery(epoch=2, cause="", decided_at=0.0, step_before=5, replay="as in the status")


def steps(first: int, last: int, *, epoch: int, pid: int, loss: float = 1.0) -> list[TrainedStep]:
    return [
        TrainedStep(
            step=step,
            loss=loss,
            epoch=epoch,
            time=10.0 * epoch + step,
            pid=pid,
            logged=0,
            state=str(step),
        )
        for step in range(first, last + 1)
    ]


def test_the_job_is_the_example_with_sparse_windows(tmp_path: Path) -> None:
    job = stages_job(tmp_path, 40)
    assert job.command[:4] == ("python", str(SCRIPT), "--steps", "40")
    assert job.spec.snapshot.policy.chosen == SparseWindows(window=WINDOW)
    chosen = stages_job(tmp_path, 40, Repeats.OPTIMIZER).spec.snapshot.policy.chosen
    assert chosen == SparseWindows(window=WINDOW, repeats=Repeats.OPTIMIZER)
    assert build_parser().parse_args(["demo", "--stages"]).stages


@pytest.mark.parametrize("other", [["--restart"], ["--policy", "Selective"]])
def test_what_the_job_has_already_is_refused(other: list[str]) -> None:
    options: argparse.Namespace = build_parser().parse_args(["demo", "--stages", *other])
    with pytest.raises(InvalidJobError, match="--stages runs a job of its own"):
        options.handler(options)


@pytest.mark.parametrize("wrong", ["", "loss", "survivor"])
def test_a_report_says_who_has_repeated_what(wrong: str) -> None:
    kept = [steps(1, 9, epoch=1, pid=rank) for rank in (0, 1)]
    lost = [steps(1, 5, epoch=1, pid=rank) + steps(3, 9, epoch=2, pid=7 + rank) for rank in (2, 3)]
    expected = [steps(1, 9, epoch=0, pid=0) for _ in range(4)]
    if wrong == "loss":
        expected[3] = steps(1, 9, epoch=0, pid=0, loss=2.0)
    if wrong == "survivor":
        kept[0] += steps(9, 9, epoch=2, pid=0)
    for lines in kept:
        lines[5:9] = steps(6, 9, epoch=2, pid=lines[0].pid)
    report = account(
        StageLoss(lines=kept + lost, killed_at=5.0, recoveries=[RECOVERY]), expected, 1
    )
    assert (report.lost_at_step, report.next_step_seconds, report.replay) == (
        5,
        21.0,
        RECOVERY.replay,
    )
    assert [one.repeated for one in report.ranks][1:] == [None, (3, 5), (3, 5)]
    assert [one.processes for one in report.ranks] == [1, 1, 2, 2]
    assert [one.equal for one in report.ranks] == [True, True, True, wrong != "loss"]
    assert report.success == (wrong == "")


def test_a_lost_stage_that_had_no_step_to_repeat_is_a_success() -> None:
    kept = [steps(1, 9, epoch=1, pid=rank) for rank in (0, 1)]
    lost = [steps(1, 5, epoch=1, pid=rank) + steps(6, 9, epoch=2, pid=7 + rank) for rank in (2, 3)]
    for lines in kept:
        lines[5:9] = steps(6, 9, epoch=2, pid=lines[0].pid)
    found = StageLoss(lines=kept + lost, killed_at=5.0, recoveries=[RECOVERY])
    report = account(found, [steps(1, 9, epoch=0, pid=0) for _ in range(4)], 1)
    assert {one.repeated for one in report.ranks} == {None}
    assert report.success
