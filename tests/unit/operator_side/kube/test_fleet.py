"""Which jobs have a control loop, what wakes them, and what is kept in order for all of them."""

from __future__ import annotations

from typing import Any

import pytest
from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.pacing import HEARTBEAT_S_MAX, HEARTBEAT_S_MIN
from holdfast_operator.kube.client.resources import JOBS, PODS
from holdfast_operator.kube.job.fleet import ORPHAN_S
from holdfast_operator.reconciler.observe.views import Condition, ConditionType


def job(name: str, heartbeat_s: float = 60.0, **spec: object) -> Object:
    """A job of one member, with a uid of its own."""
    detection = {"heartbeatSeconds": heartbeat_s, "missedHeartbeats": 5}
    given: dict[str, Any] = {
        "nodes": 1,
        "nprocPerNode": 1,
        "parallelism": {"dp": 1},
        "redundancy": {"type": "None"},
        "failurePolicy": {"detection": detection},
        **spec,
    }
    found = job_resource(**given)
    found["metadata"] |= {"name": name, "uid": f"uid of {name}"}
    return found


def gauge(cluster: SmallCluster, name: str, **labels: str) -> float | None:
    return cluster.metrics.registry.get_sample_value(f"holdfast_operator_{name}", labels)


def holding(name: str, node: str) -> Membership:
    """What the node's daemon kept of a job of one member."""
    member = Member(
        index=0, node=node, memory_id=f"memory of {node}", peer_address="a:1", bulk_address="a:2"
    )
    return Membership(job=name, epoch=1, members=(member,), nproc_per_node=1, groups=((0,),))


def test_each_job_has_its_own_loop_and_pods() -> None:
    async def test(cluster: SmallCluster) -> None:
        jobs = [job("a"), job("b")]
        for each in jobs:
            cluster.apply(each)
        for each in jobs:
            await cluster.runs(each)
        assert cluster.api.made(PODS) == ["a-0-1", "b-0-1"]
        cluster.fleet.adjust()
        assert gauge(cluster, "jobs", phase="Running") == 2
        first = {"namespace": jobs[0]["metadata"]["namespace"], "moejob": "a"}
        assert gauge(cluster, "job_phase", **first, phase="Running") == 1
        assert gauge(cluster, "job_phase", **first, phase="Starting") is None
        assert gauge(cluster, "job_recoveries", **first) == 0
        assert gauge(cluster, "job_members_missing", **first) == 0
        assert gauge(cluster, "job_unprotected", **first) == 0
        refusing = next(each for each in cluster.daemons.values() if "team.a" in each.at_work)
        refusing.refused["team.a"] = "no room for snapshots"
        refusing.beat()

        def refused() -> bool:
            cluster.fleet.adjust()
            return gauge(cluster, "job_unprotected", **first) == 1

        await cluster.until(refused)
        assert gauge(cluster, "job_phase", **first, phase="Running") == 1
        second = {**first, "moejob": "b"}
        assert gauge(cluster, "job_unprotected", **second) == 0
        assert (gauge(cluster, "ranks_desired"), gauge(cluster, "ranks_ready")) == (2, 2)
        assert gauge(cluster, "daemons_connected") == 3

    on_a_cluster(test)


def test_a_job_that_another_controller_manages_is_left_alone() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(job("theirs", managedBy="example.com/other"))
        cluster.apply(job("ours"))
        await cluster.runs(job("ours"))
        assert cluster.api.made(PODS) == ["ours-0-1"]
        assert "status" not in cluster.job(job("theirs"))

    on_a_cluster(test)


def test_a_job_that_takes_the_name_of_another_gets_a_loop_of_its_own() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.runs_pods = False
        cluster.apply(job("a"))
        await cluster.until(lambda: cluster.api.made(PODS) == ["a-0-1"])
        cluster.runs_pods = True
        reborn = job("a")
        reborn["metadata"]["uid"] = "another"
        cluster.apply(reborn)
        await cluster.until(lambda: "BeingCollected" in str(cluster.job(reborn)["status"]))
        cluster.collect_garbage()
        await cluster.runs(reborn)
        assert cluster.api.made(PODS) == ["a-0-1", "a-0-2"]

    on_a_cluster(test)


