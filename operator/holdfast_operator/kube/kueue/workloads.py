"""A job as a Workload of Kueue: what the job requests, what it was given, and the next write.

Kueue decides when a job gets its share of a quota, and may take it back. It knows jobs of other
projects only by a Workload, which their own controllers make, follow and keep up to date, in the
steps of Kueue's own reconciler of jobs (https://kueue.sigs.k8s.io/docs/concepts/workload/). The
Workload is created when the job shall run, and deleted when it shall not. The job is suspended
until its Workload is admitted, and again after an eviction; its quota is given back once its pods
are gone.

Pure. It decides nothing about members: for the reconciler, a job that waits is suspended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import KIND, MoETrainingJob
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import GROUP, TOLERATION, WORKLOADS
from holdfast_operator.kube.pods.manifests import common_labels, owner_reference, template_of
from holdfast_operator.kube.pods.shared_objects import controller_of
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.timestamps import seconds_of
from holdfast_operator.reconciler.observe.views import Suspension

POD_SET = "main"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
TIME_LABEL = "kueue.x-k8s.io/max-exec-time-seconds"
DIGEST = f"{GROUP}/pod-sets"
"""Annotation with a digest of what the Workload asks for, as it was before the API server filled in
its defaults."""
SELECTOR = "app.kubernetes.io/part-of=holdfast"

_REQUEUED_AT_ONCE = ("Preempted", "NodeFailures")
"""Evictions after which Kueue puts a Workload back into its queue by itself."""
_HASH_CHARACTERS = 5
_NOT_READY = "some members' pods are not at work"
MESSAGE_CHARACTERS_MAX = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class KueueWorkload:
    """The relevant part of a Workload."""

    namespace: str
    name: str
    uid: str
    version: str
    generation: int
    job: str
    """Name of the job that owns it."""
    digest: str
    queue: str
    leaving: bool
    """Whether it is being deleted."""
    conditions: tuple[Object, ...]
    admission: Object
    """Assignment of the quota; empty without one."""
    checks: tuple[Object, ...]
    past_s: int
    """Seconds of earlier admissions."""

    def condition(self, kind: str) -> Object:
        """A condition; empty while it is not there."""
        return next((each for each in self.conditions if each.get("type") == kind), {})

    def has(self, kind: str) -> bool:
        """Whether a condition is true."""
        return bool(self.condition(kind).get("status") == "True")

    @property
    def assignment(self) -> Object:
        """What the pods were given."""
        found: list[Object] = self.admission.get("podSetAssignments") or []
        return next((each for each in found if each.get("name") == POD_SET), {})

    @property
    def flavors(self) -> tuple[str, ...]:
        """Names of the resource flavors that the pods were given."""
        return tuple(sorted(set((self.assignment.get("flavors") or {}).values())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Create:
    """Make the Workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete:
    """Delete the Workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteStatus:
    """Merge `status` into the Workload's."""

    status: Object


Write = Create | Delete | WriteStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """State of the job, as its Workload shows it."""

    stopped: bool
    """Whether none of its pods is left at work."""
    ready: bool
    """Whether all members' pods are at work."""
    outcome: Outcome | None
    reason: str
    """Why it ended, in words."""
    now: str
    """The time, as the API writes it."""


def read_workload(raw: Object) -> KueueWorkload:
    """Read a Workload from the API's form."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    return KueueWorkload(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=metadata["resourceVersion"],
        generation=metadata.get("generation", 0),
        job=controller_of(raw).get("name", ""),
        digest=(metadata.get("annotations") or {}).get(DIGEST, ""),
        queue=spec.get("queueName", ""),
        leaving="deletionTimestamp" in metadata,
        conditions=tuple(status.get("conditions") or ()),
        admission=status.get("admission") or {},
        checks=tuple(status.get("admissionChecks") or ()),
        past_s=status.get("accumulatedPastExecutionTimeSeconds") or 0,
    )


# --- what the job asks for ------------------------------------------------------------------------


def workload_name(job: MoETrainingJob) -> str:
    """Name of the job's Workload, made as Kueue does: no later job of the same name shares it."""
    name, uid = job.metadata.name, job.metadata.uid
    # The digest only keeps names apart.
    digest = hashlib.sha1(f"{KIND}\n{GROUP}\n{name}\n{uid}".encode(), usedforsecurity=False)
    return f"{KIND.lower()}-{name}-{digest.hexdigest()[:_HASH_CHARACTERS]}"


