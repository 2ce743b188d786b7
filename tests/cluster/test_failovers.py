"""The leader goes, at any instant and in every phase of jobs of one, two and four nodes among five:
none of them loses what was safe.

`make test-cluster ARGS="-k failovers --every-combination"` lets twenty leaders go.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from beside import Beside, safe_step
from cluster import Cluster
from holdfast_system import NAMESPACE, Holdfast
from machine import wait_for

TEAM = "failovers"
SIZES = (1, 2, 4)
LEADS_S = 90.0
LEADERS_MAX = 3
"""Most leaders that go one after the other, while the jobs are on their way to run again."""
HELD_UP_S = 14.0
"""How long daemons are held up: longer than a first placement waits for anybody."""
PHASES = ("running", "running", "recovering", "suspended", "moving", "starting")
"""What a job may be in when the leader goes."""


@pytest.fixture(scope="module")
def trio(cluster: Cluster, holdfast: Holdfast) -> Iterator[list[Beside]]:
    cluster.kubectl("create", "namespace", TEAM)
    found = [Beside(cluster, nodes, TEAM) for nodes in SIZES]
    for each in found:
        each.begin()
    for each in found:
        each.runs_on()
    yield found
    cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")
    cluster.kubectl("delete", "namespace", TEAM, "--wait=false")


def _bring_into(phase: str, beside: Beside, rng: random.Random) -> None:
    """Bring the job into the phase, or on the way to it."""
    match phase:
        case "recovering":
            os.kill(beside.job.rank_process(rng.randrange(beside.nodes)), signal.SIGKILL)
        case "moving":
            pod, _ = beside.job.member(rng.randrange(beside.nodes))
            beside.job.cluster.kubectl("delete", "pod", pod, "-n", TEAM, "--wait=false")
        case "suspended":
            beside.job.patch({"suspend": True})
        case "starting":
            beside.begin()


def _lose_leader(holdfast: Holdfast, rng: random.Random) -> str:
    """Take the leader away, as an upgrade or a crash does; returns who leads then."""
    before = holdfast.wait_leader()
    if rng.random() < 0.25:
        holdfast.kill(before)
        holdfast.cluster.kubectl("delete", "pod", before, "-n", NAMESPACE, "--wait=false")
    else:
        holdfast.cluster.kubectl("delete", "pod", before, "-n", NAMESPACE, "--wait=false")
    others = ("", before)
    wait_for("another leader", lambda: holdfast.leader() not in others, LEADS_S)
    return holdfast.leader()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_leaders_go_and_no_job_loses_what_was_safe(
    holdfast: Holdfast, trio: list[Beside], count: int
) -> None:
    rng = random.Random(count)
    gone = 0
    while gone < count:
        before, phases = {}, {}
        for each in trio:
            # A random instant: somewhere within the next steps.
            before[each.name] = each.runs_on(safe_step(each.job.status()) + rng.randrange(4))
            phases[each.name] = rng.choice(PHASES)
        for each in rng.sample(trio, len(trio)):
            _bring_into(phases[each.name], each, rng)
        for _ in range(min(rng.randint(1, LEADERS_MAX), count - gone)):
            gone += 1
            leader = _lose_leader(holdfast, rng)
            print(f"leader {gone} of {count} is gone: {phases}; {leader} leads", flush=True)
        for each in trio:
            if phases[each.name] == "suspended":
                each.job.patch({"suspend": False})
        for each in trio:
            _check(each, phases[each.name], before[each.name])


def _check(beside: Beside, phase: str, before: dict[str, Any]) -> None:
    """See that the job runs, and went on from nothing older than what was safe."""
    if phase == "starting":
        beside.runs_on()
        return
    beside.runs_on(safe_step(before))
    for epoch, step in beside.restored_after(before["epoch"]).items():
        assert step >= safe_step(before), (beside.name, phase, epoch, step, before)


def _daemons(holdfast: Holdfast, beside: Beside) -> list[int]:
    """Processes of the daemons of the job's members."""
    nodes = [member["node"] for member in beside.job.status()["members"]]
    pods = [holdfast.daemon_on(node) for node in nodes]
    return [pid for pod in pods for pid in holdfast.cluster.pod_processes(pod, NAMESPACE)]


@pytest.mark.parametrize("nodes", [1, 2])
def test_daemons_that_are_held_up_while_the_leader_changes_are_waited_for(
    holdfast: Holdfast, trio: list[Beside], nodes: int
) -> None:
    beside = next(each for each in trio if each.nodes == nodes)
    before = beside.runs_on()
    daemons = _daemons(holdfast, beside)
    for pid in daemons:
        os.kill(pid, signal.SIGSTOP)
    try:
        _lose_leader(holdfast, random.Random(nodes))
        began = time.monotonic()
        status = beside.job.wait(
            "the new leader to wait for the daemons",
            lambda s: (
                "waiting for the daemon on" in s.get("problem", "")
                and time.monotonic() - began >= HELD_UP_S
            ),
            60.0,
        )
        assert status["epoch"] == before["epoch"]
        assert "whose memory may hold its snapshots" in status["problem"]
    finally:
        for pid in daemons:
            with suppress(ProcessLookupError):  # kubelet has ended one that hung for so long
                os.kill(pid, signal.SIGCONT)
    _check(beside, "running", before)  # a daemon that was held up may have lost its sessions
    homes = [[m["node"] for m in s["members"]] for s in (before, beside.job.status())]
    assert homes[0] == homes[1]
