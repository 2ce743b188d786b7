"""A real job without a spare waits for a drained node, also while that node is switched off, and
goes on from its snapshots when the node takes pods again. One that has failed goes on when a person
says so.

The job runs once; what it led to is looked at afterwards.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from cluster import Cluster
from holdfast_system import TIER, Holdfast
from jobs import PACE
from machine import wait_for
from survival import PATIENT, RECOVERY_S, RUN_S, Run, drain
from typed import holdfast_command

NAME, STEPS, FIRST_STEPS = "patient", 100_000, 5
"""More steps than any test waits for."""
LIMIT_S, WAIT_S = 5.0, 30.0
"""Time after which the job has a rule, which does not fail it, and how long the test waits."""

KEPT_S = 30.0
"""Time in which the status of a failed job says which generation its daemons keep."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(kw_only=True, slots=True)
class Seen:
    """What was seen of the job, in the order in which it happened."""

    before: dict[str, Any]
    """Its status before the drain."""
    phases: set[str] = field(default_factory=set)
    """Its phases while it waited."""
    waits: dict[str, Any] = field(default_factory=dict)
    shown: str = ""
    """What `holdfast status` printed then."""
    lacks: dict[str, Any] = field(default_factory=dict)
    """Its status while the drained node had no power."""
    back: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)
    persisted: str = ""
    """What `holdfast persist` printed about the failed job."""
    resumed: str = ""
    """What `holdfast resume` printed about it."""
    last: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def seen(cluster: Cluster, holdfast: Holdfast) -> Iterator[Seen]:
    run = Run(
        cluster,
        NAME,
        STEPS,
        arguments=(*PACE, "--seq", "32", "--dim", "32", "--layers", "1"),
        detection=PATIENT,
        spec={
            "nodes": 2,
            "parallelism": {"dp": 2, "ep": 2},
            "redundancy": {"type": "RAIM5", "raim5": {"groupSize": 2}},
            "failurePolicy": {
                "spares": 0,
                "rules": [
                    {"when": "NoReplacement", "action": "ReplaceNode", "afterSeconds": LIMIT_S},
                    {"when": "Disruption", "action": "ReplaceNode", "countTowardsMax": False},
                    {"when": "Any", "action": "RestartInPlace"},
                ],
            },
            "persistence": {"uri": f"{TIER}/{NAME}", "interval": {"steps": 1_000_000}},
        },
    )
    cordoned: list[str] = []
    try:
        run.begin()
        found = Seen(before=_trains(run, {}))
        homes = {member["node"] for member in found.before["members"]}
        for other in sorted(set(cluster.nodes) - homes):
            cluster.kubectl("cordon", other)
            cordoned.append(other)
        _wait_without_its_node(run, found)
        _fail_and_resume(run, found)
        yield found
        run.job.delete()
    finally:
        if run.broken and cluster.nodes[run.broken].first_process is None:
            cluster.boot_node(run.broken)
        for name in {*cordoned, *filter(None, [run.broken])}:
            cluster.kubectl("uncordon", name)


def _trains(run: Run, after: dict[str, Any], timeout_s: float = RUN_S) -> dict[str, Any]:
    """The status once an epoch after that of another status has protected steps."""

    def trains(status: dict[str, Any]) -> bool:
        epoch, _, step = status.get("protected", "0.0").partition(".")
        is_new = int(epoch) == status.get("epoch", 0) > after.get("epoch", 0)
        first = after.get("protectedStep", 0) + FIRST_STEPS
        return status.get("phase") == "Running" and is_new and int(step) >= first

    return run.job.wait("protected steps of a new epoch", trains, timeout_s)


def _wait_without_its_node(run: Run, found: Seen) -> None:
    """Drain a member's node, take its power away and give it back, and let it take pods again."""
    job, cluster = run.job, run.cluster
    drain(run)
    job.wait("the job to wait", lambda status: status["phase"] == "Waiting", RECOVERY_S)
    until = time.monotonic() + WAIT_S

    def waited() -> bool:
        found.phases.add(job.status()["phase"])
        return time.monotonic() >= until

    wait_for("well beyond the limit", waited, 2 * WAIT_S)
    found.waits = job.status()
    found.shown = holdfast_command(cluster, "status", NAME, "-n", job.namespace)
    cluster.kill_node(run.broken)
    lost = f"{run.broken} lost"
    found.lacks = job.wait("its node to be lost", lambda s: lost in s["problem"], RECOVERY_S)
    cluster.boot_node(run.broken)
    run.holdfast.wait_daemon(run.broken)
    found.phases.add(job.status()["phase"])
    cluster.kubectl("uncordon", run.broken)
    # Sooner than the scheduler would try a pod again that a placeholder has kept off its node.
    found.back = _trains(run, found.waits, RECOVERY_S)


