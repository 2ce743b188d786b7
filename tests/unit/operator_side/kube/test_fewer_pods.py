"""A job that goes on with fewer members, and grows again: its pods, its status and the metrics."""

from __future__ import annotations

from typing import Any

from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_core.snapshots.generations import Generation
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import EVENTS, PODS
from holdfast_operator.kube.cluster.candidates import SORTED_S
from holdfast_operator.kube.pods.pods import read_pod

KEY = "team.moe"


def three_members() -> Object:
    """A job of three nodes that goes on with two, and grows at the first opportunity."""
    given: dict[str, Any] = {
        "nodes": 3,
        "minNodes": 2,
        "nprocPerNode": 1,
        "parallelism": {"dp": 3},
        "failurePolicy": {
            "detection": {"heartbeatSeconds": 60, "missedHeartbeats": 5},
            "joinWaitSeconds": 0,
        },
    }
    return job_resource(**given)


JOB = three_members()


def status(cluster: SmallCluster) -> Object:
    found: Object = cluster.job(JOB)["status"]
    return found


def full_strength(cluster: SmallCluster) -> tuple[str, str]:
    """(status, message) of the condition."""
    found = {each["type"]: each for each in status(cluster)["conditions"]}["FullStrength"]
    return found["status"], found["message"]


def uids(cluster: SmallCluster) -> dict[str, str]:
    """Name → uid of each pod."""
    objects = cluster.api.objects.items()
    pods = [body for (kind, _, _), body in objects if kind == PODS.plural and read_pod(body)]
    return {body["metadata"]["name"]: body["metadata"]["uid"] for body in pods}


def notes(cluster: SmallCluster, reason: str) -> list[str]:
    posted = [body for (kind, _, _), body in cluster.api.objects.items() if kind == EVENTS.plural]
    return [body["note"] for body in posted if body["reason"] == reason]


def gauges(cluster: SmallCluster) -> dict[str, float | None]:
    cluster.fleet.adjust()
    names = (
        "members_active",
        "members_desired",
        "members_minimum",
        "jobs_short",
        "members_joining",
    )
    read = cluster.metrics.registry.get_sample_value
    return {name: read(f"holdfast_operator_{name}") for name in names}


async def run(cluster: SmallCluster) -> None:
    cluster.apply(JOB)
    await cluster.runs(JOB)


async def shrink(cluster: SmallCluster) -> None:
    """Take the node of member 2 away from the job, which runs; there is no other."""
    cluster.cordon(status(cluster)["members"][2]["node"])
    await cluster.api.delete(PODS, "team", "moe-2-1")
    await cluster.until(lambda: status(cluster)["epoch"] == 2)
    await cluster.runs(JOB)


def test_a_job_that_shrinks_keeps_the_pods_of_the_members_that_are_left() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run(cluster)
        before = uids(cluster)
        assert status(cluster)["strength"] == {"active": 3, "desired": 3, "minimum": 2}
        assert full_strength(cluster)[0] == "True"
        await shrink(cluster)
        assert uids(cluster) == {name: before[name] for name in ("moe-0-1", "moe-1-1")}
        assert [member["index"] for member in status(cluster)["members"]] == [0, 1]
        assert (status(cluster)["readyText"], status(cluster)["nodesReady"]) == ("2/3", 2)
        assert status(cluster)["strength"] == {"active": 2, "desired": 3, "minimum": 2}
        assert "2 of 3 members go on" in notes(cluster, "Recovering")[0]

    on_a_cluster(test)