def workload_manifest(job: MoETrainingJob, priority: Object) -> Object:
    """The Workload of a job.

    Args:
        priority: `priorityClassRef` and `priority` of its spec.
    """
    spec = {**_asked(job), "queueName": job.kueue_queue, **priority}
    return {
        "apiVersion": f"{WORKLOADS.group}/{WORKLOADS.version}",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job),
            "namespace": job.metadata.namespace,
            "labels": {**common_labels(job), "kueue.x-k8s.io/job-uid": job.metadata.uid},
            "annotations": {DIGEST: digest_of(job)},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def digest_of(job: MoETrainingJob) -> str:
    """Digest of what the job asks of its queue, whichever that is."""
    return hashlib.sha256(json.dumps(_asked(job), sort_keys=True).encode()).hexdigest()[:16]


def _asked(job: MoETrainingJob) -> Object:
    pods = {"name": POD_SET, "count": job.spec.nodes, "template": job.spec.trainer.template}
    found: Object = {"podSets": [pods]}
    limit_s = job.metadata.labels.get(TIME_LABEL, "")
    if limit_s.isdecimal():
        found["maximumExecutionTimeSeconds"] = int(limit_s)
    return found


def priority_of(job: MoETrainingJob, classes: Iterable[Object]) -> Object:
    """The priority in the spec of a Workload without a priority class of Kueue's own: the priority
    of the job's pods. `classes` are the cluster's PriorityClasses."""
    wanted = template_of(job)["spec"].get("priorityClassName", "")
    for each in classes:
        name = each["metadata"]["name"]
        if name == wanted or (not wanted and each.get("globalDefault")):
            return _priority("scheduling.k8s.io", "PriorityClass", each)
    return {"priority": 0}


def kueue_priority(found: Object) -> Object:
    """The priority in the spec of a Workload whose job names this WorkloadPriorityClass."""
    return _priority(WORKLOADS.group, "WorkloadPriorityClass", found)


def _priority(group: str, kind: str, found: Object) -> Object:
    reference = {"group": group, "kind": kind, "name": found["metadata"]["name"]}
    return {"priorityClassRef": reference, "priority": found["value"]}


# --- what it was given ----------------------------------------------------------------------------


def suspension_by_queue(job: MoETrainingJob, workload: KueueWorkload | None) -> Suspension | None:
    """Why the queue keeps the job from running; None once it was admitted."""
    waits = f"waits in Kueue's queue {job.kueue_queue}"
    if workload is None or _is_obsolete(job, workload):
        return Suspension(reason="Queued", message=waits)
    if workload.has("Evicted"):
        why = workload.condition("Evicted")
        message = f"evicted by Kueue: {why.get('reason')}: {why.get('message')}"
        return Suspension(reason="Evicted", message=message)
    if workload.has("Admitted"):
        return None
    pending = [each for each in workload.checks if each.get("state") != "Ready"]
    if workload.has("QuotaReserved") and pending:
        texts = [f"{each['name']} {each.get('message', '')}".strip() for each in pending]
        return Suspension(reason="Queued", message=f"{waits} for checks: {', '.join(texts)}")
    why = workload.condition("QuotaReserved").get("message", "")
    return Suspension(reason="Queued", message=f"{waits}: {why}" if why else waits)


def admitted_job(
    job: MoETrainingJob, workload: KueueWorkload, flavors: Iterable[Object]
) -> MoETrainingJob:
    """The job with what its admission adds to the pods: the labels and tolerations of the flavors
    that it was given, and what admission checks ask for.

    Raises:
        InvalidJobError: when that contradicts the template, or itself.
    """
    template = deepcopy(template_of(job))
    for flavor in flavors:
        spec = flavor.get("spec") or {}
        given = {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}
        _add(template, given, f"the resource flavor {flavor['metadata']['name']}")
    for check in workload.checks:
        for update in check.get("podSetUpdates") or ():
            if update["name"] == POD_SET:
                _add(template, update, f"the admission check {check['name']}")
    return _with_template(job, template)


def job_of_pod(job: MoETrainingJob, pod: Object) -> MoETrainingJob:
    """The job with what its admission added to `pod`, as far as that decides where pods run: the
    node selector and the tolerations. Labels and annotations may be anybody's."""
    template, spec = deepcopy(template_of(job)), pod["spec"]
    template["spec"]["nodeSelector"] = spec.get("nodeSelector") or {}
    tolerations = [each for each in spec.get("tolerations") or () if each != TOLERATION]
    template["spec"]["tolerations"] = tolerations
    return _with_template(job, template)


def _with_template(job: MoETrainingJob, template: Object) -> MoETrainingJob:
    trainer = msgspec.structs.replace(job.spec.trainer, template=template)
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, trainer=trainer))


