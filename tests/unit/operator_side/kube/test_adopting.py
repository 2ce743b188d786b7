"""A job whose pods another controller makes, with everything around it but a cluster."""

from __future__ import annotations

from copy import deepcopy

from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import PODS

KEY = "team.moe"
JOB = job_resource(
    nprocPerNode=1,
    parallelism={"dp": 2},
    failurePolicy={"detection": {"heartbeatSeconds": 60, "missedHeartbeats": 5}},
)
JOB["spec"]["trainer"] = {"external": True}


def put_pod(cluster: SmallCluster, number: int, node: str, second: int = 0) -> None:
    """Let a pod of an indexed Job run on the node."""
    labels = {
        "holdfast.dev/job": "moe",
        "batch.kubernetes.io/job-completion-index": str(number),
    }
    running = [{"name": "trainer", "state": {"running": {}}}]
    metadata = {
        "namespace": "team",
        "name": f"train-{number}-{second}",
        "labels": labels,
        "creationTimestamp": f"2026-01-01T00:00:{second:02}Z",
        "ownerReferences": [{"kind": "Job", "uid": "another", "controller": True}],
    }
    body = {
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [{"name": "trainer"}]},
        "status": {"phase": "Running", "containerStatuses": running},
    }
    cluster.api.put(PODS, body)
    cluster.daemons[node].at_work.add(KEY)
    cluster.daemons[node].beat()


def pods_touched(cluster: SmallCluster) -> list[tuple[str, str, str]]:
    """Requests of the operator about pods."""
    return [request for request in cluster.api.requests if request[1] == PODS.plural]


def members(cluster: SmallCluster) -> dict[str, str]:
    """Pod → node, by the job's status."""
    found: Object = cluster.job(JOB)["status"]
    return {each["pod"]: each["node"] for each in found["members"] if "pod" in each}


def test_pods_of_another_controller_are_members_and_stay_its_own() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        put_pod(cluster, 0, "n2")
        await cluster.until(lambda: "waiting for pods 1" in str(cluster.job(JOB).get("status")))
        put_pod(cluster, 1, "n0")
        await cluster.runs(JOB)
        assert members(cluster) == {"train-0-0": "n2", "train-1-0": "n0"}
        membership = cluster.daemons["n2"].memberships[KEY]
        assert membership.external and [m.node for m in membership.members] == ["n2", "n0"]

        cluster.api.objects.pop((PODS.plural, "team", "train-1-0"))
        cluster.pods.remove("team", "train-1-0")
        cluster.lose_rank("n0", KEY)
        put_pod(cluster, 1, "n1", second=9)
        await cluster.until(lambda: members(cluster).get("train-1-9") == "n1")
        assert cluster.daemons["n1"].memberships[KEY].epoch == 2
        cluster.delete(JOB)
        await cluster.until(
            lambda: cluster.api.objects.get(("moetrainingjobs", "team", "moe")) is None
        )
        assert pods_touched(cluster) == []

    on_a_cluster(test)


def test_pods_of_another_controller_are_no_members_of_a_job_with_a_template() -> None:
    async def test(cluster: SmallCluster) -> None:
        job = deepcopy(job_resource(nprocPerNode=1, parallelism={"dp": 2}))
        put_pod(cluster, 0, "n2")
        cluster.apply(job)
        await cluster.runs(job)
        assert set(members(cluster)) == {"moe-0-1", "moe-1-1"}

    on_a_cluster(test)
