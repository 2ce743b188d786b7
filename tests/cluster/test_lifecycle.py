"""From the beginning of a job to its end, and of the release: nothing is left behind, nothing is
wedged, and nothing loops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jobs
import pytest
from audit import Audit
from cluster import Cluster
from daemon_calls import hello, token_for
from holdfast_system import CHART, NAMESPACE, Holdfast, Job
from machine import ClusterError, wait_for

from holdfast_core.errors import AccessDeniedError, UnreachableError
from holdfast_operator.kube.job.finalizer import FINALIZER
from holdfast_operator.kube.job.fleet import ORPHAN_S

TEAM = "lifecycle-test"
WAIT_S = 90.0
FREED_S = ORPHAN_S + WAIT_S
"""As long as another operator may take, if the one that was told is gone."""
MEMORY = "/run/holdfast/memory"
TOKEN = "run/holdfast/token"
STEPS = 100_000
"""More than any test waits for."""

Document = dict[str, Any]

pytestmark = pytest.mark.slow


def _small(name: str, template: Document | None = None, **spec: Any) -> Document:
    """A job of one member, whose pod never gets further than its image."""
    return jobs.small_job(name, TEAM, template, **spec)


class System:
    """The release, and what its jobs have."""

    def __init__(self, holdfast: Holdfast) -> None:
        self.holdfast, self.cluster = holdfast, holdfast.cluster

    def job(self, document: Document) -> Job:
        """Apply a job."""
        found = Job(self.cluster, document)
        found.apply()
        return found

    def names(self, kinds: str, *words: str) -> list[str]:
        """`kind/name` of objects in the jobs' namespace."""
        found = self.cluster.kubectl("get", kinds, "-n", TEAM, "-o", "name", *words)
        return found.split()

    def pods(self, job: str) -> dict[str, str]:
        """Name → uid of each pod of a job."""
        label = f"holdfast.dev/job={job}"
        found = self.cluster.get("pods", "-n", TEAM, "-l", label)["items"]
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def metadata(self, job: str) -> Document:
        found: Document = self.cluster.get("moejob", job, "-n", TEAM)["metadata"]
        return found

    def is_there(self, job: str) -> bool:
        return f"moetrainingjob.holdfast.dev/{job}" in self.names("moejob")

    def wait_taken_in(self, job: str) -> None:
        """Return once the operator holds on to the job."""
        wait_for(
            f"the finalizer of {job}",
            lambda: FINALIZER in self.metadata(job).get("finalizers", ()),
            WAIT_S,
        )

    def wait_pod(self, job: str) -> str:
        """Name of the only pod of a job, once it has a node."""

        def found() -> str:
            pods = self.cluster.get("pods", "-n", TEAM, "-l", f"holdfast.dev/job={job}")["items"]
            return next((p["metadata"]["name"] for p in pods if "nodeName" in p["spec"]), "")

        return wait_for(f"the pod of {job}", found, WAIT_S)

    def used_bytes(self) -> dict[str, tuple[float, int]]:
        """Node → (what its daemon reports as allocated, what its tmpfs has in use)."""
        found = {}
        for node in self.cluster.nodes:
            text = self.holdfast.metrics_of(node)
            reported = re.search(r"^holdfast_memory_used_bytes (\S+)$", text, re.MULTILINE)
            assert reported is not None
            disk = os.statvfs(self.cluster.nodes[node].path(MEMORY))
            found[node] = (float(reported[1]), (disk.f_blocks - disk.f_bfree) * disk.f_frsize)
        return found

    def scale_operator(self, replicas: int) -> None:
        """Returns when that many are there, and ready."""
        words = ("deployment", "holdfast-operator", "-n", NAMESPACE)
        self.cluster.kubectl("scale", *words, f"--replicas={replicas}")
        wait_for("the operators", lambda: len(self.holdfast.operators()) == replicas, WAIT_S)
        self.cluster.kubectl("rollout", "status", *words, "--timeout=90s")

    def live_through_another(self, name: str) -> None:
        """A job comes and goes: the operator has looked at all there is meanwhile."""
        other = self.job(_small(name))
        self.wait_pod(name)
        other.delete()


