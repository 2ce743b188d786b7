"""A real job goes on with three of its four nodes when a pod is deleted, and when a node loses its
power, and with four again when a pod is ready in its place: pods and processes that are left stay,
and training goes on from the line.

There is no spare: the cluster's fifth node is cordoned. The job runs once; what it led to is looked
at afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from cluster import Cluster
from holdfast_system import Holdfast
from jobs import PACE
from machine import wait_for
from standings import Standing, member_without_operator, stand, wait_members
from survival import PATIENT, RECOVERY_S, RUN_S, Run

from holdfast_cli.demo.report import LoggedStep
from holdfast_operator.kube.pods.containers import trainer_status

STEPS = 100_000
"""More than any test waits for."""
NODES, MINIMUM = 4, 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedPod:
    """A pod that was deleted while the job trained."""

    member: int
    at: float
    """When, in seconds since the Unix epoch."""
    short: dict[str, Any]
    """The job's status while the next pod was on its way."""
    started_at: float
    """When the next pod's container had started."""
    starting_at: float
    """When the status last showed that the next pod's agent was not ready."""


@dataclass(kw_only=True, slots=True)
class Seen:
    """The job without a deleted pod, and then before its node is lost, with three members, and with
    four again."""

    deleted: DeletedPod

    lost: int
    """The member whose node lost its power."""
    standings: list[Standing] = field(default_factory=list)
    log: list[LoggedStep]
    events: list[tuple[str, str]]
    """(reason, message)."""


@pytest.fixture(scope="module")
def seen(cluster: Cluster, holdfast: Holdfast) -> Iterator[Seen]:
    other = max(cluster.nodes)
    cluster.kubectl("cordon", other)
    run = Run(
        cluster,
        "fewer",
        STEPS,
        stays=True,
        arguments=(*PACE, "--ep", "1", "--seq", "32"),
        detection=PATIENT,
        spec={
            "nodes": NODES,
            "minNodes": MINIMUM,
            "parallelism": {"dp": NODES, "ep": 1},
            "failurePolicy": {"spares": 0, "joinWaitSeconds": 5},
        },
    )
    try:
        yield _shrink_and_grow(run)
        run.job.delete()
    finally:
        if run.broken and cluster.nodes[run.broken].first_process is None:
            cluster.boot_node(run.broken)
        cluster.kubectl("uncordon", other)


def _shrink_and_grow(run: Run) -> Seen:
    run.begin()
    wait_members(run, "the first steps", NODES, RUN_S)
    deleted = _delete_pod(run)
    wait_members(run, "the deleted pod's member to join", NODES, RECOVERY_S)
    before = stand(run)
    lost = member_without_operator(run, before)
    _, run.broken = run.job.member(lost)
    run.cluster.kill_node(run.broken)
    wait_members(run, "the job to go on with three members", MINIMUM, RECOVERY_S)
    shrunk = stand(run)
    run.cluster.boot_node(run.broken)
    run.holdfast.wait_daemon(run.broken)
    wait_members(run, "the job to grow", NODES, RECOVERY_S)
    return Seen(
        deleted=deleted,
        lost=lost,
        standings=[before, shrunk, stand(run)],
        log=run.log(),
        events=[(event.reason, event.message) for event in run.job.events()],
    )


def _delete_pod(run: Run) -> DeletedPod:
    """Delete the pod of the last member, and wait until its next one runs."""
    job, member = run.job, NODES - 1
    pod, _ = job.member(member)
    at = time.time()
    run.cluster.kubectl("delete", "pod", pod, "-n", job.namespace, "--wait=false")

    name = f"fewer-{member}-2"

    def gets_ready(status: dict[str, Any]) -> bool:
        training = status["phase"] == "Running" and status["strength"].get("joining") == 1
        return training and [each.get("pod") for each in status["joining"]] == [name]

    short = job.wait("the next pod", gets_ready, RECOVERY_S)

    def started() -> str:
        found = run.cluster.get("pod", name, "-n", job.namespace)
        state = trainer_status(found).get("state", {})
        return str(state.get("running", {}).get("startedAt", ""))

    job.wait("its container", lambda status: bool(started()), RECOVERY_S)
    started_at = datetime.fromisoformat(started()).timestamp()
    starting_at = at

    def has_started() -> bool:
        nonlocal starting_at
        now = time.time()
        starts = [each["state"] for each in job.status().get("joining") or ()] == ["starting"]
        starting_at = now if starts else starting_at
        return not starts

    wait_for("its agent", has_started, RECOVERY_S)
    return DeletedPod(
        member=member, at=at, short=short, started_at=started_at, starting_at=starting_at
    )


