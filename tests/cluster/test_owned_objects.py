"""What clusters and other people do to a job's pods and to the objects that these share: sidecars,
quotas, taken names, deletions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import images
import jobs
import pytest
from audit import Audit
from cluster import Cluster
from holdfast_system import NAMESPACE, Holdfast, Job
from machine import ClusterError, environment, wait_for
from webhooks import SidecarWebhook

TEAM = "owned-test"
WAIT_S = 90.0
SHARED = {
    "service": "",
    "serviceaccount": "-trainer",
    "role": "-trainer",
    "rolebinding": "-trainer",
}
"""Kind → what follows the job's name in that of its object."""
UPLOAD_S = 5

Document = dict[str, Any]


class Team:
    """A namespace with jobs of one member or two, whose pods never get further than their image."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def job(self, name: str, pod: Document | None = None, **spec: Any) -> Job:
        """Apply a job."""
        found = Job(self.cluster, jobs.small_job(name, TEAM, pod, **spec))
        found.apply()
        return found

    def find(self, kind: str, name: str) -> Document:
        """An object; empty when there is none."""
        with suppress(ClusterError):
            found: Document = self.cluster.get(kind, name, "-n", TEAM)
            return found
        return {}

    def owner(self, kind: str, name: str) -> str:
        """Uid of the first owner of an object; empty when there is none."""
        owners = (self.find(kind, name).get("metadata") or {}).get("ownerReferences") or []
        return next((str(each["uid"]) for each in owners), "")

    def pods(self, job: str) -> list[str]:
        """Names of a job's pods."""
        label = ("-l", f"holdfast.dev/job={job}")
        found = self.cluster.get("pods", "-n", TEAM, *label)["items"]
        return sorted(pod["metadata"]["name"] for pod in found)

    def delete(self, kind: str, name: str) -> None:
        self.cluster.kubectl("delete", kind, name, "-n", TEAM)


@pytest.fixture(scope="module")
def team(cluster: Cluster, holdfast: Holdfast) -> Iterator[Team]:
    cluster.kubectl("create", "namespace", TEAM)
    yield Team(cluster)
    cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")
    cluster.kubectl("delete", "namespace", TEAM, "--wait=false")


def _refused(reason: str) -> Callable[[Document], bool]:
    """Whether a status shows that pods are refused for this reason."""

    def shows(status: Document) -> bool:
        found = status.get("conditions") or []
        return any(c["type"] == "PodsRefused" and c["reason"] == reason for c in found)

    return shows


def _logs(cluster: Cluster, job: str) -> str:
    variables = environment() | {"KUBECONFIG": str(cluster.kubeconfig)}
    variables["PATH"] = f"{cluster.commands}{os.pathsep}{variables['PATH']}"
    holdfast = Path(sys.executable).with_name("holdfast")
    done = subprocess.run(
        [holdfast, "logs", "-n", TEAM, job],
        env=variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    return done.stdout


LOOKED_AT = "looked-at"
TRAINER = f"""
import os, time
print("the trainer", flush=True)
while not os.path.exists("{jobs.OUTPUT}/{LOOKED_AT}"):
    time.sleep(0.1)
"""
"""Ends once the test has looked at its pod."""


def test_a_job_whose_pods_get_a_sidecar_in_front_completes_and_the_sidecar_may_end_its_work(
    team: Team,
) -> None:
    output = team.cluster.home / "shared" / TEAM
    jobs.make_folder(output)
    uploads = f"sleep {UPLOAD_S}; echo done > {jobs.OUTPUT}/uploaded; exit 0"
    script = f"trap '{uploads}' TERM; echo the sidecar; while :; do sleep 0.1; done"
    sidecar = {
        "name": "uploader",
        "image": images.TRAINER,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script],
        "volumeMounts": [{"name": "output", "mountPath": jobs.OUTPUT}],
    }
    pod = jobs.trainer_job("x")["spec"]["trainer"]["template"]["spec"]
    pod["containers"][0] |= {"command": ["python", "-c", TRAINER], "args": []}
    jobs.lend_folder(pod, output)
    pod["terminationGracePeriodSeconds"] = 60
    with SidecarWebhook(team.cluster, TEAM, sidecar):
        job = team.job("meshed", pod)
        wait_for("logs", lambda: "the trainer" in _logs(team.cluster, "meshed"), 3 * WAIT_S)
    assert "the sidecar" not in _logs(team.cluster, "meshed")
    (name,) = team.pods("meshed")
    containers = team.find("pod", name)["spec"]["containers"]
    assert [each["name"] for each in containers] == ["uploader", "trainer"]
    (output / LOOKED_AT).touch()
    job.wait("the job to complete", lambda s: s.get("phase") == "Complete", WAIT_S)
    wait_for("the sidecar to upload", (output / "uploaded").exists, WAIT_S)
    wait_for("the pod to go", lambda: not team.pods("meshed"), WAIT_S)
    job.delete()


@pytest.mark.parametrize("kind", SHARED)
def test_what_was_deleted_is_made_again(team: Team, kind: str) -> None:
    job = team.job(f"robbed-{kind}")
    name = f"{job.name}{SHARED[kind]}"
    wait_for("the pod", lambda: team.pods(job.name), WAIT_S)
    audit = Audit(team.cluster.audit_log)
    before = team.find(kind, name)["metadata"]["uid"]
    team.delete(kind, name)
    wait_for("another one", lambda: team.owner(kind, name), WAIT_S)
    assert team.find(kind, name)["metadata"]["uid"] != before
    requests = audit.requests(f"{NAMESPACE}:holdfast-operator")
    # The service has the name of its job, whose status is written whenever its pod gets on.
    mine = [r for r in requests if r.permission.resource == f"{kind}s" and r.namespace == TEAM]
    about = [r for r in mine if r.name == name]
    assert len(about) <= 2, "it asks for what its watches show"
    job.delete()