@pytest.fixture(scope="module")
def system(cluster: Cluster, holdfast: Holdfast) -> Iterator[System]:
    cluster.kubectl("create", "namespace", TEAM)
    yield System(holdfast)
    cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")
    cluster.kubectl("delete", "namespace", TEAM, "--wait=false")


@pytest.fixture
def training(system: System) -> Job:
    """A real job of four members, which trains and is protected; made when it is not there."""
    job = system.job(jobs.trainer_job("training", namespace=TEAM, steps=STEPS, arguments=jobs.PACE))
    job.wait("the job to be protected", _is_protected, 180.0)
    return job


def _is_protected(status: Document) -> bool:
    return status.get("phase") == "Running" and status.get("protectedStep", 0) > 0


def _count(job: Job, reason: str) -> int:
    """Number of events of all jobs of the name."""
    return sum(event.reason == reason for event in job.events())


def _condition(status: Document, kind: str) -> tuple[str, str]:
    """(status, reason) of a condition; empty when there is none."""
    found = (c for c in status.get("conditions", ()) if c["type"] == kind)
    return next(((c["status"], c["reason"]) for c in found), ("", ""))


def _older_chart(folder: Path) -> Path:
    chart = folder / "holdfast"
    shutil.copytree(CHART, chart)
    described = chart / "Chart.yaml"
    text = described.read_text(encoding="utf-8")
    described.write_text(re.sub(r"(?m)^version: .*$", "version: 0.0.1", text), encoding="utf-8")
    return chart


# --- a job that trains --------------------------------------------------------------------------


def test_an_upgrade_of_the_chart_lets_a_job_train_on(
    system: System, training: Job, tmp_path: Path
) -> None:
    system.holdfast.install(_older_chart(tmp_path))
    training.wait("the job to be followed", _is_protected, WAIT_S)
    pods, operators = system.pods("training"), system.holdfast.operators()
    before = training.status()
    system.holdfast.install()
    wait_for(
        "an operator of the new version to lead",
        lambda: system.holdfast.leader() not in ("", *operators),
        WAIT_S,
    )
    after = training.wait("the step to grow", lambda s: s["step"] > before["step"], WAIT_S)
    assert system.pods("training") == pods
    assert len(pods) == 4
    assert after["epoch"] == before["epoch"]
    assert after["restarts"] == before["restarts"]


def test_a_suspended_job_keeps_its_memory_and_goes_on_where_it_was(
    system: System, training: Job
) -> None:
    training.patch({"suspend": True})
    status = training.wait("the suspension", lambda s: s.get("phase") == "Suspended", WAIT_S)
    wait_for("the pods to go", lambda: not system.pods("training"), WAIT_S)
    assert status["protectedStep"] > 0
    assert sum(reported > 0 for reported, _ in system.used_bytes().values()) >= 4
    training.patch({"suspend": False})
    resumed = training.wait("training", _is_protected, 180.0)
    assert resumed["step"] >= status["protectedStep"]
    assert resumed["restarts"] == status["restarts"]
    assert resumed["epoch"] > status["epoch"]
    wait_for(
        "the event of the resumption",
        lambda: any(
            event.reason == "Running"
            and f"in epoch {resumed['epoch']} from" in event.message
            and "from the beginning" not in event.message
            for event in training.events()
        ),
        WAIT_S,
    )


def test_evictions_take_one_pod_of_a_job_at_once(system: System, training: Job) -> None:
    """The API server counts those that run, and refuses the eviction of a second one."""
    pods, before = sorted(system.pods(training.name)), training.status()

    def allowed() -> bool:
        status: Document = system.cluster.get("pdb", training.name, "-n", TEAM)["status"]
        return bool(status.get("expectedPods") == len(pods) and status["disruptionsAllowed"] == 1)

    wait_for("an eviction to be allowed", allowed, WAIT_S)
    _evict(system, pods[0], dry_run=False)
    with pytest.raises(ClusterError, match="disruption budget"):
        _evict(system, pods[1], dry_run=True)
    training.wait(
        "the job to go on without the pod",
        lambda s: s["phase"] == "Running" and s["recoveries"] > before["recoveries"],
        180.0,
    )