def test_the_status_says_how_many_members_there_are(seen: Seen) -> None:
    for standing, active in zip(seen.standings, (NODES, MINIMUM, NODES), strict=True):
        desired = {"active": active, "desired": NODES, "minimum": MINIMUM}
        assert standing.status["strength"] == desired
        assert (standing.row["ACTIVE"], standing.row["DESIRED"]) == (str(active), str(NODES))
        assert standing.row["READY"] == f"{active}/{NODES}"
        assert standing.conditions["FullStrength"]["status"] == str(active == NODES)
    _, shrunk, _ = seen.standings
    assert f"members [{seen.lost}] are missing" in shrunk.conditions["FullStrength"]["message"]


def test_members_that_are_left_keep_their_pods_and_processes(seen: Seen) -> None:
    before, shrunk, grown = seen.standings
    assert shrunk.pods == {n: uid for n, uid in before.pods.items() if n != f"fewer-{seen.lost}-1"}
    assert shrunk.processes == {m: pid for m, pid in before.processes.items() if m != seen.lost}
    assert shrunk.pods.items() <= grown.pods.items()
    assert shrunk.processes.items() <= grown.processes.items()
    assert grown.pods.keys() - shrunk.pods.keys() == {f"fewer-{seen.lost}-2"}


def test_only_the_loss_counts_as_a_recovery(seen: Seen) -> None:
    grown = seen.standings[-1].status
    assert (grown["recoveries"], grown["restarts"]) == (2, 2)
    losses = [message for reason, message in seen.events if reason == "Recovering"]
    assert len(losses) == 2
    assert all(f"{MINIMUM} of {NODES} members go on" in loss for loss in losses)
    joined = [message for reason, message in seen.events if reason == "Joined"]
    for member in (seen.deleted.member, seen.lost):
        text = f"joins as member {member}; {NODES} of {NODES} members"
        assert sum(text in message for message in joined) == 1


def test_nobody_waits_for_the_pod_after_one_that_was_deleted(seen: Seen) -> None:
    deleted = seen.deleted
    assert deleted.short["phase"] == "Running"
    assert deleted.short["strength"]["active"] == MINIMUM
    assert [each["index"] for each in deleted.short["joining"]] == [deleted.member]
    after = [line for line in seen.log if line.epoch == deleted.short["epoch"]]
    print(f"the next step {after[0].time - deleted.at:.2f} s after a pod was deleted")
    print(f"its next pod's container runs after {deleted.started_at - deleted.at:.0f} s")
    # The container's start is known to the second, and its agent takes more of them.
    assert after[0].time <= max(deleted.started_at + 1.0, deleted.starting_at)


def test_each_world_trains_on_from_what_was_protected(seen: Seen) -> None:
    """No step is left out, none that was known to be protected is run again, and the loss goes on
    from where it was."""
    epochs = sorted({line.epoch for line in seen.log})
    worlds = [[line for line in seen.log if line.epoch == epoch] for epoch in epochs]
    assert len(worlds) == 5
    for steps in worlds:
        numbers = [line.step for line in steps]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    learned = seen.log[0].loss - worlds[0][-1].loss
    assert learned > 0
    for standing, old, new in zip(seen.standings, worlds[2:], worlds[3:], strict=False):
        assert standing.status["protectedStep"] < new[0].step <= old[-1].step + 1
        assert abs(new[0].loss - old[-1].loss) < learned / 2
