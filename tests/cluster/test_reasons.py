"""Reasons that a real kubelet and a real kernel give, and training without a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jobs
import pytest
from cluster import Cluster
from holdfast_system import Holdfast, Job
from machine import wait_for

TEAM = "reasons-test"
WAIT_S = 240.0
DETECTION = {"heartbeatSeconds": 0.5, "missedHeartbeats": 4, "replaceSeconds": 20}

SCRIPT = """
import sys, time
if sys.argv[1] == "needs":
    b"x" * (4 * 2**30)
while True:
    sum(range(100_000))
"""
"""Never calls holdfast.init."""

UNSAVEABLE = """
import time, torch, holdfast

class Lock:
    def state_dict(self):
        raise TypeError("a lock has no state")

    load_state_dict = None

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
session = holdfast.init(model=model, optimizer=optimizer, stateful={"lock": Lock()})
assert session.restore() is None
step = 0
while True:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    step += 1
    session.save(step)
    time.sleep(0.2)
"""
"""Trains on while each of its saves is refused."""

Make = Callable[..., Job]


@pytest.fixture(scope="module", autouse=True)
def namespace(cluster: Cluster) -> Iterator[None]:
    """Where the jobs are."""
    cluster.kubectl("create", "namespace", TEAM)
    yield
    cluster.kubectl("delete", "namespace", TEAM, "--wait=false")


@pytest.fixture
def make(cluster: Cluster, holdfast: Holdfast) -> Iterator[Make]:
    """Function that applies a job of one member, whose trainer runs a script with an argument."""

    def apply(
        name: str,
        argument: str,
        init: dict[str, Any] | None = None,
        *,
        script: str = SCRIPT,
        snapshot: dict[str, Any] | None = None,
        **policy: Any,
    ) -> Job:
        document = jobs.trainer_job(
            name,
            namespace=TEAM,
            nodes=1,
            nprocPerNode=1,
            parallelism={"dp": 1},
            redundancy={"type": "None"},
            failurePolicy={"spares": 0, "maxRestarts": 5, "detection": DETECTION, **policy},
        )
        pod = document["spec"]["trainer"]["template"]["spec"]
        pod["containers"][0] |= {"command": ["python", "-c", script], "args": [argument]}
        document["spec"]["snapshot"] |= snapshot or {}
        if init is not None:
            pod["initContainers"] = [{"image": pod["containers"][0]["image"], **init}]
        document["spec"].pop("model", None)
        job = Job(cluster, document)
        job.apply()
        return job

    yield apply
    cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")


def failed(job: Job) -> str:
    """Why the job has failed, once it has."""
    wait_for("the job to fail", lambda: job.status().get("phase") == "Failed", WAIT_S)
    return str(job.condition("Failed")["message"])


def test_a_trainer_that_lacks_memory_three_times_fails_the_job_with_advice(make: Make) -> None:
    job = make("hungry", "needs")
    why = failed(job)
    assert "for lack of memory (OOMKilled, code 137)" in why
    assert "3 times at the same step; raise resources.limits.memory" in why
    causes = [each["cause"] for each in job.status()["lastRecoveries"]]
    assert causes and all("OOMKilled" in cause for cause in causes)
    assert not any("SIGKILL" in event.message for event in job.events())


def test_an_init_container_that_fails_is_named_with_its_code_and_lines(make: Make) -> None:
    fetch = {
        "name": "fetch",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "echo cannot fetch dataset >&2; exit 3"],
    }
    job = make("fetches", "trains", fetch)
    why = failed(job)
    assert "was not started: init container fetch exited with code 3, 3 times" in why
    assert "cannot fetch dataset" in why
    assert not any("SIGKILL" in event.message for event in job.events())


def test_a_script_without_a_session_is_not_restarted_while_it_works(make: Make) -> None:
    job = make("bare", "trains", detection={**DETECTION, "startSeconds": 30})
    wait_for(
        "the event about work without protection",
        lambda: any(event.reason == "WorksUnprotected" for event in job.events()),
        WAIT_S,
    )
    status = job.status()
    assert (status["phase"], status["recoveries"]) == ("Starting", 0)
    assert "rank 0 works without protection" in job.condition("Running")["message"]


def test_training_whose_saves_are_refused_says_so_or_ends(make: Make) -> None:
    trains = make("refused", "", script=UNSAVEABLE)
    requires = make("required", "", script=UNSAVEABLE, snapshot={"requireProtection": True})
    why = "failed with TypeError: a lock has no state"

    def shows(status: dict[str, Any]) -> bool:
        found = {each["type"]: each for each in status.get("conditions", ())}
        protected, running = found.get("Protected", {}), found.get("Running", {})
        return (
            (protected.get("status"), protected.get("reason")) == ("False", "TrainsUnprotected")
            and why in protected["message"]
            and "1 ranks train in epoch 1" in running.get("message", "")
            and why in status.get("problem", "")
        )

    # The refusal is known before it is known that the rank trains all the same.
    status = trains.wait("Protected to be false with the refusal", shows, WAIT_S)
    assert status["recoveries"] == 0
    wait_for(
        "the event about the refusal",
        lambda: any(e.reason == "SnapshotsRefused" and why in e.message for e in trains.events()),
        WAIT_S,
    )
    assert "its saves are refused (code 81)" in failed(requires)
    assert requires.status()["recoveries"] == 0
