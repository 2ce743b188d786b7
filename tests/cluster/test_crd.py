"""The resource before a real API server: what is refused, in which words, and what is filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from cluster import Cluster
from invalid_jobs import BASE, INVALID_JOBS, SMALL, InvalidJob, changed, jobs_of_two
from machine import ClusterError, wait_for

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import parse_job

ROOT = Path(__file__).resolve().parents[2]
RESOURCE = ROOT / "crds" / "holdfast.dev_moetrainingjobs.yaml"
EXAMPLE = yaml.safe_load((ROOT / "examples" / "moe-job.yaml").read_text(encoding="utf-8"))
NAMESPACE = "crd-test"
VALID = {
    "the base of the table": BASE,
    "the example": EXAMPLE,
    "little given": SMALL,
    "one node": changed(
        {"spec.nodes": 1, "spec.nprocPerNode": 8, "spec.redundancy": {"type": "None"}}
    ),
    "memory as a number": changed({"spec.snapshot.memoryPerNode": 2**30}),
    "a limit of protection as a number": changed({"spec.redundancy.bandwidth": 10**7}),
    "a limit of protection with a fraction": changed({"spec.redundancy.bandwidth": "0.01Gi"}),
    "memory with a fraction": changed({"spec.snapshot.memoryPerNode": "1.5Gi"}),
    "no rules": changed({"spec.failurePolicy.rules": []}),
    "a waiting time": changed(
        {
            "spec.failurePolicy.rules.0": {"when": "NoReplacement", "afterSeconds": 0.5}
            | {"action": "Fail"}
        }
    ),
    "a gang": changed({"spec.scheduling": {"gang": "KueuePodGroup", "queue": "team-a"}}),
    "a queue for the whole job": changed(
        {"spec.scheduling": {"gang": "Kueue", "queue": "team-a"}}
        | {"spec.managedBy": "kueue.x-k8s.io/multikueue"}
    ),
    "a gang without a queue": changed({"spec.scheduling": {"gang": "Volcano"}}),
    "deadlines": changed(
        {"spec.activeDeadlineSeconds": 60, "spec.preRunningDeadlineSeconds": 1}
        | {"spec.ttlSecondsAfterFinished": 0}
    ),
    "the longest name": changed({"metadata.name": "n" * 52}),
    "another controller": changed({"spec.managedBy": "example.com/controller"}),
    "sparse windows": changed(
        {"spec.snapshot.policy": {"type": "Sparse", "sparse": {"window": 16}}}
    ),
    "fewer nodes": changed(
        {"spec.minNodes": 2, "spec.parallelism.ep": 1, "spec.failurePolicy.joinWaitSeconds": 0}
        | {"spec.failurePolicy.rules.0": {"when": "NodeLost", "action": "Shrink"}}
    ),
    "fewer nodes with as many replicas as they can keep": changed(
        {"spec.minNodes": 3, "spec.parallelism.ep": 1}
        | {"spec.redundancy": {"type": "Replication", "replication": {"replicas": 2}}}
        | {"spec.scheduling": {"gang": "KueuePodGroup", "queue": "team-a"}}
    ),
    "more of a pod": changed(
        {"spec.trainer.template.spec.nodeSelector": {"gpu": "h200"}}
        | {"spec.trainer.template.spec.containers.0.resources": {"limits": {"cpu": "1"}}}
        | {"spec.trainer.template.metadata.labels": {"team": "a"}}
    ),
    "metadata as tools write it": changed(
        {"spec.trainer.template.metadata": {"name": "trainer", "labels": {"team": "a"}}}
    ),
}


@pytest.fixture(scope="module", autouse=True)
def resource(cluster: Cluster) -> Iterator[None]:
    """The resource, applied as a person would, and a namespace for the jobs."""
    cluster.kubectl("apply", "-f", RESOURCE)
    cluster.wait_served()
    cluster.kubectl("create", "namespace", NAMESPACE)
    yield
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def job(cluster: Cluster) -> Iterator[str]:
    """A stored job; its name."""
    cluster.kubectl("create", "-f", "-", stdin=text(BASE))
    yield BASE["metadata"]["name"]
    cluster.kubectl("delete", "moejob", BASE["metadata"]["name"], "-n", NAMESPACE)


def text(document: dict[str, Any]) -> str:
    metadata = {**document["metadata"], "namespace": NAMESPACE}
    return json.dumps({**document, "metadata": metadata})


def dry_run(cluster: Cluster, document: dict[str, Any]) -> Any:
    """The document as the API server would store it."""
    words = ("apply", "--dry-run=server", "-o", "json", "-f", "-")
    return json.loads(cluster.kubectl(*words, stdin=text(document)))


def _is_valid(cluster: Cluster, document: dict[str, Any]) -> bool:
    """Whether the API server takes the document now."""
    try:
        dry_run(cluster, document)
    except ClusterError:
        return False
    return True


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", INVALID_JOBS, ids=lambda case: case.name)
def test_an_invalid_job_is_refused_in_these_words(cluster: Cluster, case: InvalidJob) -> None:
    with pytest.raises(ClusterError) as caught:
        dry_run(cluster, case.document)
    message = str(caught.value)
    assert case.server in message
    assert case.path in message


@pytest.mark.parametrize("document", jobs_of_two(60, seed=35))
def test_the_api_server_and_parse_job_find_the_same_problems(
    cluster: Cluster, document: dict[str, Any]
) -> None:
    with pytest.raises(ClusterError) as theirs:
        dry_run(cluster, document)
    with pytest.raises(InvalidJobError) as ours:
        parse_job(document)
    server, (_, *problems) = str(theirs.value), str(ours.value).splitlines()
    for problem in problems:
        assert problem.partition(": ")[2] in server
    assert max(1, server.count("\n* ")) == len(problems), server


@pytest.mark.parametrize("document", VALID.values(), ids=VALID.keys())
def test_a_valid_job_is_the_same_to_the_api_server_and_to_a_local_run(
    cluster: Cluster, document: dict[str, Any]
) -> None:
    stored = dry_run(cluster, document)["spec"]
    ours = parse_job(document).spec
    assert stored == without_nulls(msgspec.json.decode(msgspec.json.encode(ours)))
    assert parse_job({**document, "spec": stored}).spec == ours


def test_a_null_that_tools_write_into_templates_means_nothing(cluster: Cluster) -> None:
    document = changed({"spec.trainer.template.metadata": {"creationTimestamp": None}})
    assert dry_run(cluster, document)["spec"]["trainer"]["template"].get("metadata") in ({}, None)
    parse_job(document)


def test_the_resource_of_a_newer_version_may_be_taken_back(cluster: Cluster) -> None:
    """As by `helm rollback`: jobs stay, without the fields that this version does not have."""
    newer = yaml.safe_load(RESOURCE.read_text(encoding="utf-8"))
    schema = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["later"] = {"type": "string"}
    cluster.apply(newer)
    document = changed({"spec.later": "x", "metadata.name": "from-later"})
    found = ("moejob", "from-later", "-n", NAMESPACE)
    try:
        wait_for("the field", lambda: _is_valid(cluster, document), 30)
        cluster.kubectl("create", "-f", "-", stdin=text(document))
        cluster.kubectl("apply", "-f", RESOURCE)
        wait_for("the field's end", lambda: "later" not in cluster.get(*found)["spec"], 30)
        cluster.kubectl("label", *found, "team=a")
        job = cluster.get(*found)
        assert job["metadata"]["labels"] == {"team": "a"}
        assert parse_job(job).spec == parse_job(changed({})).spec
    finally:
        cluster.kubectl("apply", "-f", RESOURCE)
        cluster.kubectl("delete", *found, "--ignore-not-found")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 8, "nprocPerNode": 1}, "spec.nodes: Forbidden: cannot be changed while"),
        ({"nodes": 8, "nprocPerNode": 1}, "spec.nprocPerNode: Forbidden: cannot be changed while"),
        ({"parallelism": {"ep": 4}}, "spec.parallelism: Forbidden: cannot be changed while"),
        ({"redundancy": {"raim5": {"groupSize": 4}}}, "spec.redundancy: Forbidden: cannot be"),
        (
            {"trainer": {"template": {"spec": {"nodeSelector": {"gpu": "h200"}}}}},
            "spec.trainer: Forbidden: cannot be changed while the job runs; set spec.suspend to",
        ),
        ({"managedBy": "example.com/other"}, "spec.managedBy: Forbidden: cannot be changed; dele"),
        (
            {"snapshot": {"interval": {"steps": "auto"}}},
            "spec.snapshot.interval: Forbidden: cannot be changed while the job runs; set",
        ),
        (
            {"snapshot": {"interval": {"nodeMtbfDays": 7}}},
            "spec.snapshot.interval: Forbidden: cannot be changed while",
        ),
        (
            {"snapshot": {"policy": {"type": "PartialExperts"}}},
            "spec.snapshot.policy: Forbidden: cannot be changed while",
        ),
        (
            {"snapshot": {"compareReplicasEvery": 1}},
            "spec.snapshot.compareReplicasEvery: Forbidden: cannot be changed while",
        ),
        (
            {"snapshot": {"storeComputeWeights": False}},
            "spec.snapshot.storeComputeWeights: Forbidden: cannot be changed while",
        ),
        (
            {"scheduling": {"gang": "Volcano"}},
            "spec.scheduling.gang: Forbidden: cannot be changed while",
        ),
    ],
)
def test_what_all_members_agreed_on_stays_while_they_run(
    cluster: Cluster, job: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        patch(cluster, job, change)


def test_the_rest_can_be_changed_while_the_job_runs(cluster: Cluster, job: str) -> None:
    patch(cluster, job, {"failurePolicy": {"spares": 2}, "activeDeadlineSeconds": 60})
    patch(cluster, job, {"failurePolicy": {"keepFailedSeconds": 60}})
    patch(cluster, job, {"scheduling": {"gang": "Kueue", "queue": "team-a"}})
    patch(cluster, job, {"snapshot": {"slots": 2}, "scheduling": {"gang": "None", "queue": None}})
    patch(cluster, job, {"snapshot": {"memoryPerNode": "2Gi"}, "suspend": True})
    patch(cluster, job, {"snapshot": {"interval": {"steps": "auto"}}})


def test_a_suspended_job_can_change_shape_but_not_its_manager(cluster: Cluster, job: str) -> None:
    patch(cluster, job, {"suspend": True})
    with pytest.raises(ClusterError, match=r"spec\.managedBy: Forbidden: cannot be changed"):
        patch(cluster, job, {"managedBy": "example.com/other"})
    patch(cluster, job, {"nodes": 8, "nprocPerNode": 1, "redundancy": {"raim5": None}})
    patch(cluster, job, {"suspend": False})
    with pytest.raises(ClusterError, match=r"spec\.nodes: Forbidden"):
        patch(cluster, job, {"nodes": 4, "nprocPerNode": 2})


def test_scaling_alone_is_refused_with_the_reason(cluster: Cluster, job: str) -> None:
    patch(cluster, job, {"suspend": True})
    with pytest.raises(ClusterError, match=r"dp·tp·pp = 8, but nodes·nprocPerNode = 5·2 = 10"):
        cluster.kubectl("scale", "moejob", job, "-n", NAMESPACE, "--replicas=5")


def test_the_status_is_a_subresource_with_columns_and_a_scale(cluster: Cluster, job: str) -> None:
    status = {
        "phase": "Running",
        "readyText": "8/8",
        "strength": {"active": 3, "desired": 4, "minimum": 2},
        "step": 120,
        "protectedStep": 118,
        "restarts": 3,
        "nodesReady": 4,
        "selector": f"holdfast.dev/job={job}",
        "counters": {"anything": [1, {"b": None}]},
    }
    where = ("-n", NAMESPACE, "--type=merge", "-p", json.dumps({"status": status}))
    cluster.kubectl("patch", "moejob", job, *where)
    assert "status" not in cluster.get("moejob", job, "-n", NAMESPACE)
    cluster.kubectl("patch", "moejob", job, "--subresource=status", *where)
    assert cluster.get("moejob", job, "-n", NAMESPACE)["status"]["counters"]["anything"][0] == 1
    header, row = cluster.kubectl("get", "moejob", job, "-n", NAMESPACE).splitlines()
    assert header.split() == [
        "NAME",
        "STATE",
        "READY",
        "ACTIVE",
        "DESIRED",
        "STEP",
        "PROTECTED",
        "RESTARTS",
        "AGE",
    ]
    assert row.split()[:-1] == [job, "Running", "8/8", "3", "4", "120", "118", "3"]
    path = f"/apis/holdfast.dev/v1alpha1/namespaces/{NAMESPACE}/moetrainingjobs/{job}/scale"
    scale = json.loads(cluster.kubectl("get", "--raw", path))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (4, 4)
    assert scale["status"]["selector"] == f"holdfast.dev/job={job}"
    assert f"moetrainingjob.holdfast.dev/{job}" in cluster.kubectl(
        "get", "all", "-n", NAMESPACE, "-o", "name"
    )


def test_a_status_that_is_none_of_ours_is_refused(cluster: Cluster, job: str) -> None:
    message = 'supported values: "Suspended", "Waiting", "Starting", "Running"'
    with pytest.raises(ClusterError, match=message):
        cluster.kubectl(
            *("patch", "moejob", job, "-n", NAMESPACE, "--subresource=status", "--type=merge"),
            *("-p", json.dumps({"status": {"phase": "Sleeping"}})),
        )


def test_the_resource_explains_itself(cluster: Cluster) -> None:
    text = cluster.kubectl("explain", "moejob.spec.failurePolicy.rules.when")
    assert "ExitCode: a process exits with one of `values`" in text


def patch(cluster: Cluster, name: str, spec: dict[str, Any]) -> None:
    words = ("patch", "moejob", name, "-n", NAMESPACE, "--type=merge")
    cluster.kubectl(*words, "-p", json.dumps({"spec": spec}))
