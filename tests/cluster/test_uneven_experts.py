"""A job with uneven copies of its experts (`examples/moe-elastic-job.yaml`) loses a node's power
without a spare, and gets it back: processes that are left stay, experts take other seats, and no
step is lost, because each expert has a copy left.

The cluster's fifth node is cordoned. The job runs once; what it led to is looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from alone import train_alone
from cluster import Cluster
from holdfast_system import Holdfast
from standings import Standing, member_without_operator, stand, wait_members
from survival import OUTPUTS, PATIENT, RECOVERY_S, RUN_S, Run

from holdfast_cli.demo.elastic import difference
from holdfast_cli.demo.report import LoggedStep, read_log, worlds_of

STEPS = 100_000
"""More than any test waits for."""
NODES, EXPERTS, LAYERS, SEATS = 4, 6, 1, 4
TOLERANCE = 1e-5
"""Largest relative difference of the losses of a step: additions in float64 in another order."""
ARGUMENTS = (
    *("--experts", str(EXPERTS), "--layers", str(LAYERS), "--dim", "32", "--seq", "32"),
    *("--dtype", "float64"),
)
ALONE = ("--seats", str(EXPERTS), "--min-copies", "1")
"""Of a single process, which has no job: it holds each expert once."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    lost: int
    """The member whose node lost its power."""
    standings: tuple[Standing, Standing, Standing]
    """Before its node is lost, with three members, and with four again."""
    log: list[LoggedStep]
    """Steps that the first rank has trained."""
    undisturbed: list[LoggedStep]
    """As many of one process without Holdfast."""
    events: list[tuple[str, str]]
    """(reason, message)."""


@pytest.fixture(scope="module")
def seen(cluster: Cluster, holdfast: Holdfast) -> Iterator[Seen]:
    other = max(cluster.nodes)
    cluster.kubectl("cordon", other)
    run = Run(
        cluster,
        "uneven",
        STEPS,
        stays=True,
        arguments=ARGUMENTS,
        detection=PATIENT,
        example="moe-elastic-job.yaml",
        spec={
            "model": {"numExperts": EXPERTS, "numMoELayers": LAYERS},
            "elastic": {"seatsPerRank": SEATS, "rebalanceSteps": 0},
            "failurePolicy": {"spares": 0, "joinWaitSeconds": 5},
        },
    )
    try:
        yield _shrink_and_grow(run)
    finally:
        if run.broken and cluster.nodes[run.broken].first_process is None:
            cluster.boot_node(run.broken)
        cluster.kubectl("uncordon", other)


def _shrink_and_grow(run: Run) -> Seen:
    run.begin()
    wait_members(run, "the first steps", NODES, RUN_S)
    before = stand(run)
    lost = member_without_operator(run, before)
    _, run.broken = run.job.member(lost)
    run.cluster.kill_node(run.broken)
    wait_members(run, "the job to go on with three members", NODES - 1, RECOVERY_S)
    shrunk = stand(run)
    run.cluster.boot_node(run.broken)
    run.holdfast.wait_daemon(run.broken)
    wait_members(run, "the job to grow", NODES, RECOVERY_S)
    grown = stand(run)
    events = [(event.reason, event.message) for event in run.job.events()]
    run.job.delete()
    log = run.log()
    alone = run.cluster.home / "shared" / "one-process"
    steps = ("--steps", str(log[-1].step))
    train_alone(run.cluster, "train_moe_elastic.py", alone, *ARGUMENTS, *OUTPUTS, *steps, *ALONE)
    return Seen(
        lost=lost,
        standings=(before, shrunk, grown),
        log=log,
        undisturbed=read_log(alone / "log.jsonl"),
        events=events,
    )


def test_no_step_is_lost_and_none_is_repeated(seen: Seen) -> None:
    assert [line.step for line in seen.log] == list(range(1, len(seen.log) + 1))
    assert [world.ranks for world in worlds_of(seen.log)] == [NODES, NODES - 1, NODES]


def test_losses_are_those_of_one_process_that_nothing_disturbs(seen: Seen) -> None:
    found = difference(seen.undisturbed, seen.log)
    print(f"losses of {len(seen.log)} steps differ by {found:.1e} at most")
    assert found <= TOLERANCE


def test_processes_that_are_left_stay_the_same(seen: Seen) -> None:
    before, shrunk, grown = seen.standings
    left = {member: pid for member, pid in before.processes.items() if member != seen.lost}
    assert shrunk.processes == left
    assert grown.processes.items() > left.items()
    assert shrunk.pods == {n: uid for n, uid in before.pods.items() if n != f"uneven-{seen.lost}-1"}
    assert shrunk.pods.items() <= grown.pods.items()


def test_kubectl_get_tells_the_story(seen: Seen) -> None:
    for standing, active in zip(seen.standings, (NODES, NODES - 1, NODES), strict=True):
        assert (standing.row["ACTIVE"], standing.row["DESIRED"]) == (str(active), str(NODES))
        assert standing.row["READY"] == f"{active}/{NODES}"
        assert standing.conditions["FullStrength"]["status"] == str(active == NODES)


def test_the_status_says_where_experts_are_and_that_nothing_was_lost(seen: Seen) -> None:
    for standing, active in zip(seen.standings, (NODES, NODES - 1, NODES), strict=True):
        experts: dict[str, Any] = standing.status["experts"]
        assert f"in {SEATS} seats of {active} ranks" in experts["text"]
        assert standing.conditions["ExpertsReplicated"]["status"] == "True"
    recovery = seen.standings[1].status["lastRecoveries"][0]
    assert (recovery["source"], recovery["lostSteps"]) == ("live", 0)


def test_events_tell_it_in_order(seen: Seen) -> None:
    story = [
        next(
            number
            for number, (found, text) in enumerate(seen.events)
            if reason == found and part in text
        )
        for reason, part in (
            ("ExpertsSeated", "4 ranks"),
            ("Recovering", "3 of 4 members go on"),
            ("ExpertsSeated", "3 ranks"),
            ("Joined", f"joins as member {seen.lost}; 4 of 4 members"),
        )
    ]
    assert story == sorted(story)
