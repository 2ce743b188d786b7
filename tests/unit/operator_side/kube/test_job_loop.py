"""The control loop of one job, with everything around it but a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console, RenderableType
from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_cli.commands.cluster_status import job_view
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
)
from holdfast_operator.kube.job.job_loop import REFUSED_S
from holdfast_operator.kube.job.starting import RETRY_S_MAX
from holdfast_operator.reconciler.observe.timestamps import seconds_of

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


def refused_pods(cluster: SmallCluster) -> str | None:
    """Reason of the condition PodsRefused; None without it."""
    found = (cluster.job(JOB).get("status") or {}).get("conditions") or []
    return next((each["reason"] for each in found if each["type"] == "PodsRefused"), None)


def shown(cluster: SmallCluster) -> str:
    """Messages of all conditions."""
    return "; ".join(each["message"] for each in cluster.job(JOB)["status"]["conditions"])


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


def test_an_eviction_does_not_count_even_if_its_ranks_deaths_are_reported_before() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        member = cluster.job(JOB)["status"]["members"][1]
        cluster.evict_unseen(member["pod"])
        cluster.lose_rank(member["node"], KEY)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        assert "EvictionByEvictionAPI" in last_recovery(cluster)["cause"]
        assert cluster.job(JOB)["status"].get("restarts", 0) == 0

    on_a_cluster(test)


def test_pods_that_cannot_be_read_again_do_not_hold_up_a_recovery() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        cluster.api.refuse_always("get", PODS, ApiError("overloaded", status=503))
        cluster.lose_rank(cluster.job(JOB)["status"]["members"][1]["node"], KEY)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        assert cluster.job(JOB)["status"]["restarts"] == 1

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


QUOTA = 'create pods: 403 pods "{name}" is forbidden: exceeded quota: team, used: memory={used}Gi'


def refuse_pods(cluster: SmallCluster, is_refused: Callable[[str, int], bool]) -> list[str]:
    """Refuse the pods of these names and attempts to be admitted, each in words of its own;
    returns the names of all that are asked for."""
    asked: list[str] = []

    def refusal(name: str) -> ApiError | None:
        asked.append(name)
        if not is_refused(name, len(asked)):
            return None
        words = QUOTA.format(name=name, used=len(asked))
        return ApiError(words, status=403, reason="Forbidden")

    cluster.api.refuse_each("create", PODS, refusal)
    return asked


def posted(cluster: SmallCluster, reason: str) -> list[str]:
    """Notes of the events with this reason."""
    found = [body for (kind, *_), body in cluster.api.objects.items() if kind == EVENTS.plural]
    return [body["note"] for body in found if body["reason"] == reason]


def test_refused_pods_are_one_condition_and_one_event_and_go_on_when_they_are_accepted() -> None:
    """A quota that has room for one of the job's two pods."""
    room = ["moe-0-1"]

    async def test(cluster: SmallCluster) -> None:
        # Attempt 0 is the one that asks whether pods would be accepted at all.
        asked = refuse_pods(cluster, lambda name, _: name not in ("moe-0-0", *room))
        cluster.apply(JOB)
        await cluster.until(lambda: refused_pods(cluster) == "Forbidden")
        assert "exceeded quota: team" in shown(cluster)
        assert "exceeded quota: team" in cluster.job(JOB)["status"]["problem"]
        for _ in range(20):
            cluster.pass_time(10.0)
            await cluster.look_again(KEY)
        assert set(asked[3:]) == {"moe-1-1"}  # a name is not used up by a refusal
        assert 6 < len(asked) < 16
        (event,) = posted(cluster, "PodsRefused")
        assert 'pods "moe-1-1" is forbidden' in event and posted(cluster, "ActionFailed") == []
        room.append("moe-1-1")
        cluster.pass_time(RETRY_S_MAX)
        await cluster.runs(JOB)
        assert refused_pods(cluster) is None
        assert cluster.api.made(PODS) == ["moe-0-1", "moe-1-1"]

    on_a_cluster(test)


@pytest.mark.parametrize("first", [True, False], ids=["all pods", "pods of members"])
@pytest.mark.parametrize("limit", ["preRunningDeadlineSeconds", "activeDeadlineSeconds"])
def test_deadlines_count_while_pods_are_refused(limit: str, first: bool) -> None:
    async def test(cluster: SmallCluster) -> None:
        refuse_pods(cluster, lambda name, _: first or not name.endswith("-0"))
        cluster.apply(two_members(**{limit: 60}))
        await cluster.until(lambda: refused_pods(cluster) is not None)
        await cluster.look_again(KEY)
        cluster.passed_s += 61.0
        cluster.fleet.wake((KEY,))
        await cluster.until(lambda: cluster.phase(JOB) == "Failed")
        assert limit in cluster.job(JOB)["status"]["problem"]

    on_a_cluster(test)


