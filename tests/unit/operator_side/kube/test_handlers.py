"""A job's life in kopf's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

from aiohttp import ClientSession
from fake_api import FakeApi
from fake_server import FakeServer
from kubernetes.aio import client
from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_operator.kube.client.api import Api, ApiError
from holdfast_operator.kube.client.resources import EVENTS, JOBS, PODS
from holdfast_operator.kube.job.finalizer import FINALIZER
from holdfast_operator.kube.job.handlers import kopf_settings

KEY = "team.moe"
JOB = job_resource(
    nprocPerNode=1,
    parallelism={"dp": 2},
    failurePolicy={"detection": {"heartbeatSeconds": 60, "missedHeartbeats": 5}},
)
THEIRS = "example.com/theirs"


def patches(cluster: SmallCluster) -> int:
    return sum(verb == "patch" for verb, _, _ in cluster.api.requests)


def test_kopf_writes_the_finalizer_into_a_job_and_nothing_else() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply({**JOB, "metadata": {**JOB["metadata"], "finalizers": [THEIRS]}})
        await cluster.runs(JOB)
        metadata = cluster.job(JOB)["metadata"]
        assert metadata["finalizers"] == [THEIRS, FINALIZER]
        assert "annotations" not in metadata
        assert patches(cluster) == 1

    on_a_cluster(test)


def test_nothing_is_done_for_a_job_before_it_has_the_finalizer() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        first = next(
            verb for verb, plural, _ in cluster.api.requests if verb not in ("get", "update status")
        )
        assert first == "patch"

    on_a_cluster(test)


def test_a_deletion_takes_two_patches_and_frees_the_memory_first() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        assert cluster.server.holders(KEY)
        cluster.delete(JOB)
        await cluster.until(lambda: not cluster.api.made(JOBS))
        assert not cluster.server.holders(KEY)
        assert cluster.api.made(PODS) == []
        assert patches(cluster) == 2

    on_a_cluster(test)


def test_the_finalizers_of_others_stay_on_a_deleted_job() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply({**JOB, "metadata": {**JOB["metadata"], "finalizers": [THEIRS]}})
        await cluster.runs(JOB)
        cluster.delete(JOB)
        await cluster.until(lambda: cluster.job(JOB)["metadata"]["finalizers"] == [THEIRS])
        assert not cluster.server.holders(KEY)

    on_a_cluster(test)


def test_an_operator_that_ends_leaves_jobs_and_their_finalizers_alone() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        await cluster.fleet.list_jobs()
        assert cluster.fleet.upgrade_requirements()
        await cluster.stop_operator()
        assert cluster.job(JOB)["metadata"]["finalizers"] == [FINALIZER]
        assert cluster.server.holders(KEY)
        assert cluster.fleet.upgrade_requirements() == []
        await cluster.start_operator()
        await cluster.look_again(KEY)
        assert patches(cluster) == 1

    on_a_cluster(test)


def test_a_job_that_was_deleted_while_no_operator_ran_is_freed_by_the_next() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        await cluster.stop_operator()
        cluster.delete(JOB)
        await cluster.start_operator()
        await cluster.until(lambda: not cluster.api.made(JOBS))
        assert not cluster.server.holders(KEY)
        assert cluster.api.made(PODS) == []

    on_a_cluster(test)


def test_the_loop_of_a_job_that_goes_without_its_finalizer_ends() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        cluster.http.send("DELETED", cluster.job(JOB))
        await cluster.until_reported(lambda: not cluster.fleet.upgrade_requirements())

    on_a_cluster(test)


def test_a_right_that_is_missing_is_in_an_event_on_the_job_until_it_is_granted() -> None:
    words = 'User "op" cannot patch resource "moetrainingjobs" in API group "holdfast.dev"'

    def notes(cluster: SmallCluster) -> list[str]:
        posted = [o for (kind, _, _), o in cluster.api.objects.items() if kind == EVENTS.plural]
        return [event["note"] for event in posted if event["reason"] == "Forbidden"]

    async def test(cluster: SmallCluster) -> None:
        cluster.api.refuse_next("patch", JOBS, ApiError(words, status=403))
        cluster.apply(JOB)
        await cluster.until(lambda: notes(cluster))
        await cluster.runs(JOB)  # the request was repeated
        [note] = notes(cluster)
        assert f"403 {words}" in note
        assert "namespaces/team/moetrainingjobs/moe" in note

    on_a_cluster(test)


def test_pauses_before_a_request_is_repeated_grow_to_a_cap_for_each_request_anew() -> None:
    pauses = kopf_settings().networking.error_backoffs
    assert isinstance(pauses, Iterable)
    for _ in range(2):
        assert list(islice(pauses, 8)) == [1, 2, 4, 8, 16, 30, 30, 30]


def test_requests_of_kopfs_session_are_counted_with_those_of_ours() -> None:
    counted: list[tuple[str, str, str]] = []

    class Counter:
        def request(self, verb: str, resource: str, code: str) -> None:
            counted.append((verb, resource, code))

    async def test() -> None:
        jobs = f"/apis/{JOBS.group}/{JOBS.version}/{JOBS.plural}"
        one = f"/apis/{JOBS.group}/{JOBS.version}/namespaces/team/{JOBS.plural}/none"
        async with (
            FakeServer(FakeApi()).serve() as address,
            client.ApiClient(client.Configuration()) as official,
            ClientSession(address, trace_configs=[Api(official, Counter()).counting()]) as session,
        ):
            for path in ("/api/v1", jobs, f"{jobs}?watch=true"):
                async with session.get(path):
                    pass
            async with session.patch(one, json=[]):
                pass

    asyncio.run(test())
    assert counted == [
        ("get", "discovery", "200"),
        ("list", "moetrainingjobs", "200"),
        ("watch", "moetrainingjobs", "200"),
        ("patch", "moetrainingjobs", "404"),
    ]
