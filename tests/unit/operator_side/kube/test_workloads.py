"""What a job asks of Kueue, what it is given, and what is written into its Workload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from samples import job_resource

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.cluster.nodes import wants_of
from holdfast_operator.kube.kueue.workloads import (
    Create,
    Delete,
    JobState,
    KueueWorkload,
    Write,
    WriteStatus,
    admitted_job,
    job_of_pod,
    kueue_priority,
    next_write,
    priority_of,
    read_workload,
    suspension_by_queue,
    workload_manifest,
)
from holdfast_operator.kube.pods.manifests import TrainerVolume, pod_manifest, template_of
from holdfast_operator.reconciler.observe.counters import Outcome

NOW, EARLIER = "2026-01-01T00:10:00Z", "2026-01-01T00:00:00Z"
RUNS = JobState(stopped=False, ready=True, outcome=None, reason="", now=NOW)
STOPPED = JobState(stopped=True, ready=False, outcome=None, reason="", now=NOW)
PREEMPTED = ("Evicted", "True", "Preempted", "to make room")
ADMITTED = (
    ("QuotaReserved", "True", "QuotaReserved", "in all-teams"),
    ("Admitted", "True", "Admitted", "admitted"),
)


def queued_job(
    labels: dict[str, str] | None = None, template: Object | None = None, **spec: Any
) -> MoETrainingJob:
    document = job_resource(template, **spec)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"} | (labels or {})
    return parse_job(document)


def workload(
    job: MoETrainingJob, *conditions: tuple[str, str, str, str], **status: Any
) -> KueueWorkload:
    raw = workload_manifest(job, {"priority": 0})
    names = ("type", "status", "reason", "message")
    listed = [
        dict(zip(names, each, strict=True)) | {"lastTransitionTime": EARLIER} for each in conditions
    ]
    metadata = {**raw["metadata"], "uid": "w", "resourceVersion": "1", "generation": 4}
    return read_workload({**raw, "metadata": metadata, "status": {"conditions": listed, **status}})


def written(write: Write | None) -> dict[str, tuple[str, str]]:
    """(status, reason) of each condition that is written."""
    assert isinstance(write, WriteStatus)
    return {each["type"]: (each["status"], each["reason"]) for each in write.status["conditions"]}


JOB = queued_job()


def test_a_workload_asks_for_all_nodes_in_the_queue_of_the_label_or_the_spec() -> None:
    found = workload_manifest(JOB, {"priority": 0})
    assert found["spec"]["queueName"] == "team"
    (pods,) = found["spec"]["podSets"]
    assert (pods["name"], pods["count"]) == ("main", 2)
    assert pods["template"] == JOB.spec.trainer.template
    assert found["metadata"]["ownerReferences"][0]["uid"] == "job-uid"
    # As Kueue names the Workloads of its own integrations: kind, name, five digits of a digest.
    assert found["metadata"]["name"] == "moetrainingjob-moe-9e440"
    by_spec = parse_job(job_resource(scheduling={"gang": "Kueue", "queue": "other"}))
    assert workload_manifest(by_spec, {})["spec"]["queueName"] == "other"


def test_a_workload_carries_the_time_limit_and_the_priority_of_its_job() -> None:
    limited = queued_job({"kueue.x-k8s.io/max-exec-time-seconds": "60"})
    assert workload_manifest(limited, {})["spec"]["maximumExecutionTimeSeconds"] == 60
    urgent = {"metadata": {"name": "urgent"}, "value": 9}
    usual = {"metadata": {"name": "usual"}, "value": 5, "globalDefault": True}
    assert kueue_priority(urgent)["priorityClassRef"]["kind"] == "WorkloadPriorityClass"
    named = priority_of(queued_job(template={"priorityClassName": "urgent"}), [usual, urgent])
    assert (named["priorityClassRef"]["kind"], named["priority"]) == ("PriorityClass", 9)
    assert priority_of(JOB, [urgent, usual])["priority"] == 5
    assert priority_of(JOB, [urgent]) == {"priority": 0}


@pytest.mark.parametrize(
    ("conditions", "checks", "reason", "message"),
    [
        ((), [], "Queued", "waits in Kueue's queue team"),
        (
            (("QuotaReserved", "False", "Pending", "couldn't assign flavors"),),
            [],
            "Queued",
            "waits in Kueue's queue team: couldn't assign flavors",
        ),
        (
            ADMITTED[:1],
            [{"name": "nodes", "state": "Pending", "message": "are coming"}],
            "Queued",
            "waits in Kueue's queue team for checks: nodes are coming",
        ),
        ((*ADMITTED, PREEMPTED), [], "Evicted", "evicted by Kueue: Preempted: to make room"),
    ],
)
def test_a_job_is_suspended_until_it_is_admitted_and_once_it_is_evicted(
    conditions: Any, checks: list[Object], reason: str, message: str
) -> None:
    found = suspension_by_queue(JOB, workload(JOB, *conditions, admissionChecks=checks))
    assert found is not None
    assert (found.reason, found.message) == (reason, message)
    assert suspension_by_queue(JOB, workload(JOB, *ADMITTED)) is None


def test_an_admission_adds_labels_and_tolerations_of_flavors_and_what_checks_ask_for() -> None:
    job = queued_job(template={"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "mine"}]})
    flavor = {
        "metadata": {"name": "h200"},
        "spec": {"nodeLabels": {"gpu": "h200"}, "tolerations": [{"key": "gpu"}, {"key": "mine"}]},
    }
    update = {"name": "main", "annotations": {"nodes": "n7"}, "nodeSelector": {"pool": "p1"}}
    found = workload(job, *ADMITTED, admissionChecks=[{"name": "c", "podSetUpdates": [update]}])
    template = template_of(admitted_job(job, found, [flavor]))
    assert template["spec"]["nodeSelector"] == {"zone": "a", "gpu": "h200", "pool": "p1"}
    assert template["spec"]["tolerations"] == [{"key": "mine"}, {"key": "gpu"}]
    assert template["metadata"]["annotations"] == {"nodes": "n7"}
    assert "gpu" not in str(job.spec.trainer.template), "the job itself is as it was"
    flavor["spec"] = {"nodeLabels": {"zone": "b"}}
    with pytest.raises(InvalidJobError, match=r"h200 sets nodeSelector zone = b, .* have a"):
        admitted_job(job, found, [flavor])


def test_a_pod_shows_where_its_admission_has_put_the_job() -> None:
    spec = {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "mine"}]}
    job, update = queued_job(template=spec), {"name": "main", "nodeSelector": {"pool": "p1"}}
    flavor = {"metadata": {"name": "h200"}, "spec": {"tolerations": [{"key": "gpu"}]}}
    found = workload(job, *ADMITTED, admissionChecks=[{"name": "c", "podSetUpdates": [update]}])
    for admitted in (admitted_job(job, found, [flavor]), job):
        pod = pod_manifest(admitted, 0, "n0", 1, TrainerVolume.CSI)
        known = job_of_pod(job, pod)
        assert wants_of(known) == wants_of(admitted)
        assert pod_manifest(known, 0, "n0", 1, TrainerVolume.CSI) == pod
    assert "gpu" not in str(job.spec.trainer.template), "the job itself is as it was"


def test_a_workload_is_made_when_the_job_shall_run_and_deleted_when_it_shall_not() -> None:
    suspended = queued_job(suspend=True)
    unqueued = parse_job(job_resource())
    known = workload(JOB, *ADMITTED)
    assert next_write(JOB, None, STOPPED) == Create()
    assert next_write(suspended, None, STOPPED) is None
    assert next_write(unqueued, None, RUNS) is None
    assert next_write(suspended, known, RUNS) is None, "its pods are still there"
    assert next_write(suspended, known, STOPPED) == Delete()
    assert next_write(unqueued, known, RUNS) == Delete()


def test_a_job_of_another_shape_gets_another_workload_once_its_pods_are_gone() -> None:
    other = queued_job(nodes=4, parallelism={"dp": 16})
    known = workload(JOB, *ADMITTED)
    assert suspension_by_queue(other, known) is not None
    assert next_write(other, known, RUNS) is None
    assert next_write(other, known, STOPPED) == Delete()


def test_a_job_changes_its_queue_only_while_it_holds_no_quota() -> None:
    moved = queued_job({"kueue.x-k8s.io/queue-name": "other"})
    assert next_write(moved, workload(JOB), STOPPED) == Delete()
    assert not isinstance(next_write(moved, workload(JOB, *ADMITTED), RUNS), Delete)
    assert suspension_by_queue(moved, workload(JOB, *ADMITTED)) is None


@pytest.mark.parametrize(("reason", "requeued"), [("Preempted", "True"), ("Deactivated", "False")])
def test_quota_is_given_back_once_the_pods_of_an_evicted_job_are_gone(
    reason: str, requeued: str
) -> None:
    evicted = ("Evicted", "True", reason, "why")
    ready = ("PodsReady", "True", "Started", "")
    found = workload(JOB, *ADMITTED, ready, evicted, admission={"clusterQueue": "q"})
    assert next_write(JOB, found, RUNS) is None
    write = next_write(JOB, found, STOPPED)
    conditions = written(write)
    assert conditions["PodsReady"] == ("False", "WaitForStart")
    assert conditions["Requeued"] == (requeued, reason)
    assert conditions["QuotaReserved"] == ("False", "Pending")
    assert conditions["Admitted"] == ("False", "NoReservation")
    assert isinstance(write, WriteStatus)
    assert write.status["admission"] is None
    assert write.status["accumulatedPastExecutionTimeSeconds"] == 600
    released = workload(JOB, ("Evicted", "True", reason, "why"))
    assert next_write(JOB, released, STOPPED) is None


def test_a_clock_behind_that_of_kueue_takes_no_time_of_the_job_away() -> None:
    found = workload(JOB, *ADMITTED, PREEMPTED, admission={"clusterQueue": "q"})
    write = next_write(JOB, found, replace(STOPPED, now="2025-12-31T00:00:00Z"))
    assert isinstance(write, WriteStatus)
    assert write.status["accumulatedPastExecutionTimeSeconds"] == 0


def test_kueue_is_told_whether_the_pods_are_ready_by_its_own_reasons() -> None:
    waits = JobState(stopped=False, ready=False, outcome=None, reason="", now=NOW)
    ready = ("PodsReady", "True", "Started", "")
    lost = ("PodsReady", "False", "WaitForRecovery", "")

    def told(state: JobState, *known: tuple[str, str, str, str]) -> tuple[str, str] | None:
        write = next_write(JOB, workload(JOB, *ADMITTED, *known), state)
        return None if write is None else written(write)["PodsReady"]

    assert told(waits) == ("False", "WaitForStart")
    assert told(RUNS) == ("True", "Started")
    assert told(RUNS, ready) is None
    assert told(waits, ready) == ("False", "WaitForRecovery")
    assert told(RUNS, lost) == ("True", "Recovered")


@pytest.mark.parametrize(("outcome", "word"), [("Complete", "Succeeded"), ("Failed", "Failed")])
def test_the_end_of_the_job_finishes_its_workload_once(outcome: str, word: str) -> None:
    ended = JobState(stopped=True, ready=False, outcome=Outcome(outcome), reason="done", now=NOW)
    write = next_write(JOB, workload(JOB, *ADMITTED), ended)
    assert written(write)["Finished"] == ("True", word)
    finished = workload(JOB, *ADMITTED, ("Finished", "True", word, "done"))
    assert next_write(JOB, finished, ended) is None
    assert next_write(JOB, None, ended) is None


def test_a_condition_that_keeps_its_status_keeps_its_time() -> None:
    reserved = ("QuotaReserved", "True", "QuotaReserved", "")
    write = next_write(JOB, workload(JOB, reserved, PREEMPTED), STOPPED)
    assert isinstance(write, WriteStatus)
    times = {each["type"]: each["lastTransitionTime"] for each in write.status["conditions"]}
    assert times == {"QuotaReserved": NOW, "Evicted": EARLIER, "Requeued": NOW}