@pytest.mark.parametrize("status", [403, 429, 500])
def test_a_job_none_of_whose_pods_would_be_accepted_waits_until_they_are(status: int) -> None:
    answers = [ApiError("pod security: restricted", status=status)]

    async def test(cluster: SmallCluster) -> None:
        cluster.api.refuse_each("create", PODS, lambda name: answers[0] if answers else None)
        cluster.apply(JOB)
        await cluster.until(lambda: refused_pods(cluster) == "Refused")
        assert (cluster.phase(JOB), cluster.api.made(SERVICES)) == ("Waiting", [])
        assert "restricted" in cluster.job(JOB)["status"]["problem"]
        answers.clear()
        cluster.passed_s += REFUSED_S
        cluster.fleet.wake((KEY,))
        await cluster.runs(JOB)
        assert len(posted(cluster, "PodsRefused")) == 1

    on_a_cluster(test)


@pytest.mark.parametrize("wrong", ["spec", "template"])
def test_a_job_that_runs_is_cared_for_though_its_newest_version_is_refused(wrong: str) -> None:
    edited = two_members(**({"parallelism": {"dp": 7}} if wrong == "spec" else {}))
    edited["metadata"]["generation"] = 4
    edited["spec"]["trainer"]["template"]["spec"]["hostNetwork"] = True
    word = "InvalidSpec" if wrong == "spec" else "InvalidTemplate"

    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        cluster.api.refuse_next("create", PODS, ApiError("hostNetwork: Forbidden", status=422))
        cluster.apply(edited)
        await cluster.until(lambda: word in reasons(cluster))
        cluster.lose_rank(cluster.job(JOB)["status"]["members"][1]["node"], KEY)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        await cluster.runs(JOB)

    on_a_cluster(test)


SHARED = {
    SERVICES: "moe",
    SERVICE_ACCOUNTS: "moe-trainer",
    ROLES: "moe-trainer",
    ROLE_BINDINGS: "moe-trainer",
}


@pytest.mark.parametrize("resource", SHARED, ids=lambda resource: resource.plural)
def test_what_pods_share_is_made_again_when_it_was_deleted(resource: Resource) -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        await cluster.look_again(KEY)
        requests = len(cluster.api.requests)
        for _ in range(5):
            await cluster.look_again(KEY)
        assert [r for r in cluster.api.requests[requests:] if r[1] in _plurals()] == []
        cluster.delete_object(resource, SHARED[resource])
        await cluster.until(lambda: cluster.api.made(resource) == [SHARED[resource]])
        assert cluster.phase(JOB) == "Running" and refused_pods(cluster) is None

    on_a_cluster(test)


def test_what_ended_and_suspended_jobs_share_is_not_made_again() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.runs(JOB)
        held = {**JOB["spec"], "suspend": True}
        cluster.apply({**JOB, "metadata": {**JOB["metadata"], "generation": 4}, "spec": held})
        await cluster.until(lambda: cluster.phase(JOB) == "Suspended")
        cluster.delete_object(SERVICES, "moe")
        await cluster.look_again(KEY)
        assert cluster.api.made(SERVICES) == []

    on_a_cluster(test)


@pytest.mark.parametrize("owner", [None, {"kind": "Deployment", "name": "web", "uid": "w"}])
@pytest.mark.parametrize("resource", SHARED, ids=lambda resource: resource.plural)
def test_what_belongs_to_another_owner_is_refused_by_its_name(
    resource: Resource, owner: Object | None
) -> None:
    owners = [] if owner is None else [{**owner, "controller": True, "apiVersion": "apps/v1"}]
    name = SHARED[resource]
    metadata = {"name": name, "namespace": "team", "ownerReferences": owners}

    async def test(cluster: SmallCluster) -> None:
        cluster.api.put(resource, {"metadata": metadata})
        before = cluster.api.objects[resource.plural, "team", name]
        cluster.apply(JOB)
        await cluster.until(lambda: refused_pods(cluster) == "NameTaken")
        assert cluster.api.made(PODS) == []
        whose = "Deployment web" if owner else "somebody else: it has no controller"
        assert f"team/{name} belongs to {whose}" in shown(cluster)
        assert "or give the job another name" in shown(cluster)
        assert cluster.api.objects[resource.plural, "team", name] == before
        del cluster.api.objects[resource.plural, "team", name]
        cluster.passed_s += RETRY_S_MAX
        cluster.fleet.wake((KEY,))
        await cluster.runs(JOB)
        assert len(posted(cluster, "PodsRefused")) == 1

    on_a_cluster(test)


def _plurals() -> set[str]:
    return {resource.plural for resource in (*SHARED, PODS)}


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