def test_a_deleted_pod_is_made_again_before_its_member_joins() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run(cluster)
        before, home = uids(cluster), status(cluster)["members"][2]["node"]
        cluster.runs_pods = False
        await cluster.api.delete(PODS, "team", "moe-2-1")
        await cluster.until(lambda: status(cluster)["epoch"] == 2)
        await cluster.runs(JOB)
        await cluster.until(lambda: "moe-2-2" in uids(cluster))
        assert (
            uids(cluster).items() >= {name: before[name] for name in ("moe-0-1", "moe-1-1")}.items()
        )
        cluster.protect(KEY, Generation(2, 5))
        starting = {"index": 2, "node": home, "pod": "moe-2-2", "state": "starting"}
        await cluster.until(lambda: status(cluster)["joining"] == [starting])
        await cluster.look_again(KEY)
        assert status(cluster)["strength"] == {
            **{"active": 2, "desired": 3, "minimum": 2, "joining": 1}
        }
        assert status(cluster)["joining"] == [starting]
        assert f"member 2 gets ready on {home}" in full_strength(cluster)[1]
        assert gauges(cluster)["members_joining"] == 1
        cluster.run_pod("moe-2-2")
        await cluster.until(lambda: status(cluster)["joining"][0]["state"] == "ready")
        assert status(cluster)["epoch"] == 2
        cluster.protect(KEY, Generation(2, 6))
        cluster.fleet.wake(())
        await cluster.until(lambda: status(cluster)["epoch"] == 3)
        await cluster.runs(JOB)
        assert uids(cluster).keys() == {"moe-0-1", "moe-1-1", "moe-2-2"}
        assert "joining" not in status(cluster)
        assert status(cluster)["strength"] == {"active": 3, "desired": 3, "minimum": 2}
        assert (status(cluster)["recoveries"], status(cluster)["restarts"]) == (1, 1)

    on_a_cluster(test)


def test_an_operator_that_starts_again_keeps_the_pod_that_gets_ready() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run(cluster)
        cluster.runs_pods = False
        await cluster.api.delete(PODS, "team", "moe-2-1")
        await cluster.until(lambda: "moe-2-2" in uids(cluster))
        before = uids(cluster)
        await cluster.stop_operator()
        await cluster.start_operator()
        await cluster.runs(JOB)
        cluster.run_pod("moe-2-2")
        cluster.protect(KEY, Generation(2, 5))
        cluster.fleet.wake(())
        await cluster.until(lambda: status(cluster)["epoch"] == 3)
        await cluster.runs(JOB)
        assert uids(cluster) == before

    on_a_cluster(test)


def test_a_job_that_shrank_says_who_is_missing_and_counts_as_short() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run(cluster)
        await shrink(cluster)
        assert full_strength(cluster) == (
            "False",
            "2 of 3 members since epoch 2, and at least 2 are needed: members [2] are missing; "
            "no node is free for them: repair a node, or add one",
        )
        short = {"members_active": 2, "members_desired": 3, "members_minimum": 2, "jobs_short": 1}
        assert gauges(cluster) == {**short, "members_joining": 0}
        of_job = {"namespace": "team", "moejob": "moe"}
        read = cluster.metrics.registry.get_sample_value
        assert read("holdfast_operator_job_members_missing", of_job) == 1
        assert read("holdfast_operator_job_recoveries", of_job) == 1

    on_a_cluster(test)


def test_a_member_that_joins_gets_a_pod_on_the_node_that_came() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run(cluster)
        await shrink(cluster)
        before = uids(cluster)
        cluster.add_node("new")
        await cluster.until_reported(lambda: "new" in cluster.server.nodes())
        cluster.passed_s = 2 * SORTED_S
        cluster.fleet.wake(())
        await cluster.until(lambda: "joining" in status(cluster))
        await cluster.until(lambda: status(cluster)["joining"][0]["state"] == "ready")
        cluster.protect(KEY, Generation(2, 5))
        cluster.fleet.wake(())
        await cluster.until(lambda: status(cluster)["epoch"] == 3)
        await cluster.runs(JOB)
        after = uids(cluster)
        assert after.keys() - before.keys() == {"moe-2-2"}
        assert before.items() <= after.items()
        member = status(cluster)["members"][2]
        assert (member["index"], member["node"], member["pod"]) == (2, "new", "moe-2-2")
        assert notes(cluster, "Joined") == [
            "new joins as member 2; 3 of 3 members in epoch 3",
        ]
        assert full_strength(cluster)[0] == "True"
        assert gauges(cluster)["jobs_short"] == 0

    on_a_cluster(test)


def test_a_job_that_waits_for_its_first_nodes_or_is_suspended_does_not_count_as_short() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.until(lambda: cluster.phase(JOB) == "Waiting")
        assert gauges(cluster)["jobs_short"] == 0
        cluster.add_node("n2")
        await cluster.runs(JOB)
        await shrink(cluster)
        assert gauges(cluster)["jobs_short"] == 1
        resting = {**JOB, "spec": {**JOB["spec"], "suspend": True}}
        resting["metadata"] = {**JOB["metadata"], "generation": 4}
        cluster.apply(resting)
        await cluster.until(lambda: cluster.phase(JOB) == "Suspended")
        assert gauges(cluster)["jobs_short"] == 0

    on_a_cluster(test, nodes=2)