def _fail_and_resume(run: Run, found: Seen) -> None:
    """Allow no restart, kill a rank, and have the job go on all the same."""
    _allow_restarts(run, 0)
    os.kill(run.job.rank_process(1), signal.SIGKILL)
    run.job.wait("the job to fail", lambda status: status["phase"] == "Failed", RECOVERY_S)
    label = f"holdfast.dev/job={NAME}"

    def pods() -> list[str]:
        items = run.cluster.get("pods", "-n", run.job.namespace, "-l", label)["items"]
        return [str(pod["metadata"]["name"]) for pod in items]

    wait_for("its pods to end", lambda: not pods(), RECOVERY_S)
    where = ("-n", run.job.namespace)
    found.persisted = holdfast_command(run.cluster, "persist", NAME, *where)

    def says_what_is_kept() -> dict[str, Any]:
        status = run.job.status()
        return status if f"generation {status['protected']} of " in found.persisted else {}

    # Its daemons may have protected one more after its end. (`Job.wait` gives up a failed job.)
    found.failed = wait_for("what was persisted", says_what_is_kept, KEPT_S)
    _allow_restarts(run, 20)
    found.resumed = holdfast_command(run.cluster, "resume", NAME, *where)
    found.last = _trains(run, found.failed)


def _allow_restarts(run: Run, count: int) -> None:
    run.job.patch({"failurePolicy": {"maxRestarts": count}})
    written = run.cluster.get("moejob", NAME, "-n", run.job.namespace)["metadata"]["generation"]
    wait_for("the edit", lambda: run.job.status()["observedGeneration"] == written, RECOVERY_S)


def test_a_job_without_a_spare_waits_for_a_drained_node_beyond_any_limit(seen: Seen) -> None:
    assert seen.phases == {"Waiting"}
    assert seen.waits["epoch"] == seen.before["epoch"]
    conditions = {c["type"]: (c["status"], c["reason"]) for c in seen.waits["conditions"]}
    assert conditions["Scheduled"] == ("False", "NoReplacement")
    assert conditions["Recovering"] == ("False", "WaitingForNodes")
    assert conditions["Failed"][0] == "False" and conditions["Protected"][0] == "True"


def test_its_status_says_what_it_waits_for_and_since_when(seen: Seen) -> None:
    problem = seen.waits["problem"]
    node = next(m["node"] for m in seen.before["members"] if m["index"] == 1)
    assert f"members [1] have no node and no spare is left: no pods on {node}" in problem
    assert "waiting for " in problem and "until then it waits" in problem
    assert "Waiting" in seen.shown and "no spare is left" in seen.shown


def test_its_snapshots_stay_while_the_drained_node_has_no_power(seen: Seen) -> None:
    assert seen.lacks["phase"] == "Waiting"
    assert seen.lacks["protected"] == seen.waits["protected"]
    conditions = {c["type"]: c["status"] for c in seen.lacks["conditions"]}
    assert conditions["Protected"] == "True"


def test_it_goes_on_from_them_when_the_node_takes_pods_again(seen: Seen) -> None:
    last = seen.back["lastRecoveries"][-1]
    assert last["source"] == "parity"
    assert last["restoredStep"] >= seen.waits["protectedStep"]
    assert seen.back["restarts"] == seen.before.get("restarts", 0)


def test_a_failed_job_keeps_its_snapshots_and_says_until_when(seen: Seen) -> None:
    assert seen.failed["keptUntil"] > seen.failed["endedAt"]
    conditions = {c["type"]: c for c in seen.failed["conditions"]}
    assert conditions["Failed"]["reason"] == "MaxRestartsExceeded"
    assert ".status.keptUntil" in conditions["Failed"]["message"]
    assert conditions["Protected"]["status"] == "True"


def test_a_failed_job_is_persisted_and_goes_on_from_its_snapshots(seen: Seen) -> None:
    assert f"generation {seen.failed['protected']} of " in seen.persisted
    assert "is in durable storage" in seen.persisted
    assert "it resumes from its newest protected generation" in seen.resumed
    assert seen.last["step"] > seen.failed["protectedStep"]
    assert seen.last["epoch"] == seen.failed["epoch"] + 1
    assert "keptUntil" not in seen.last and "endedAt" not in seen.last