@pytest.mark.parametrize(
    "status",
    [
        {"epoch": 3, "counters": {"epoch": 3, "homes": ["n8", "n9"]}},
        # Of a version that did not name the nodes there, and with counters that cannot be read.
        {"epoch": 3, "counters": {"epoch": 3}, "members": [{"index": 1}, {"index": 0}]},
        {"epoch": 3, "counters": {"epoch": "three"}, "members": [{"index": 1}, {"index": 0}]},
    ],
)
def test_a_job_whose_daemons_have_not_dialled_yet_is_not_placed_anew(status: Object) -> None:
    status = {**status, "phase": "Running"}
    for member in status.get("members", ()):
        member["node"] = ("n8", "n9")[member["index"]]

    async def test(cluster: SmallCluster) -> None:
        cluster.api.put(JOBS, {**JOB, "status": status})
        for name in ("n8", "n9"):
            cluster.cordon(name)  # their daemons are there, and have not dialled
        await cluster.until(lambda: cluster.phase(JOB) == "Waiting")
        cluster.passed_s += 3600.0
        await cluster.look_again(KEY)
        assert cluster.api.made(PODS) == []
        assert cluster.job(JOB)["status"]["counters"]["homes"] == ["n8", "n9"]
        assert "waiting for the daemon on n8, n9" in cluster.job(JOB)["status"]["problem"]
        members = tuple(
            Member(
                index=index,
                node=name,
                memory_id=f"memory of {name}",
                peer_address=f"{name}:1",
                bulk_address=f"{name}:2",
            )
            for index, name in enumerate(("n8", "n9"))
        )
        held = Membership(job=KEY, epoch=3, members=members, nproc_per_node=1, groups=((0, 1),))
        for name in ("n8", "n9"):
            cluster.add_node(name)
            cluster.daemons[name].memberships[KEY] = held
            cluster.daemons[name].beat()
        await cluster.runs(JOB)
        assert [m["node"] for m in cluster.job(JOB)["status"]["members"]] == ["n8", "n9"]

    on_a_cluster(test)


def test_a_placement_that_could_not_be_stored_is_not_published() -> None:
    """The next operator would take the job for one that was never placed."""

    async def test(cluster: SmallCluster) -> None:
        cluster.api.refuse_always("update status", JOBS, ApiError("busy", status=503))
        cluster.apply(JOB)
        for _ in range(2):
            await cluster.look_again(KEY)
        assert not any(daemon.memberships for daemon in cluster.daemons.values())
        assert cluster.api.made(PODS) == []
        cluster.api.accept("update status", JOBS)
        await cluster.runs(JOB)
        assert cluster.job(JOB)["status"]["counters"]["homes"] == ["n0", "n1"]

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
        await cluster.until(lambda: refused_pods(cluster) == "BeingCollected")
        assert "belongs to an earlier job of this name (uid job-uid)" in shown(cluster)
        assert cluster.api.made(PODS) == ["moe-0-1", "moe-1-1"]
        assert {each.plural for each in SHARED} <= set(cluster.collect_garbage())
        await cluster.runs(JOB)
        assert refused_pods(cluster) is None and "PodsRefused" not in reasons(cluster)
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


def status_of_members(cluster: SmallCluster) -> list[Object]:
    found: list[Object] = cluster.job(JOB)["status"]["members"]
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
            await cluster.until(lambda: not any(m["pod"] for m in status_of_members(cluster)))
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


def test_a_lost_rank_counts_against_its_node_which_the_next_job_avoids() -> None:
    async def test(cluster: SmallCluster) -> None:
        metadata = {"name": "holdfast-nodes", "namespace": "hf"}
        cluster.api.put(CONFIG_MAPS, {"metadata": metadata})
        cluster.apply(JOB)
        await cluster.runs(JOB)
        node = cluster.job(JOB)["status"]["members"][1]["node"]
        cluster.lose_rank(node, KEY)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        assert cluster.node_record.rating(node).text == "1 failure in 1 minute", "not written yet"
        await cluster.node_record.synchronise()
        (text,) = cluster.api.objects[CONFIG_MAPS.plural, "hf", "holdfast-nodes"]["data"].values()
        (failure,) = json.loads(text)
        assert (failure["kind"], failure["job"], failure["epoch"]) == ("LostRank", KEY, 1)
        cluster.delete(JOB)
        await cluster.until(lambda: not cluster.api.made(JOBS))
        other = two_members()
        other["metadata"] = {**other["metadata"], "name": "other", "uid": "uid-other"}
        cluster.apply(other)
        await cluster.runs(other)
        nodes = {each["node"] for each in cluster.job(other)["status"]["members"]}
        assert node not in nodes
        await cluster.until_reported(lambda: "NodeAvoided" in reasons(cluster))
        metrics = generate_latest(cluster.metrics.registry).decode()
        assert 'holdfast_operator_node_failures_total{kind="LostRank"} 1.0' in metrics
        assert "holdfast_operator_nodes_avoided_total 1.0" in metrics

    on_a_cluster(test, nodes=3)


def test_a_hang_is_counted_once_by_what_held_the_job_up() -> None:
    async def test(cluster: SmallCluster) -> None:
        job = two_members(failurePolicy={"detection": {**CALM["detection"], "hangSeconds": 600}})
        cluster.apply(job)
        await cluster.runs(job)
        for daemon in cluster.daemons.values():
            daemon.stopped.add(KEY)
        cluster.pass_time(0.0)
        await cluster.until(lambda: cluster.job(job)["status"]["epoch"] == 2)
        assert cluster.job(job)["status"]["lastHang"]["kind"] == "Stopped"
        await cluster.until_reported(lambda: "HangInspected" in reasons(cluster))
        await cluster.look_again(KEY)
        metrics = generate_latest(cluster.metrics.registry).decode()
        assert 'holdfast_operator_hangs_total{kind="Stopped"} 1.0' in metrics

    on_a_cluster(test)
