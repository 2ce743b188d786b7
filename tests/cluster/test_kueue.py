"""Jobs in a queue of the real Kueue, with real pods: each waits for its quota, starts when it is
there, is preempted, goes on from its snapshots in memory, and gives its quota back at its end.

The jobs go through it once; what it all led to is looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jobs
import pytest
from cluster import Cluster
from controllers import KUEUE, Controller
from holdfast_system import Holdfast, Job
from machine import wait_for

TEAM = "queued"
LABEL, LABELLED = "queued-test", ("node1", "node2", "node3", "node4")
WAIT_S = 180.0
STEPS, URGENT_STEPS = 100_000, 100
"""More than the test waits for, and few enough to end while it does."""
MODEL = ("--seq", "32", "--dim", "32", "--layers", "1", "--experts", "8")
TOO_LITTLE, ENOUGH = "350m", "450m"
"""Quotas of processors. A job's four pods of 100m have room in the second, and two jobs in none."""
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A job and its Workload at one moment."""

    job: Document
    workload: Document
    """Empty when there is none."""
    pods: list[Document]

    @property
    def status(self) -> Document:
        found: Document = self.job.get("status") or {}
        return found

    def condition(self, kind: str) -> Document:
        """Of the job."""
        return _condition(self.status, kind)

    def of_workload(self, kind: str) -> tuple[str, str]:
        """(status, reason) of a condition of the Workload; empty without it."""
        found = _condition(self.workload.get("status") or {}, kind)
        return found.get("status", ""), found.get("reason", "")


def _condition(status: Document, kind: str) -> Document:
    found = status.get("conditions") or ()
    return next((each for each in found if each["type"] == kind), {})


@dataclass(kw_only=True, slots=True)
class Seen:
    """The jobs at the moments that the tests look at."""

    waiting: Standing
    admitted: Standing
    preempted: Standing
    urgent: Standing
    """The other job, at work while the first one is suspended."""
    urgent_ended: Standing
    back: Standing
    stopped: Standing
    """The first job when a person has suspended it."""
    resumed: Standing
    deactivated: Standing
    ended: Standing
    events: list[str] = field(default_factory=list)
    """Messages about the first job, of each time that it ran."""


class Queued:
    """Jobs in one queue."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def job(self, name: str, steps: int, **labels: str) -> Job:
        document = jobs.trainer_job(
            name, namespace=TEAM, steps=steps, memory="1500Mi", arguments=MODEL
        )
        document["metadata"]["labels"] = {QUEUE: "team", **labels}
        document["spec"]["failurePolicy"]["spares"] = 0
        document["spec"].pop("model")
        return Job(self.cluster, document)

    def stand(self, job: Job) -> Standing:
        selector = ("-n", TEAM, "-l", f"holdfast.dev/job={job.name}")
        workloads = self.cluster.get("workloads.kueue.x-k8s.io", *selector)["items"]
        return Standing(
            job=self.cluster.get("moejob", job.name, "-n", TEAM),
            workload=workloads[0] if workloads else {},
            pods=self.cluster.get("pods", *selector)["items"],
        )

    def until(self, what: str, job: Job, *wanted: tuple[str, str, str]) -> Standing:
        """The job's standing, once conditions of its Workload are so: type, status, reason."""

        def probe() -> Standing | None:
            found = self.stand(job)
            met = (found.of_workload(kind) == (status, reason) for kind, status, reason in wanted)
            return found if all(met) else None

        found = wait_for(what, probe, WAIT_S)
        assert found is not None
        return found

    def protected(self, what: str, job: Job, epoch: int) -> Standing:
        """The job's standing, once it has protected a step of this epoch or a later one."""

        def is_protected(status: Document) -> bool:
            known = int(status.get("protected", "0.0").partition(".")[0])
            return status.get("phase") == "Running" and known == status["epoch"] >= epoch

        job.wait(what, is_protected, WAIT_S)
        return self.until(what, job, ("PodsReady", "True", "Started"))

    def suspended(self, what: str, job: Job, reason: str) -> Standing:
        """The job's standing, once it is suspended for this reason and has no pod."""

        def probe() -> Standing | None:
            found = self.stand(job)
            why = found.condition("Suspended")
            is_so = why.get("status") == "True" and why.get("reason") == reason
            return found if is_so and not found.pods else None

        found = wait_for(what, probe, WAIT_S)
        assert found is not None
        return found

    def quota(self, cpu: str) -> None:
        """Set how many processors the queue has, on the nodes with `LABEL`."""
        shares = {"cpu": cpu, "memory": "64Gi"}
        given = [{"name": name, "nominalQuota": share} for name, share in shares.items()]
        group = {
            "coveredResources": list(shares),
            "flavors": [{"name": "some-nodes", "resources": given}],
        }
        queue = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [group],
        }
        self.cluster.apply(_object("ClusterQueue", "all-teams", spec=queue))

    def set_active(self, standing: Standing, active: bool) -> None:
        """What an administrator does to a Workload."""
        name = standing.workload["metadata"]["name"]
        patch = f'{{"spec":{{"active":{str(active).lower()}}}}}'
        words = ("workloads.kueue.x-k8s.io", name, "-n", TEAM, "--type=merge", "-p", patch)
        self.cluster.kubectl("patch", *words)


def _object(kind: str, name: str, namespace: str = "", **fields: Any) -> Document:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, **fields}


