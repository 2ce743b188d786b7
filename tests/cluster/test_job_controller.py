"""Pods of Kubernetes' own Job controller, as `examples/indexed-job.yaml` describes them: nobody but
that controller and the kubelets starts anything again, and Holdfast gives back what was lost.

The job runs once, and loses a process, a pod and the node of rank 0. Strangers try to pass for its
pods when one is missing. What it all led to is looked at afterwards.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import images
import jobs
import pytest
from alone import train_alone
from cluster import Cluster
from holdfast_system import Holdfast
from launched import ARGUMENTS, INDEX, NODES, WAIT_S, Launched, Standing
from machine import wait_for

TEAM, OTHER_TEAM = "launched", "launched-too"
VOLUME_TOKEN = "/run/holdfast/token"
ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
GREET = f"""
import sys
from pathlib import Path
import grpc
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc

token = Path(sys.argv[1]).read_text()
stub = trainer_pb2_grpc.TrainerStub(grpc.insecure_channel("unix:/run/holdfast/sockets/daemon.sock"))
request = trainer_pb2.HelloRequest(protocol_version=codec.PROTOCOL_VERSION, job="{TEAM}.moe")
try:
    stub.Hello(request, timeout=60, metadata=(("authorization", f"Bearer {{token}}"),))
    print("OPEN")
except grpc.RpcError as error:
    print(error.code().name)
"""
"""What strangers do: greet their node's daemon for the job, with the token in a file."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]

Document = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Seen:
    """The job before a process, a pod and a node were lost, and after the last of them."""

    standings: list[Standing] = field(default_factory=list)
    strangers: dict[str, str] = field(default_factory=dict)
    """Namespace of a stranger → the daemon's answer."""
    while_missing: Document = field(default_factory=dict)
    """Status of the job when the strangers had been there, and the pod of rank 0 was not."""
    addresses: list[str] = field(default_factory=list)
    """Those of rank 0's name after its node was lost."""
    log: list[Document] = field(default_factory=list)
    """Each step that rank 0 has trained."""
    undisturbed: dict[int, str] = field(default_factory=dict)
    """Step → hash of the state after it, of a run without Holdfast in one pod."""


def _stranger(namespace: str, node: str, token: str) -> Document:
    """A pod on a node that is marked and numbered as the job's first, in whichever namespace."""
    container = {
        "name": "main",
        "image": images.TRAINER,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", GREET, token],
        "volumeMounts": [{"name": "holdfast", "mountPath": "/run/holdfast", "readOnly": True}],
    }
    volume = {"name": "holdfast", "csi": {"driver": "holdfast.dev", "readOnly": True}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger", "namespace": namespace},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [volume],
        },
    }


def _answer_to(cluster: Cluster, stranger: Document) -> str:
    """What a daemon answers to a stranger."""
    cluster.apply(stranger)
    namespace = stranger["metadata"]["namespace"]

    def ended() -> bool:
        status = cluster.get("pod", "stranger", "-n", namespace)["status"]
        return status.get("phase") in ("Succeeded", "Failed")

    wait_for(f"the stranger in {namespace} to end", ended, WAIT_S)
    return cluster.kubectl("logs", "stranger", "-n", namespace).strip()


@pytest.fixture(scope="module")
def seen(cluster: Cluster, holdfast: Holdfast) -> Iterator[Seen]:
    launched = Launched(cluster, "indexed-job.yaml", TEAM)
    jobs.make_folder(launched.folder)
    for name in (TEAM, OTHER_TEAM):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield _lose_everything(launched, holdfast)
    finally:
        for name in cluster.nodes:
            if cluster.nodes[name].first_process is None:
                cluster.boot_node(name)
                holdfast.wait_daemon(name)
        launched.delete()
        cluster.kubectl("delete", "namespace", TEAM, OTHER_TEAM, "--timeout=120s")


def _lose_everything(launched: Launched, holdfast: Holdfast) -> Seen:
    cluster, job, found = launched.cluster, launched.job, Seen()
    cluster.apply(*launched.documents)
    found.standings.append(launched.stand("the first steps", 0))
    os.kill(job.rank_process(2), signal.SIGKILL)
    found.standings.append(launched.stand("a process to be back", 1))
    pod = found.standings[-1].pods["1"]["metadata"]["name"]
    cluster.kubectl("delete", "pod", pod, "-n", TEAM, "--wait=false")
    found.standings.append(launched.stand("a pod to be back", 2))

    lost, other = found.standings[-1].on(0), found.standings[-1].on(3)
    cluster.kill_node(lost)
    marked = _stranger(OTHER_TEAM, other, VOLUME_TOKEN)
    marked["metadata"]["labels"] = {"holdfast.dev/job": "moe", INDEX: "0"}
    for stranger in (marked, _stranger(TEAM, other, ACCOUNT_TOKEN)):
        namespace = stranger["metadata"]["namespace"]
        found.strangers[namespace] = _answer_to(cluster, stranger)
    found.while_missing = job.status()
    found.standings.append(launched.stand("a node to be replaced", 3))
    found.addresses = launched.addresses("train-0")
    cluster.boot_node(lost)
    holdfast.wait_daemon(lost)
    found.log = launched.log()
    launched.delete()
    folder, steps = cluster.home / "shared" / "job-controller", str(found.log[-1]["step"])
    train_alone(
        *(cluster, "train_moe.py", folder), *("--steps", steps), *ARGUMENTS, processes=NODES
    )
    alone = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    found.undisturbed = {line["step"]: line["state"] for line in alone}
    return found


def test_every_step_has_the_bytes_of_an_undisturbed_run(seen: Seen) -> None:
    assert {line["step"] for line in seen.log} == seen.undisturbed.keys()
    assert [line for line in seen.log if line["state"] != seen.undisturbed[line["step"]]] == []


def test_no_protected_step_is_lost(seen: Seen) -> None:
    began = [(old, new) for old, new in pairwise(seen.log) if old["epoch"] != new["epoch"]]
    assert len(began) == 3
    for standing, (old, new) in zip(seen.standings[:-1], began, strict=True):
        assert standing.status["protectedStep"] < new["step"] <= old["step"] + 1


def test_state_comes_from_memory_and_that_of_a_lost_node_from_parity(seen: Seen) -> None:
    killed, deleted, lost = (each["source"] for each in seen.standings[-1].status["lastRecoveries"])
    assert killed == "local"
    assert deleted in ("local", "parity")  # where the scheduler places the next pod is its own
    assert lost == "parity"


def test_kubernetes_starts_again_what_was_lost_and_nobody_removes_a_pod(seen: Seen) -> None:
    before, killed, deleted, moved = seen.standings
    assert killed.uids == before.uids
    assert all(killed.restarts[index] > count for index, count in before.restarts.items())
    for old, new, index in ((killed, deleted, "1"), (deleted, moved, "0")):
        assert {i for i, uid in old.uids.items() if new.uids[i] != uid} == {index}
    assert moved.on(0) not in {deleted.on(index) for index in range(NODES)}


def test_the_name_of_rank_0_has_no_address_of_the_lost_node(seen: Seen) -> None:
    assert seen.addresses == [seen.standings[-1].pods["0"]["status"]["podIP"]]


def test_strangers_are_no_members_and_daemons_refuse_them(seen: Seen) -> None:
    assert seen.strangers == {OTHER_TEAM: "PERMISSION_DENIED", TEAM: "UNAUTHENTICATED"}
    assert "stranger" not in json.dumps([seen.while_missing, seen.standings[-1].status])
    assert seen.while_missing["recoveries"] == 2  # it went on waiting for pod 0