@pytest.mark.parametrize(
    ("wanted_s", "asked_s"),
    [
        ((), HEARTBEAT_S_MAX),
        ((0.5, 0.7), 0.5),
        ((30.0,), HEARTBEAT_S_MAX),
        ((0.1,), HEARTBEAT_S_MIN),
    ],
)
def test_heartbeats_are_as_frequent_as_the_most_demanding_job_wants(
    wanted_s: tuple[float, ...], asked_s: float
) -> None:
    async def test(cluster: SmallCluster) -> None:
        for number, heartbeat_s in enumerate(wanted_s):
            each = job(f"job-{number}", heartbeat_s)
            cluster.apply(each)
            await cluster.until(lambda: cluster.phase(each))  # noqa: B023 - awaited in its turn
        cluster.fleet.adjust()
        assert cluster.server.heartbeat_s == asked_s

    on_a_cluster(test)


def test_news_of_no_job_in_particular_wakes_those_that_wait() -> None:
    async def test(cluster: SmallCluster) -> None:
        both = job("two", nodes=2, parallelism={"dp": 2}, redundancy={"type": "RAIM5"})
        cluster.apply(both)
        await cluster.until(lambda: cluster.phase(both) == "Waiting")
        assert cluster.api.made(PODS) == []
        cluster.add_node("n1")
        await cluster.runs(both)

    on_a_cluster(test, nodes=1)


def test_memory_of_a_job_that_is_gone_is_freed_and_that_of_one_that_exists_is_not() -> None:
    async def test(cluster: SmallCluster) -> None:
        theirs = job("there", managedBy="example.com/other")
        cluster.api.put(JOBS, theirs)
        for name, node in (("team.gone", "n0"), ("team.there", "n1")):
            cluster.daemons[node].memberships[name] = holding(name, node)
            cluster.daemons[node].beat()
        await cluster.until_reported(lambda: len(cluster.server.held_jobs()) == 2)
        await cluster.fleet.free_orphans()
        assert not cluster.api.requests  # its job may be about to be seen
        cluster.passed_s = ORPHAN_S
        await cluster.fleet.free_orphans()
        await cluster.until_reported(lambda: cluster.server.held_jobs() == {"team.there"})

    on_a_cluster(test)


def test_what_a_job_takes_of_its_nodes_is_known_while_it_takes_it() -> None:
    asks = {
        "containers": [{"name": "t", "command": ["x"], "resources": {"requests": {"cpu": "3"}}}]
    }

    async def test(cluster: SmallCluster) -> None:
        busy = job_with(asks, "busy")
        cluster.apply(busy)
        await cluster.runs(busy)
        assert dict(cluster.fleet.requests_of("team.busy"))["cpu"] == 3.0
        assert cluster.fleet.requests_of("team.other") == ()
        idle = job_with(asks, "idle", suspend=True)
        cluster.apply(idle)
        await cluster.until(lambda: cluster.phase(idle) == "Suspended")
        assert cluster.fleet.requests_of("team.idle") == ()

    on_a_cluster(test)


def job_with(template: Object, name: str, **spec: object) -> Object:
    """A job with another pod."""
    found = job(name, **spec)  # type: ignore[arg-type]
    found["spec"]["trainer"]["template"]["spec"] |= template
    return found


# --- while daemons are renewed --------------------------------------------------------------------


def test_daemons_are_asked_for_a_jobs_pace_before_it_is_looked_at_for_the_first_time() -> None:
    """Else they would seem silent to a new operator, until it next keeps the fleet in order."""

    async def test(cluster: SmallCluster) -> None:
        cluster.apply(job("a", heartbeat_s=0.3))
        await cluster.until(lambda: cluster.phase(job("a")))
        assert cluster.server.heartbeat_s == 0.3
        cluster.apply(job("b", heartbeat_s=0.6))
        await cluster.until(lambda: cluster.phase(job("b")))
        assert cluster.server.heartbeat_s == 0.3

    on_a_cluster(test)