def _evict(system: System, pod: str, *, dry_run: bool) -> None:
    options = {"deleteOptions": {"dryRun": ["All"]}} if dry_run else {}
    metadata = {"name": pod, "namespace": TEAM}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, **options}
    path = f"/api/v1/namespaces/{TEAM}/pods/{pod}/eviction"
    system.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def test_a_pod_is_let_in_to_its_own_job_alone(system: System, training: Job) -> None:
    cluster = system.cluster
    pod, node = training.member(0)
    process = training.rank_process(0)
    mounted = Path(f"/proc/{process}/root/{TOKEN}").read_text(encoding="utf-8").strip()
    other = system.job(_small("curious"))
    theirs = token_for(cluster, system.wait_pod("curious"), TEAM)
    assert hello(cluster, node, mounted, f"{TEAM}.training") == training.status()["epoch"]
    # A daemon without the job does not know whether Holdfast has made the job's pods.
    with pytest.raises((AccessDeniedError, UnreachableError), match=rf"pod {pod} (of|is)"):
        hello(cluster, node, mounted, f"{TEAM}.curious")
    with pytest.raises(AccessDeniedError, match="pod curious-0-1 of"):
        hello(cluster, node, theirs, f"{TEAM}.training")
    other.delete()


def test_a_deleted_job_leaves_no_object_and_no_memory(system: System, training: Job) -> None:
    nodes = [member["node"] for member in training.status()["members"]]
    before = system.used_bytes()
    assert all(reported > 0 for reported, _ in (before[node] for node in nodes))
    training.delete()

    def is_free() -> bool:
        after = system.used_bytes()
        small = (after[node][1] < before[node][1] / 10 for node in nodes)
        return all(small) and {reported for reported, _ in after.values()} == {0.0}

    try:
        wait_for("the daemons to free its memory", is_free, FREED_S)
    except ClusterError as error:
        raise ClusterError(f"{error}: {before} before, {system.used_bytes()} now") from error
    kinds = "pods,services,serviceaccounts,roles,rolebindings"
    wait_for(
        "all objects to go",
        lambda: not [name for name in system.names(kinds) if "/training" in name],
        WAIT_S,
    )


@pytest.mark.timeout(700)
def test_a_job_that_is_applied_again_begins_anew_whoever_was_away_meanwhile(
    system: System, training: Job
) -> None:
    before = training.wait("some steps", lambda s: s.get("protectedStep", 0) >= 20, 180.0)
    away, adopted = before["members"][1]["node"], _count(training, "Adopted")
    held_up = system.cluster.pod_processes(system.holdfast.daemon_on(away), NAMESPACE)
    for pid in held_up:
        os.kill(pid, signal.SIGSTOP)
    try:
        training.delete()
        training.apply()
        after = training.wait("the job to be protected", _is_protected, 240.0)
    finally:
        for pid in held_up:
            with suppress(ProcessLookupError):  # kubelet has ended one that hung for so long
                os.kill(pid, signal.SIGCONT)
    # At first it may have a member on the node whose daemon is silent, and then moves it.
    assert after["epoch"] <= 2
    assert _count(training, "Adopted") == adopted
    assert after["protectedStep"] < before["protectedStep"]
    assert away not in [member["node"] for member in after["members"]]

    def is_free() -> bool:
        with suppress(OSError):  # the daemon may be starting again
            return system.used_bytes()[away][0] == 0.0
        return False

    wait_for("the memory of the earlier job to be freed", is_free, WAIT_S)
    now = training.wait("the job to go on", lambda s: s["step"] > after["step"], WAIT_S)
    assert all(now[key] == after[key] for key in ("epoch", "restarts", "recoveries"))
    training.delete()


# --- without an operator ------------------------------------------------------------------------


def test_a_job_that_is_deleted_while_no_operator_runs_goes_with_the_next_one(
    system: System,
) -> None:
    system.job(_small("patient"))
    system.wait_taken_in("patient")
    system.wait_pod("patient")
    system.scale_operator(0)
    try:
        system.cluster.kubectl("delete", "moejob", "patient", "-n", TEAM, "--wait=false")
        metadata = system.metadata("patient")
        assert "deletionTimestamp" in metadata
        assert metadata["finalizers"] == [FINALIZER]
    finally:
        system.scale_operator(2)
    wait_for("the job to go", lambda: not system.is_there("patient"), WAIT_S)
    wait_for("its pod to go", lambda: not system.pods("patient"), WAIT_S)