def _add(template: Object, given: Object, source: str) -> None:
    metadata, spec = template.setdefault("metadata", {}), template["spec"]
    places = ((metadata, "labels"), (metadata, "annotations"), (spec, "nodeSelector"))
    for parent, key in places:
        new: Mapping[str, str] = given.get(key) or {}
        known: dict[str, str] = parent.get(key) or {}
        for name, value in new.items():
            if known.get(name, value) != value:
                raise InvalidJobError(
                    f"{source} sets {key} {name} = {value}, and the pods have {known[name]}; "
                    f"change the template, or the queue"
                )
        if new:
            parent[key] = {**known, **new}
    tolerations: list[Any] = spec.get("tolerations") or []
    more = [each for each in given.get("tolerations") or () if each not in tolerations]
    if more:
        spec["tolerations"] = [*tolerations, *more]


# --- what is written next -------------------------------------------------------------------------


def next_write(
    job: MoETrainingJob, workload: KueueWorkload | None, state: JobState
) -> Write | None:
    """The next write that brings the Workload up to date; None when nothing is to be written."""
    if workload is None:
        wanted = job.kueue_queue is not None and not job.spec.suspend and state.outcome is None
        return Create() if wanted else None
    if workload.leaving:
        return None
    if state.outcome is not None:
        return None if workload.has("Finished") else WriteStatus(status=_finished(workload, state))
    if job.kueue_queue is None:
        return Delete()
    if _is_obsolete(job, workload):
        return Delete() if state.stopped else None
    reserved = workload.has("QuotaReserved")
    if workload.has("Evicted"):
        return (
            WriteStatus(status=_released(workload, state)) if state.stopped and reserved else None
        )
    if workload.queue != job.kueue_queue and not reserved:
        return Delete()
    return _pods_ready(workload, state) if workload.has("Admitted") else None


def _is_obsolete(job: MoETrainingJob, workload: KueueWorkload) -> bool:
    """Whether the Workload does not, or no longer, fit the job as it is."""
    ended = workload.leaving or workload.has("Finished")
    return ended or job.spec.suspend or workload.digest != digest_of(job)


def _finished(workload: KueueWorkload, state: JobState) -> Object:
    reason = "Succeeded" if state.outcome is Outcome.COMPLETE else "Failed"
    return _with(workload, state, ("Finished", True, reason, state.reason))


def _released(workload: KueueWorkload, state: JobState) -> Object:
    """Status with the quota given back after an eviction."""
    why, admitted = workload.condition("Evicted"), workload.condition("Admitted")
    reason, message = why.get("reason", ""), why.get("message", "")
    changes = [
        ("Requeued", reason in _REQUEUED_AT_ONCE, reason, message),
        ("QuotaReserved", False, "Pending", message),
    ]
    if workload.has("PodsReady"):
        changes.append(("PodsReady", False, "WaitForStart", _NOT_READY))
    past_s = workload.past_s
    if workload.has("Admitted"):
        changes.append(("Admitted", False, "NoReservation", "The workload has no reservation"))
        since, now = seconds_of(admitted.get("lastTransitionTime")), seconds_of(state.now)
        past_s += max(0, int(now - since)) if since is not None and now is not None else 0
    return {
        **_with(workload, state, *changes),
        "admission": None,
        "accumulatedPastExecutionTimeSeconds": past_s,
    }


def _pods_ready(workload: KueueWorkload, state: JobState) -> WriteStatus | None:
    """Report whether all pods are at work, with the reasons by which Kueue tells a start from a
    recovery."""
    known = workload.condition("PodsReady")
    before = known.get("reason")
    if state.ready:
        back = before in ("WaitForRecovery", "Recovered")
        reason, message = "Recovered" if back else "Started", "all members' pods are at work"
    else:
        lost = known.get("status") == "True" or before == "WaitForRecovery"
        reason = "WaitForRecovery" if lost else "WaitForStart"
        message = _NOT_READY
    if (known.get("status") == "True") is state.ready and before == reason:
        return None
    return WriteStatus(status=_with(workload, state, ("PodsReady", state.ready, reason, message)))


def _with(workload: KueueWorkload, state: JobState, *changes: tuple[str, bool, str, str]) -> Object:
    """Status with these conditions: type, status, reason, message."""
    conditions = {each["type"]: each for each in workload.conditions}
    for kind, status, reason, message in changes:
        word = str(status)
        known = conditions.get(kind, {})
        same = known.get("status") == word
        conditions[kind] = {
            "type": kind,
            "status": word,
            "reason": reason,
            "message": message[:MESSAGE_CHARACTERS_MAX],
            "observedGeneration": workload.generation,
            "lastTransitionTime": known["lastTransitionTime"] if same else state.now,
        }
    return {"conditions": list(conditions.values())}
