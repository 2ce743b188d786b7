"""The control loop of one job, with everything around it but a cluster."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType
from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_core.snapshots.generations import Generation
from holdfast_operator.cli.cluster_status import job_view
from holdfast_operator.kube.api import ApiError, Object
from holdfast_operator.kube.resources import EVENTS, JOBS, PODS
from holdfast_operator.reconciler.timestamps import seconds_of

KEY = "team.moe"
CALM = {"detection": {"heartbeatSeconds": 60, "missedHeartbeats": 5}}


def two_members(**spec: object) -> Object:
    """A job of two nodes of a rank each, whose daemons send heartbeats rarely."""
    given: dict[str, Any] = {
        "nprocPerNode": 1,
        "parallelism": {"dp": 2},
        "failurePolicy": CALM,
        **spec,
    }
    return job_resource(**given)


JOB = two_members()
FRAGILE = two_members(failurePolicy={**CALM, "maxRestarts": 0})
"""The same job, which fails with its first rank."""


def rendered(view: RenderableType) -> str:
    out = StringIO()
    Console(file=out, width=200).print(view)
    return out.getvalue()


def reasons(cluster: SmallCluster) -> set[str]:
    """Reasons of the events that were posted."""
    posted = [body for (kind, _, _), body in cluster.api.objects.items() if kind == EVENTS.plural]
    return {body["reason"] for body in posted}


def wrote_status(cluster: SmallCluster) -> int:
    return sum(verb == "update status" for verb, _, _ in cluster.api.requests)


def last_recovery(cluster: SmallCluster) -> Object:
    found: Object = cluster.job(JOB)["status"]["lastRecoveries"][-1]
    return found


def test_a_job_gets_its_pods_and_runs() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        assert cluster.api.made(PODS) == ["moe-0-1", "moe-1-1"]
        status = cluster.job(JOB)["status"]
        assert (status["epoch"], status["ready"], status["readyText"]) == (1, 2, "2/2")
        assert [m["pod"] for m in status["members"]] == ["moe-0-1", "moe-1-1"]
        assert {d.memberships[KEY].epoch for d in cluster.daemons.values() if d.memberships} == {1}

    on_a_cluster(test)


@pytest.mark.parametrize("insecure", [False, True])
def test_only_jobs_of_an_insecure_cluster_have_the_condition_insecure(insecure: bool) -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        status = cluster.job(JOB)["status"]
        found = [c for c in status["conditions"] if c["type"] == "Insecure"]
        assert status["phase"] == "Running"
        assert [(c["status"], c["reason"]) for c in found] == [("True", "IdentityIsOff")] * insecure
        assert ("anyone who reaches them can read" in str(found)) is insecure
        assert ("IdentityIsOff" in rendered(job_view(cluster.job(JOB), ()))) is insecure

    on_a_cluster(test, insecure=insecure)


def test_a_lost_rank_leads_to_one_new_epoch_with_the_same_pods() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        cluster.lose_rank(cluster.job(JOB)["status"]["members"][1]["node"], KEY)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        await cluster.runs(JOB)
        assert cluster.job(JOB)["status"]["restarts"] == 1
        assert last_recovery(cluster)["cause"].startswith("rank 1 lost")
        assert cluster.api.made(PODS) == ["moe-0-1", "moe-1-1"]

    on_a_cluster(test)


def test_a_look_without_changes_writes_no_status() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        await cluster.look_again(KEY)  # what was under way has been written
        count = wrote_status(cluster)
        for _ in range(3):
            await cluster.look_again(KEY)
        assert wrote_status(cluster) == count

    on_a_cluster(test)


def test_an_invalid_job_is_refused_until_it_is_corrected() -> None:
    wrong = two_members(parallelism={"dp": 7})
    mended = {**JOB, "metadata": {**JOB["metadata"], "generation": 4}}

    async def test(cluster: SmallCluster) -> None:
        cluster.apply(wrong)
        await cluster.until(lambda: "InvalidSpec" in reasons(cluster))
        assert "dp" in cluster.job(JOB)["status"]["problem"]
        assert cluster.api.made(PODS) == []
        cluster.apply(mended)
        await cluster.runs(JOB)
        assert "problem" not in cluster.job(JOB)["status"]

    on_a_cluster(test)


def test_a_job_whose_pods_the_cluster_refuses_gets_an_event_and_no_pods() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        cluster.api.refuse_next("create", PODS, ApiError("privileged", status=403))
        await cluster.until(lambda: "PodsRefused" in reasons(cluster))
        assert cluster.api.made(PODS) == []

    on_a_cluster(test)


def test_a_failed_request_is_repeated() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.api.refuse_next("patch", JOBS, ApiError("busy", status=500))
        cluster.apply(JOB)
        await cluster.runs(JOB)

    on_a_cluster(test)


def test_a_deleted_job_leaves_no_pods_and_no_memory() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        assert cluster.server.holders(KEY)
        cluster.delete(JOB)
        await cluster.until(lambda: not cluster.api.made(JOBS))
        assert cluster.api.made(PODS) == []
        assert not cluster.server.holders(KEY)

    on_a_cluster(test)


def test_a_restarted_operator_keeps_a_jobs_epoch_restarts_and_pods() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        cluster.lose_rank(cluster.job(JOB)["status"]["members"][0]["node"], KEY)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        await cluster.runs(JOB)
        await cluster.stop_operator()
        await cluster.start_operator()
        await cluster.look_again(KEY)
        status = cluster.job(JOB)["status"]
        assert (status["phase"], status["epoch"], status["restarts"]) == ("Running", 2, 1)
        assert cluster.api.made(PODS) == ["moe-0-1", "moe-1-1"]

    on_a_cluster(test)


def test_a_new_job_does_not_use_pods_of_an_earlier_job_of_its_name() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.runs_pods = False
        cluster.apply(JOB)
        await cluster.until(lambda: len(cluster.api.made(PODS)) == 2)
        cluster.http.send("DELETED", cluster.job(JOB))
        cluster.runs_pods = True
        reborn = {**JOB, "metadata": {**JOB["metadata"], "uid": "another"}}
        cluster.apply(reborn)
        await cluster.runs(JOB)
        assert cluster.api.made(PODS) == ["moe-0-1", "moe-0-2", "moe-1-1", "moe-1-2"]

    on_a_cluster(test)


def asking(name: str, text: str) -> Object:
    """The fragile job, with a request of a person."""
    metadata = {**FRAGILE["metadata"], "annotations": {name: text}}
    return {**FRAGILE, "metadata": metadata}


async def fails(cluster: SmallCluster) -> Object:
    """Run the fragile job until it has failed; returns its status."""
    cluster.apply(FRAGILE)
    await cluster.runs(JOB)
    cluster.protect(KEY, Generation(1, 5))
    await cluster.until(lambda: cluster.job(JOB)["status"].get("protected") == "1.5")
    cluster.lose_rank(cluster.job(JOB)["status"]["members"][1]["node"], KEY)
    await cluster.until(lambda: cluster.phase(JOB) == "Failed" and not cluster.api.made(PODS))
    found: Object = cluster.job(JOB)["status"]
    return found


@pytest.mark.parametrize("restarts", [False, True])
def test_a_failed_job_keeps_its_memory_and_goes_on_when_a_person_asks(restarts: bool) -> None:
    async def test(cluster: SmallCluster) -> None:
        status = await fails(cluster)
        ended, kept = seconds_of(status["endedAt"]), seconds_of(status["keptUntil"])
        assert ended is not None and kept == ended + 3600
        assert "snapshots are kept in memory until" in rendered(job_view(cluster.job(JOB), ()))
        assert len(cluster.server.holders(KEY)) == 2
        if restarts:
            await cluster.stop_operator()
            await cluster.start_operator()
        cluster.apply(asking("holdfast.dev/resume", "please"))
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        await cluster.runs(JOB)
        status = cluster.job(JOB)["status"]
        assert not {"keptUntil", "endedAt"} & status.keys() and status["restarts"] == 0
        assert cluster.api.made(PODS) == ["moe-0-2", "moe-1-2"]
        assert "Resumed" in reasons(cluster)

    on_a_cluster(test)


def test_what_a_failed_job_keeps_is_freed_in_time_and_then_it_cannot_go_on() -> None:
    async def test(cluster: SmallCluster) -> None:
        await fails(cluster)
        cluster.passed_s = 3700.0
        cluster.fleet.wake((KEY,))
        await cluster.until_reported(lambda: not cluster.server.holders(KEY))
        await cluster.until(lambda: "keptUntil" not in cluster.job(JOB)["status"])
        cluster.apply(asking("holdfast.dev/resume", "too late"))
        await cluster.until(lambda: {"SnapshotsFreed", "NotResumed"} <= reasons(cluster))
        status = cluster.job(JOB)["status"]
        assert (status["phase"], status["epoch"]) == ("Failed", 1)

    on_a_cluster(test)


def test_a_failed_job_that_is_deleted_frees_its_memory_at_once() -> None:
    async def test(cluster: SmallCluster) -> None:
        await fails(cluster)
        cluster.delete(FRAGILE)
        await cluster.until(lambda: not cluster.api.made(JOBS))
        assert not cluster.server.holders(KEY)

    on_a_cluster(test)