@pytest.mark.timeout(500)
def test_after_the_release_is_gone_jobs_and_their_namespace_can_be_deleted(
    system: System,
) -> None:
    cluster, namespace = system.cluster, f"{TEAM}-left"
    cluster.kubectl("create", "namespace", namespace)
    for name in ("first", "second"):
        document = _small(name)
        document["metadata"]["namespace"] = namespace
        cluster.apply(document)

    def taken_in() -> bool:
        found = cluster.get("moejob", "-n", namespace)["items"]
        return all("finalizers" in job["metadata"] for job in found)

    wait_for("the jobs to be taken in", taken_in, WAIT_S)
    system.holdfast.uninstall()
    try:
        cluster.kubectl("delete", "moejob", "first", "-n", namespace, "--timeout=60s")
        # Their volumes wait for a driver, as docs/install.md says.
        cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0")
        cluster.kubectl("delete", "namespace", namespace, "--timeout=120s")
    finally:
        system.holdfast.install()
    # And the next release takes over at once.
    wait_for("a leader", lambda: system.holdfast.leader() in system.holdfast.operators(), 15.0)
    system.live_through_another("newcomer")

    def is_clean() -> bool:
        records = (each for node in cluster.nodes for each in system.holdfast.volumes_on(node))
        return namespace not in [record["pod"]["namespace"] for record in records]

    # Kubelets try again every two minutes at the latest.
    wait_for("the new drivers to clean up", is_clean, 2 * WAIT_S)


# --- jobs that do not run -----------------------------------------------------------------------

TOO_MUCH = {"requests": {"cpu": "1000"}}
NOWHERE = {
    "podAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {"matchLabels": {"app": "that-no-pod-has"}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }
}


@pytest.mark.parametrize("reason", ["WaitingForNodes", "Unschedulable"])
def test_a_job_without_room_reports_it_once_and_waits(system: System, reason: str) -> None:
    name = reason.lower()
    document = _small(name)
    pod = document["spec"]["trainer"]["template"]["spec"]
    if reason == "WaitingForNodes":
        pod["containers"][0]["resources"] = TOO_MUCH
    else:
        pod["affinity"] = NOWHERE
        pod["nodeSelector"] = {"kubernetes.io/hostname": "node1"}  # it would be moved elsewhere
    job = system.job(document)
    expected = ("False", reason)
    job.wait("the condition", lambda s: _condition(s, "Scheduled") == expected, WAIT_S)
    operator, audit = f"{NAMESPACE}:holdfast-operator", Audit(system.cluster.audit_log)
    pods, epoch, events = system.pods(name), job.status().get("epoch"), len(job.events())
    system.live_through_another(f"beside-{name}")
    assert system.pods(name) == pods
    assert len(pods) <= 1
    assert (job.status().get("epoch"), len(job.events())) == (epoch, events)
    mine = [r for r in audit.requests(operator) if r.name == name and r.namespace == TEAM]
    assert len(mine) <= 5, "it keeps asking the API server"
    assert _condition(job.status(), "Scheduled") == expected
    job.delete()


def test_a_job_of_another_manager_is_left_alone(system: System) -> None:
    system.job(_small("theirs", managedBy="example.com/other"))
    system.live_through_another("beside-theirs")
    found = system.cluster.get("moejob", "theirs", "-n", TEAM)
    assert "status" not in found
    assert "finalizers" not in found["metadata"]
    assert not system.pods("theirs")


def test_a_finished_job_goes_when_its_time_is_over(system: System) -> None:
    lent = jobs.trainer_job("x")["spec"]["trainer"]["template"]["spec"]
    lent["containers"][0] |= {"command": ["python", "-c", "pass"], "args": []}
    job = system.job(_small("brief", lent, ttlSecondsAfterFinished=6))
    wait_for("the job to go", lambda: not system.is_there("brief"), 2 * WAIT_S)
    wait_for("its end to be told", lambda: "Complete" in [e.reason for e in job.events()], WAIT_S)
    wait_for("its pod to go", lambda: not system.pods("brief"), WAIT_S)
    # Whatever belongs to the job is collected after it, in any order.
    wait_for("its service to go", lambda: "service/brief" not in system.names("service"), WAIT_S)