@pytest.mark.parametrize("kind", ["service", "serviceaccount"])
def test_what_belongs_to_somebody_else_is_refused_by_name_until_it_is_gone(
    team: Team, kind: str
) -> None:
    name = f"taken-{kind}{SHARED[kind]}"
    body: Document = {"apiVersion": "v1", "metadata": {"name": name, "namespace": TEAM}}
    if kind == "service":
        body |= {"kind": "Service", "spec": {"clusterIP": "None", "selector": {"app": "web"}}}
    else:
        body |= {"kind": "ServiceAccount"}
    team.cluster.apply(body)
    job = team.job(f"taken-{kind}")
    job.wait("the refusal", _refused("NameTaken"), WAIT_S)
    message = job.condition("PodsRefused")["message"]
    assert f"{body['kind']} {TEAM}/{name} belongs to somebody else" in message
    assert not team.pods(job.name) and not team.owner(kind, name)
    team.delete(kind, name)
    wait_for("the pod", lambda: team.pods(job.name), WAIT_S)
    wait_for("no refusal", lambda: not job.condition("PodsRefused"), WAIT_S)
    assert team.owner(kind, name)
    job.delete()


def test_a_job_that_is_applied_again_under_its_name_gets_objects_and_pods_of_its_own(
    team: Team,
) -> None:
    for _ in range(3):
        job = team.job("again")
        wait_for("the pod", lambda: team.pods("again"), WAIT_S)
        job.delete()
    job = team.job("again")
    uid = team.cluster.get("moejob", "again", "-n", TEAM)["metadata"]["uid"]

    def is_whole() -> bool:
        owners = {team.owner(kind, f"again{suffix}") for kind, suffix in SHARED.items()}
        return owners == {uid} and any(team.owner("pod", pod) == uid for pod in team.pods("again"))

    wait_for("a pod and objects of the last job", is_whole, WAIT_S)
    wait_for("no refusal", lambda: not job.condition("PodsRefused"), WAIT_S)
    job.delete()


def _quota(team: Team, pods: int) -> None:
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"pods": str(pods)}}}
    team.cluster.apply({**body, "metadata": {"name": "few", "namespace": TEAM}})
    wait_for(
        "the quota to be in force",
        lambda: (
            ((team.find("quota", "few").get("status") or {}).get("hard") or {}).get("pods")
            == str(pods)
        ),
        WAIT_S,
    )


@pytest.fixture
def quota_of_one(team: Team) -> Iterator[None]:
    wait_for("no pods", lambda: not team.cluster.get("pods", "-n", TEAM)["items"], WAIT_S)
    _quota(team, 1)
    yield
    team.delete("quota", "few")


TWO: Document = {"nodes": 2, "parallelism": {"dp": 2, "ep": 1}}


def test_a_quota_is_one_condition_and_one_event_and_pods_come_when_it_is_raised(
    team: Team, quota_of_one: None
) -> None:
    job, audit = team.job("short", **TWO), Audit(team.cluster.audit_log)
    job.wait("the refusal", _refused("Forbidden"), WAIT_S)
    assert "exceeded quota: few" in job.condition("PodsRefused")["message"]
    tries = [r for r in audit.requests(f"{NAMESPACE}:holdfast-operator") if r.refused]
    wait_for(
        "more tries",
        lambda: (
            len([r for r in audit.requests(f"{NAMESPACE}:holdfast-operator") if r.refused])
            >= len(tries) + 3
        ),
        WAIT_S,
    )
    events = [event for event in job.events() if "quota" in event.message]
    assert [event.reason for event in events] == ["PodsRefused"]
    assert len(team.pods("short")) == 1
    _quota(team, 2)
    wait_for("both pods", lambda: len(team.pods("short")) == 2, WAIT_S)
    assert team.pods("short") == ["short-0-1", "short-1-1"]
    wait_for("no refusal", lambda: not job.condition("PodsRefused"), WAIT_S)
    job.delete()


def test_the_deadline_of_a_job_whose_pods_are_refused_counts(
    team: Team, quota_of_one: None
) -> None:
    job = team.job("late", **TWO, preRunningDeadlineSeconds=15)
    wait_for("its end", lambda: job.status().get("phase") == "Failed", WAIT_S)
    assert "preRunningDeadlineSeconds" in job.status()["problem"]
    job.delete()


def test_a_namespace_that_becomes_restricted_refuses_pods_in_its_words(team: Team) -> None:
    label = "pod-security.kubernetes.io/enforce"
    team.cluster.kubectl("label", "namespace", TEAM, f"{label}=restricted")
    try:
        job = team.job("unsafe", preRunningDeadlineSeconds=600)
        job.wait("the refusal", _refused("Forbidden"), WAIT_S)
        message = job.condition("PodsRefused")["message"]
        assert 'violates PodSecurity "restricted' in message and not team.pods("unsafe")
    finally:
        team.cluster.kubectl("label", "namespace", TEAM, f"{label}-")
    wait_for("the pod", lambda: team.pods("unsafe"), WAIT_S)
    job.delete()