@pytest.fixture(scope="module")
def seen(cluster: Cluster, holdfast: Holdfast) -> Iterator[Seen]:
    flavor = {
        "nodeLabels": {LABEL: "yes"},
        "tolerations": [{"key": LABEL, "operator": "Exists", "effect": "NoSchedule"}],
    }
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}})
    cluster.kubectl("label", "nodes", *LABELLED, f"{LABEL}=yes")
    queued = Queued(cluster)
    try:
        with Controller(cluster, KUEUE):
            queued.quota(TOO_LITTLE)
            cluster.apply(
                _object("ResourceFlavor", "some-nodes", spec=flavor),
                _object("LocalQueue", "team", TEAM, spec={"clusterQueue": "all-teams"}),
                _object("WorkloadPriorityClass", "urgent", value=1000),
            )
            holdfast.install(kueue__enabled="true")
            try:
                yield _live(queued)
            finally:
                cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")
                holdfast.install()
    finally:
        cluster.kubectl("label", "nodes", *LABELLED, f"{LABEL}-")
        cluster.kubectl("delete", "namespace", TEAM, "--timeout=120s")


def _live(queued: Queued) -> Seen:
    calm = queued.job("calm", STEPS)
    urgent = queued.job("urgent", URGENT_STEPS, **{PRIORITY: "urgent"})
    calm.apply()
    waiting = queued.until("Kueue to say no", calm, ("QuotaReserved", "False", "Pending"))
    queued.suspended("the job to wait", calm, "Queued")
    queued.quota(ENOUGH)
    admitted = queued.protected("the first steps", calm, 1)

    urgent.apply()
    queued.suspended("the preemption", calm, "Evicted")
    working = queued.protected("the urgent job to train", urgent, 1)
    preempted = queued.stand(calm)
    urgent_ended = queued.until("its end", urgent, ("Finished", "True", "Succeeded"))
    back = queued.protected("the job to be back", calm, 2)

    calm.patch({"suspend": True})
    wait_for("its Workload to go", lambda: not queued.stand(calm).workload, WAIT_S)
    stopped = queued.stand(calm)
    calm.patch({"suspend": False})
    resumed = queued.protected("the job to be resumed", calm, 3)

    queued.set_active(resumed, False)
    deactivated = queued.suspended("the eviction", calm, "Evicted")
    queued.set_active(deactivated, True)
    queued.protected("the job to be back again", calm, 4)
    calm.patch({"activeDeadlineSeconds": 1})
    ended = queued.until("the job to fail", calm, ("Finished", "True", "Failed"))
    return Seen(
        waiting=waiting,
        admitted=admitted,
        preempted=preempted,
        urgent=working,
        urgent_ended=urgent_ended,
        back=back,
        stopped=stopped,
        resumed=resumed,
        deactivated=deactivated,
        ended=ended,
        events=[e.message for e in calm.events() if e.reason == "Running"],
    )


def test_a_job_that_waits_for_quota_has_a_workload_and_no_pods(seen: Seen) -> None:
    assert seen.waiting.pods == []
    assert seen.waiting.workload["spec"]["queueName"] == "team"
    assert seen.waiting.workload["spec"]["podSets"][0]["count"] == 4
    assert seen.waiting.of_workload("Admitted") in (("", ""), ("False", "NoReservation"))


def test_an_admitted_job_trains_on_the_nodes_of_its_flavor(seen: Seen) -> None:
    assert len(seen.admitted.pods) == 4
    for pod in seen.admitted.pods:
        assert pod["spec"]["nodeSelector"][LABEL] == "yes"
        assert LABEL in [each.get("key") for each in pod["spec"]["tolerations"]]
    assert {pod["spec"]["nodeName"] for pod in seen.admitted.pods} == set(LABELLED)
    assert seen.admitted.of_workload("Admitted") == ("True", "Admitted")


def test_a_more_urgent_job_takes_the_quota_and_gives_it_back(seen: Seen) -> None:
    message = seen.preempted.condition("Suspended")["message"]
    assert message.startswith("evicted by Kueue: Preempted: Preempted to accommodate")
    assert seen.preempted.of_workload("QuotaReserved")[0] == "False"
    assert seen.urgent.workload["spec"]["priority"] == 1000
    assert len(seen.urgent.pods) == 4
    assert seen.urgent_ended.status["phase"] == "Complete"


@pytest.mark.parametrize(
    ("before", "after"), [("admitted", "back"), ("back", "resumed"), ("resumed", "ended")]
)
def test_a_job_goes_on_from_its_snapshots_in_memory(seen: Seen, before: str, after: str) -> None:
    old, new = getattr(seen, before).status, getattr(seen, after).status
    assert new["protectedStep"] > old["protectedStep"] > 0
    assert new["restarts"] == old["restarts"] == 0


def test_no_step_comes_from_the_beginning_or_from_storage(seen: Seen) -> None:
    assert len(seen.events) == 4
    assert ["from the beginning" in message for message in seen.events] == [True, *[False] * 3]
    assert not any("storage" in message for message in seen.events)


def test_a_person_who_suspends_a_job_takes_it_out_of_its_queue(seen: Seen) -> None:
    assert seen.stopped.pods == []
    assert seen.stopped.status["phase"] == "Suspended"
    ours = seen.resumed.workload["metadata"]["uid"]
    assert ours != seen.back.workload["metadata"]["uid"]


def test_an_administrator_may_take_a_job_out_of_work(seen: Seen) -> None:
    assert "Deactivated" in seen.deactivated.condition("Suspended")["message"]
    assert seen.deactivated.workload["metadata"]["uid"] == seen.resumed.workload["metadata"]["uid"]


def test_a_job_that_has_failed_holds_no_quota(seen: Seen) -> None:
    assert seen.ended.workload["status"]["conditions"]
    assert seen.ended.status["phase"] == "Failed"