def test_every_job_with_members_counts_when_daemons_are_replaced() -> None:
    async def test(cluster: SmallCluster) -> None:
        first = job("a", nodes=2, parallelism={"dp": 2}, redundancy={"raim5": {"groupSize": 2}})
        cluster.apply(first)
        await cluster.runs(first)
        await cluster.fleet.list_jobs()
        stands = cluster.fleet.upgrade_requirements()
        assert stands is not None
        (stand,) = stands
        assert stand.key == "team.a"
        members = cluster.job(first)["status"]["members"]
        assert stand.groups == (tuple(member["node"] for member in members),)
        assert stand.hold == ""

    on_a_cluster(test)


def test_the_daemons_of_a_job_are_left_alone_until_its_members_are_known_again() -> None:
    async def test(cluster: SmallCluster) -> None:
        unconnected = {
            **job("a"),
            "status": {"members": [{"index": 0, "node": "far", "pod": "a-0-1"}]},
        }
        cluster.api.put(JOBS, unconnected)
        await cluster.fleet.list_jobs()
        await cluster.until_reported(cluster.fleet.upgrade_requirements)
        stands = cluster.fleet.upgrade_requirements()
        assert stands is not None
        (stand,) = stands
        assert stand.groups == (("far",),)
        assert stand.hold == "its daemons have not connected yet"

    on_a_cluster(test)


def test_nothing_is_known_of_daemons_before_every_listed_job_was_looked_at() -> None:
    async def test(cluster: SmallCluster) -> None:
        fleet = cluster.fleet
        assert fleet.upgrade_requirements() is None  # no list yet
        cluster.apply(job("a"))
        cluster.api.refuse_next("list", JOBS, ApiError("busy", status=503))
        await fleet.list_jobs()
        assert fleet.upgrade_requirements() is None  # the list failed
        await cluster.runs(job("a"))
        cluster.api.objects[(JOBS.plural, "team", "late")] = {  # kopf has not come to it yet
            "metadata": {"namespace": "team", "name": "late", "uid": "late", "resourceVersion": "1"}
        }
        await fleet.list_jobs()
        assert fleet.upgrade_requirements() is None  # one of them was not looked at
        del cluster.api.objects[(JOBS.plural, "team", "late")]
        await fleet.list_jobs()
        assert [stand.key for stand in fleet.upgrade_requirements() or ()] == ["team.a"]

    on_a_cluster(test)


def test_a_job_being_deleted_and_one_of_another_manager_are_not_waited_for() -> None:
    async def test(cluster: SmallCluster) -> None:
        for name, metadata, spec in (
            ("leaving", {"deletionTimestamp": "2099-01-01T00:00:00Z"}, {}),
            ("other", {}, {"managedBy": "kueue.x-k8s.io/multikueue"}),
        ):
            cluster.api.objects[(JOBS.plural, "team", name)] = {
                "metadata": {"namespace": "team", "name": name, "uid": name, **metadata},
                "spec": spec,
            }
        await cluster.fleet.list_jobs()
        assert cluster.fleet.upgrade_requirements() == []

    on_a_cluster(test)


def test_a_job_has_a_condition_while_there_are_older_daemons() -> None:
    async def test(cluster: SmallCluster) -> None:
        def shown() -> list[str]:
            found = cluster.job(job("a")).get("status") or {}
            return [each["type"] for each in found.get("conditions", ())]

        cluster.outdated = Condition(
            type=ConditionType.DAEMONS_OUTDATED, status=True, reason="BeingRenewed"
        )
        cluster.apply(job("a"))
        await cluster.runs(job("a"))
        assert "DaemonsOutdated" in shown()
        cluster.outdated = None
        cluster.fleet.wake(("team.a",))
        await cluster.until(lambda: "DaemonsOutdated" not in shown())

    on_a_cluster(test)
