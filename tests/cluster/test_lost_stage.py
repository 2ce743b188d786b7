"""A job with pipeline stages (`examples/moe-pipeline-job.yaml`, each stage on a node of its own)
loses the power of one stage's node. A spare takes over and repeats steps alone; the other stage
keeps its processes and repeats none; the bytes are those of a run that nothing disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from alone import train_alone
from cluster import Cluster
from holdfast_system import Holdfast
from jobs import OUTPUT
from standings import Standing, stand, wait_members
from survival import PATIENT, RECOVERY_S, RUN_S, Run, recoveries_in

from holdfast_cli.demo.stages import (
    REPLICAS,
    STAGES,
    StageLoss,
    StagesReport,
    TrainedStep,
    account,
    lines_of,
    ranks_of,
)

STEPS, WINDOW = 120, 6
LOST = 1
"""The stage, and the member that is all of it."""
SPARSE = {"interval": {"steps": 1}, "policy": {"type": "Sparse", "sparse": {"window": WINDOW}}}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    before: Standing
    after: Standing
    report: StagesReport
    events: list[tuple[str, str]]
    """(reason, message)."""


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[list[TrainedStep]]:
    """Steps of each rank in a run without Holdfast in one pod."""
    folder = cluster.home / "shared" / "stages-alone"
    arguments = ("--steps", str(STEPS), "--directory", OUTPUT)
    processes = STAGES * REPLICAS
    train_alone(cluster, "train_moe_pipeline.py", folder, *arguments, processes=processes)
    return lines_of(folder)


@pytest.fixture(scope="module")
def outcome(
    cluster: Cluster, holdfast: Holdfast, undisturbed: list[list[TrainedStep]]
) -> Iterator[Outcome]:
    run = Run(
        cluster,
        "stages",
        STEPS,
        example="moe-pipeline-job.yaml",
        outputs=("--directory", OUTPUT),
        detection=PATIENT,
        spec={
            "nodes": STAGES,
            "nprocPerNode": REPLICAS,
            "redundancy": {"type": "RAIM5", "raim5": {"groupSize": STAGES}},
            "snapshot": {"memoryPerNode": "256Mi", **SPARSE},
        },
    )
    try:
        yield _lose_stage(run, undisturbed)
    finally:
        if run.broken:
            cluster.boot_node(run.broken)
            holdfast.wait_daemon(run.broken)


def _lose_stage(run: Run, undisturbed: list[list[TrainedStep]]) -> Outcome:
    job = run.job
    run.begin()
    wait_members(run, "the first steps", STAGES, RUN_S)
    before = stand(run)
    _, run.broken = job.member(LOST)
    run.cluster.kill_node(run.broken)
    killed_at = time.time()
    job.wait("a spare to take over", _has_recovered, RECOVERY_S)
    after = stand(run)
    ended = job.wait("the end", lambda status: status.get("phase") == "Complete", RUN_S)
    lines = lines_of(run.folder)
    found = StageLoss(lines=lines, killed_at=killed_at, recoveries=recoveries_in(ended))
    events = [(event.reason, event.message) for event in job.events()]
    job.delete()
    return Outcome(
        before=before, after=after, report=account(found, undisturbed, LOST), events=events
    )


def _has_recovered(status: dict[str, Any]) -> bool:
    return status.get("phase") == "Running" and status.get("recoveries") == 1


def test_the_lost_stage_alone_repeats_steps_and_all_bytes_are_those_of_an_undisturbed_run(
    outcome: Outcome,
) -> None:
    for rank in outcome.report.ranks:
        assert rank.equal and rank.trained == STEPS, rank
        assert rank.stage == LOST or rank.repeated is None, rank


def test_the_other_stage_keeps_its_pod_and_processes(outcome: Outcome) -> None:
    others = [rank for rank in outcome.report.ranks if rank.stage != LOST]
    assert [rank.processes for rank in others] == [1] * REPLICAS
    kept = f"stages-{1 - LOST}-1"
    assert outcome.after.pods[kept] == outcome.before.pods[kept]
    assert outcome.after.processes[1 - LOST] == outcome.before.processes[1 - LOST]


def test_a_spare_takes_over(outcome: Outcome) -> None:
    old, new = (
        next(each["node"] for each in standing.status["members"] if each["index"] == LOST)
        for standing in (outcome.before, outcome.after)
    )
    assert old != new
    assert outcome.after.status["recoveries"] == 1


def test_status_and_event_say_which_ranks_have_repeated_which_steps(outcome: Outcome) -> None:
    first, last = ranks_of(LOST)
    repeated = next(each.repeated for each in outcome.report.ranks if each.rank == first)
    assert repeated is not None
    text = (
        f"ranks {first}, {last} repeated steps {repeated[0]} to {repeated[1]} alone; "
        f"the others kept their state"
    )
    print(f"{text}; next step {outcome.report.next_step_seconds} s after the power was cut")
    assert text in outcome.after.status["lastRecoveries"][0]["replay"]
    assert any(reason == "Running" and text in message for reason, message in outcome.events)
