"""Control loops of queued jobs, with a test that decides as Kueue does."""

from __future__ import annotations

from typing import Any

from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import (
    EVENTS,
    PODS,
    PRIORITIES,
    RESOURCE_FLAVORS,
    TOLERATION,
    WORKLOAD_PRIORITIES,
    WORKLOADS,
)

KEY = "team.moe"
FLAVOR = {"metadata": {"name": "h200"}, "spec": {"tolerations": [{"key": "gpu"}]}}


def queued(**spec: Any) -> Object:
    """A job of two nodes of a rank each, in a queue."""
    detection = {"detection": {"heartbeatSeconds": 60, "missedHeartbeats": 5}}
    found = job_resource(nprocPerNode=1, parallelism={"dp": 2}, failurePolicy=detection, **spec)
    found["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "a"}
    return found


JOB = queued()


def workload(cluster: SmallCluster) -> Object:
    """The job's Workload; empty without one."""
    found = [body for (kind, _, _), body in cluster.api.objects.items() if kind == WORKLOADS.plural]
    return found[0] if found else {}


def conditions(document: Object) -> dict[str, str]:
    """Status of each condition."""
    listed = (document.get("status") or {}).get("conditions") or []
    return {each["type"]: each["status"] for each in listed}


def decide(cluster: SmallCluster, admission: Object | None = None, **words: str) -> None:
    """Write conditions as Kueue does."""
    found = workload(cluster)
    kept = {each["type"]: each for each in (found.get("status") or {}).get("conditions") or []}
    for kind, status in words.items():
        now = {"reason": kind, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        kept[kind] = {"type": kind, "status": status, **now}
    written = {**(found.get("status") or {}), "conditions": list(kept.values())}
    if admission is not None:
        written["admission"] = admission
    cluster.api.put(WORKLOADS, {**found, "status": written})


def admit(cluster: SmallCluster) -> None:
    given = {"name": "main", "flavors": {"cpu": "h200"}}
    admission = {"clusterQueue": "q", "podSetAssignments": [given]}
    decide(cluster, admission, QuotaReserved="True", Admitted="True", Evicted="False")


def suspended(cluster: SmallCluster) -> tuple[str, str]:
    """Status and reason of the job's condition Suspended."""
    listed = (cluster.job(JOB).get("status") or {}).get("conditions") or []
    return next(((c["status"], c["reason"]) for c in listed if c["type"] == "Suspended"), ("", ""))


async def run_admitted(cluster: SmallCluster) -> None:
    """Apply the job, admit it, and wait until it runs."""
    cluster.api.put(RESOURCE_FLAVORS, FLAVOR)
    cluster.apply(JOB)
    await cluster.until(lambda: workload(cluster))
    admit(cluster)
    await cluster.runs(JOB)


def test_a_job_waits_for_its_admission_and_its_pods_get_what_it_was_given() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.api.put(RESOURCE_FLAVORS, FLAVOR)
        cluster.apply(JOB)
        await cluster.until(lambda: workload(cluster) and suspended(cluster) == ("True", "Queued"))
        await cluster.look_again(KEY)
        assert cluster.api.made(PODS) == []
        admit(cluster)
        await cluster.runs(JOB)
        pod = cluster.api.objects[PODS.plural, "team", "moe-0-1"]
        assert pod["spec"]["tolerations"] == [{"key": "gpu"}, TOLERATION]
        await cluster.until(lambda: conditions(workload(cluster)).get("PodsReady") == "True")
        read = ("get", RESOURCE_FLAVORS.plural, "h200")
        assert cluster.api.requests.count(read) == 1

    on_a_cluster(test, kueue=True)


def test_an_evicted_job_gives_its_quota_back_keeps_its_snapshots_and_goes_on() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        decide(cluster, Evicted="True")
        await cluster.until(lambda: suspended(cluster) == ("True", "Evicted"))
        await cluster.until(lambda: conditions(workload(cluster))["QuotaReserved"] == "False")
        assert "admission" not in workload(cluster)["status"]
        assert cluster.api.made(PODS) == []
        assert sum(KEY in daemon.memberships for daemon in cluster.daemons.values()) == 2
        admit(cluster)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        await cluster.runs(JOB)
        assert cluster.job(JOB)["status"]["restarts"] == 0

    on_a_cluster(test, kueue=True)


def test_a_failed_job_gives_its_quota_back_and_queues_up_again_when_a_person_resumes_it() -> None:
    policy = {"detection": {"heartbeatSeconds": 60, "missedHeartbeats": 5}, "maxRestarts": 0}
    fragile = queued()
    fragile["spec"]["failurePolicy"] = policy
    metadata = {**fragile["metadata"], "generation": 4}

    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        cluster.apply({**fragile, "metadata": metadata})
        await cluster.look_again(KEY)
        cluster.lose_rank(cluster.job(JOB)["status"]["members"][1]["node"], KEY)
        await cluster.until(lambda: conditions(workload(cluster)).get("Finished") == "True")
        await cluster.until(lambda: not cluster.api.made(PODS))
        first, asked = workload(cluster)["metadata"]["uid"], {"holdfast.dev/resume": "now"}
        cluster.apply({**fragile, "metadata": {**metadata, "annotations": asked}})
        await cluster.until(lambda: suspended(cluster) == ("True", "Queued"))
        await cluster.until(
            lambda: workload(cluster).get("metadata", {}).get("uid", first) != first
        )
        assert cluster.api.made(PODS) == [] and len(cluster.server.holders(KEY)) == 2
        admit(cluster)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        await cluster.runs(JOB)

    on_a_cluster(test, kueue=True)


async def restart_without_workloads(cluster: SmallCluster) -> None:
    """Start the operator again, while Workloads cannot be read."""
    await cluster.stop_operator()
    cluster.knows_workloads = False
    await cluster.start_operator()


def end_pod(cluster: SmallCluster, name: str) -> None:
    pod = cluster.api.objects[PODS.plural, "team", name]
    metadata = {**pod["metadata"], "deletionTimestamp": "2099-01-01T00:00:00Z"}
    cluster.api.put(PODS, {**pod, "metadata": metadata})


def reasons(cluster: SmallCluster) -> list[str]:
    """Reasons of the events that were posted."""
    found = [body for (kind, _, _), body in cluster.api.objects.items() if kind == EVENTS.plural]
    return [body["reason"] for body in found]


def test_a_new_operator_recovers_an_admitted_job_before_it_can_read_workloads() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        await restart_without_workloads(cluster)
        cluster.lose_rank(cluster.job(JOB)["status"]["members"][1]["node"], KEY)
        await cluster.until(lambda: cluster.job(JOB)["status"]["epoch"] == 2)
        await cluster.runs(JOB)
        await cluster.until(lambda: "KueueUnknown" in reasons(cluster))
        await cluster.look_again(KEY)
        assert reasons(cluster).count("KueueUnknown") == 1
        assert cluster.job(JOB)["status"]["recoveries"] == 1
        cluster.knows_workloads = True
        decide(cluster, Evicted="True")
        await cluster.until(lambda: suspended(cluster) == ("True", "Evicted"))

    on_a_cluster(test, kueue=True)


def test_pods_that_it_makes_until_then_go_where_the_admission_has_put_the_others() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        await restart_without_workloads(cluster)
        await cluster.until(lambda: "KueueUnknown" in reasons(cluster))
        for name in cluster.api.made(PODS):
            end_pod(cluster, name)
        await cluster.until(lambda: cluster.api.made(PODS) == ["moe-0-2", "moe-1-2"])
        pod = cluster.api.objects[PODS.plural, "team", "moe-1-2"]
        assert pod["spec"]["tolerations"] == [{"key": "gpu"}, TOLERATION]
        await cluster.runs(JOB)

    on_a_cluster(test, kueue=True)


def test_a_job_of_which_no_pod_is_left_waits_until_workloads_can_be_read() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        await cluster.stop_operator()
        cluster.knows_workloads = False
        for name in cluster.api.made(PODS):
            end_pod(cluster, name)
        await cluster.until(lambda: not cluster.api.made(PODS))
        await cluster.start_operator()
        await cluster.until(lambda: "no Workload" in cluster.job(JOB)["status"].get("problem", ""))
        running = conditions(cluster.job(JOB))["Running"]
        assert (cluster.phase(JOB), running) == ("Waiting", "Unknown")
        assert cluster.api.made(PODS) == []

    on_a_cluster(test, kueue=True)


def test_an_evicted_job_waits_while_a_new_operator_cannot_read_workloads() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        decide(cluster, Evicted="True")
        await cluster.until(lambda: conditions(workload(cluster))["QuotaReserved"] == "False")
        await restart_without_workloads(cluster)
        admit(cluster)
        await cluster.until(lambda: "no Workload" in cluster.job(JOB)["status"].get("problem", ""))
        assert (cluster.phase(JOB), conditions(cluster.job(JOB))["Running"]) == ("Waiting", "False")
        assert cluster.api.made(PODS) == []
        cluster.knows_workloads = True
        cluster.fleet.wake((KEY,))
        await cluster.runs(JOB)

    on_a_cluster(test, kueue=True)


def test_a_job_that_a_person_suspends_leaves_its_queue() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        metadata = {**JOB["metadata"], "generation": 4}
        cluster.apply({**queued(suspend=True), "metadata": metadata})
        await cluster.until(lambda: not workload(cluster))
        assert cluster.api.made(PODS) == []
        await cluster.until(lambda: suspended(cluster) == ("True", "SuspendedByUser"))

    on_a_cluster(test, kueue=True)


def test_a_queued_job_that_multikueue_manages_is_left_alone() -> None:
    async def test(cluster: SmallCluster) -> None:
        theirs = queued(managedBy="kueue.x-k8s.io/multikueue")
        theirs["metadata"] |= {"name": "theirs", "uid": "another"}
        cluster.apply(theirs)
        await run_admitted(cluster)
        assert {name for _, _, name in cluster.api.objects if "theirs" in name} == {"theirs"}
        assert "status" not in cluster.job(theirs)
        assert "finalizers" not in cluster.job(theirs)["metadata"]

    on_a_cluster(test, kueue=True)


def test_a_queue_that_is_named_later_holds_the_job_back() -> None:
    async def test(cluster: SmallCluster) -> None:
        unqueued = {**JOB, "metadata": {**JOB["metadata"], "labels": {}}}
        cluster.apply(unqueued)
        await cluster.runs(JOB)
        cluster.apply(JOB)  # a label is no new generation
        await cluster.until(lambda: suspended(cluster) == ("True", "Queued"))
        cluster.apply(unqueued)
        await cluster.runs(JOB)
        await cluster.until(lambda: not workload(cluster))

    on_a_cluster(test, kueue=True)


def test_a_queued_job_is_refused_by_an_operator_without_kueue() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.apply(JOB)
        await cluster.until(lambda: (cluster.job(JOB).get("status") or {}).get("problem"))
        problem = cluster.job(JOB)["status"]["problem"]
        assert problem.endswith("set kueue.enabled in the chart's values")
        assert cluster.api.made(PODS) == []

    on_a_cluster(test)


def test_a_person_can_suspend_a_running_job_while_kueue_is_away() -> None:
    async def test(cluster: SmallCluster) -> None:
        await run_admitted(cluster)
        cluster.knows_workloads = False
        cluster.apply({**queued(suspend=True), "metadata": {**JOB["metadata"], "generation": 4}})
        await cluster.until(lambda: suspended(cluster) == ("True", "SuspendedByUser"))
        assert cluster.api.made(PODS) == []

    on_a_cluster(test, kueue=True)


def test_a_priority_class_that_does_not_exist_is_reported() -> None:
    job = {
        **JOB,
        "metadata": {
            **JOB["metadata"],
            "labels": {**JOB["metadata"]["labels"], "kueue.x-k8s.io/priority-class": "urgent"},
        },
    }

    async def test(cluster: SmallCluster) -> None:
        def posted() -> list[Object]:
            return [b for (kind, _, _), b in cluster.api.objects.items() if kind == EVENTS.plural]

        cluster.apply(job)
        await cluster.until(lambda: [b for b in posted() if b["reason"] == "ActionFailed"])
        cluster.api.put(WORKLOAD_PRIORITIES, {"metadata": {"name": "urgent"}, "value": 7})
        cluster.fleet.wake((KEY,))
        await cluster.until(lambda: workload(cluster))
        assert workload(cluster)["spec"]["priority"] == 7

    on_a_cluster(test, kueue=True)


def test_a_write_that_came_too_late_is_decided_anew() -> None:
    async def test(cluster: SmallCluster) -> None:
        cluster.api.put(
            PRIORITIES, {"metadata": {"name": "usual"}, "value": 5, "globalDefault": True}
        )
        cluster.api.put(RESOURCE_FLAVORS, FLAVOR)
        cluster.apply(JOB)
        await cluster.until(lambda: workload(cluster))
        assert workload(cluster)["spec"]["priority"] == 5
        late = ApiError("changed meanwhile", status=409, reason="Conflict")
        cluster.api.refuse_next("patch status", WORKLOADS, late)
        admit(cluster)
        await cluster.runs(JOB)
        await cluster.until(lambda: conditions(workload(cluster)).get("PodsReady") == "True")

    on_a_cluster(test, kueue=True)
