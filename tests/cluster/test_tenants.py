"""Two teams whose namespaces enforce the Pod Security level `restricted`: one trains, the other
tries to get at its state with all that such a namespace allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import images
import jobs
import pytest
from cluster import Cluster
from holdfast_system import Holdfast, Job
from machine import ClusterError, wait_for

TEAM, OTHER_TEAM = "tenants-a", "tenants-b"
LEVEL = "pod-security.kubernetes.io/enforce"
WAIT_S = 180.0
STEPS = 100_000
"""More than the test waits for."""
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
VOLUME = {"name": "holdfast", "csi": {"driver": "holdfast.dev", "readOnly": True}}
SCRIPT = f"""
import os, sys
from pathlib import Path
import grpc
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc

print("sees", *sorted(os.listdir("/run/holdfast")))
token = Path("/run/holdfast/token").read_text()
stub = trainer_pb2_grpc.TrainerStub(grpc.insecure_channel("unix:/run/holdfast/sockets/daemon.sock"))
for job in ("{TEAM}.moe", "{OTHER_TEAM}.moe"):
    request = trainer_pb2.HelloRequest(protocol_version=codec.PROTOCOL_VERSION, job=job)
    for bearer in (token, token[:-1], ""):
        try:
            stub.Hello(request, timeout=60, metadata=(("authorization", f"Bearer {{bearer}}"),))
            print(job, "OPEN")
        except grpc.RpcError as error:
            print(job, error.code().name)
"""
"""What the other team's pod does: it has its own token, and the name of a member of the first
team's job."""

Document = dict[str, Any]


@pytest.fixture(scope="module")
def teams(cluster: Cluster, holdfast: Holdfast) -> Iterator[Cluster]:
    for team in (TEAM, OTHER_TEAM):
        metadata = {"name": team, "labels": {LEVEL: "restricted"}}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        cluster.apply(*_lend_torch(team))
    yield cluster
    cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")
    cluster.kubectl("delete", "namespace", TEAM, OTHER_TEAM, "--timeout=120s")
    cluster.kubectl("delete", "pv", TEAM, OTHER_TEAM)


def _lend_torch(team: str) -> tuple[Document, Document]:
    """This machine's packages as a volume: such a namespace has no hostPath."""
    shared: Document = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": team,
    }
    size = {"storage": "1Gi"}
    return (
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": team},
            "spec": {
                "accessModes": shared["accessModes"],
                "capacity": size,
                "hostPath": {"path": str(jobs.site_packages())},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "torch", "namespace": team},
            "spec": shared | {"resources": {"requests": size}},
        },
    )


def _confine(pod: Document) -> Document:
    """Make a pod's spec one that `restricted` allows."""
    pod["securityContext"] = POD_SECURITY
    for container in pod["containers"]:
        container["securityContext"] = CONTAINER_SECURITY
    for volume in pod["volumes"]:
        if volume["name"] == "torch":
            del volume["hostPath"]
            volume["persistentVolumeClaim"] = {"claimName": "torch", "readOnly": True}
    return pod


def _intruder(node: str) -> Document:
    """A pod of the other team on `node`, named like a member of a job."""
    container = {
        "name": "main",
        "image": images.TRAINER,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SCRIPT],
        "volumeMounts": [{"name": "holdfast", "mountPath": "/run/holdfast", "readOnly": True}],
    }
    spec: Document = {
        "nodeName": node,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [dict(VOLUME)],
    }
    jobs.lend_torch(spec)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "moe-0-1", "namespace": OTHER_TEAM},
        "spec": _confine(spec),
    }


@pytest.fixture(scope="module")
def training(teams: Cluster) -> Job:
    """A job of the first team that trains and is protected."""
    document = jobs.trainer_job(
        namespace=TEAM,
        steps=STEPS,
        arguments=jobs.PACE,
        memory="1500Mi",
        nodes=2,
        parallelism={"dp": 2, "ep": 2},
        redundancy={"type": "RAIM5", "raim5": {"groupSize": 2}},
    )
    document["spec"]["failurePolicy"]["spares"] = 0
    _confine(document["spec"]["trainer"]["template"]["spec"])
    job = Job(teams, document)
    job.apply()
    job.wait("training", lambda status: status.get("protectedStep", 0) > 0, WAIT_S)
    return job


@pytest.mark.timeout(600)
def test_a_job_trains_where_pod_security_is_restricted(training: Job) -> None:
    pod, _ = training.member(0)
    volumes = training.cluster.get("pod", pod, "-n", TEAM)["spec"]["volumes"]
    assert not [volume for volume in volumes if "hostPath" in volume]
    assert [volume["csi"]["driver"] for volume in volumes if "csi" in volume] == ["holdfast.dev"]


def test_another_team_gets_a_volume_of_its_own_and_nobody_elses_state(training: Job) -> None:
    cluster = training.cluster
    _, node = training.member(0)
    cluster.apply(_intruder(node))

    def ended() -> bool:
        found = cluster.get("pod", "moe-0-1", "-n", OTHER_TEAM)["status"]
        return found.get("phase") in ("Succeeded", "Failed")

    wait_for("the other team's pod to end", ended, WAIT_S)
    lines = cluster.kubectl("logs", "moe-0-1", "-n", OTHER_TEAM).splitlines()
    assert lines[0] == "sees sockets token"
    answers = [tuple(line.split()) for line in lines[1:]]
    assert answers[:3] == [
        (f"{TEAM}.moe", "PERMISSION_DENIED"),
        (f"{TEAM}.moe", "UNAUTHENTICATED"),
        (f"{TEAM}.moe", "UNAUTHENTICATED"),
    ]
    assert "OPEN" not in [answer for _, answer in answers]


def test_such_a_namespace_has_no_way_around_the_driver(training: Job) -> None:
    cluster = training.cluster
    pod = _intruder(training.member(0)[1])
    pod["metadata"]["name"] = "around"
    pod["spec"]["volumes"][0] = {"name": "holdfast", "hostPath": {"path": "/run/holdfast"}}
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        cluster.apply(pod)


def test_a_volume_goes_when_its_pod_has_ended(training: Job) -> None:
    cluster = training.cluster
    _, node = training.member(0)

    def teams() -> set[str]:
        found = Holdfast(cluster).volumes_on(node)
        return {record["pod"]["namespace"] for record in found} & {TEAM, OTHER_TEAM}

    wait_for("the record of its volume to go", lambda: teams() == {TEAM}, WAIT_S)
