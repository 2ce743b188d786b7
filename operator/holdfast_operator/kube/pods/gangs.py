"""Gang admission of a job's pods: the labels, annotations and objects that each scheduler requires.

Pure. To add a scheduler, add an entry to `_GANGS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast_core.job.parsing import Gang, MoETrainingJob
from holdfast_core.job.schema import QUEUE_LABEL
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import (
    COSCHEDULING_POD_GROUPS,
    VOLCANO_POD_GROUPS,
    Resource,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GangParts:
    """Labels, annotations and objects by which a gang scheduler recognises the pods of one job."""

    labels: dict[str, str] = field(default_factory=dict)
    """Labels of each pod."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of each pod."""
    scheduler_name: str = ""
    """Scheduler for pods whose template names none; empty for the cluster's default."""
    objects: tuple[tuple[Resource, Object], ...] = ()
    """Objects beside the pods, without metadata of their owner."""


def gang_parts(job: MoETrainingJob) -> GangParts:
    """The parts that `spec.scheduling` asks for."""
    return _GANGS[job.spec.scheduling.gang](job)


def _none(job: MoETrainingJob) -> GangParts:
    return GangParts()


def _kueue_pods(job: MoETrainingJob) -> GangParts:
    """https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/"""
    return GangParts(
        labels={
            QUEUE_LABEL: job.spec.scheduling.queue or "",
            "kueue.x-k8s.io/pod-group-name": job.metadata.name,
        },
        annotations={"kueue.x-k8s.io/pod-group-total-count": str(job.spec.nodes)},
    )


def _volcano(job: MoETrainingJob) -> GangParts:
    """https://volcano.sh/en/docs/podgroup/"""
    spec: Object = {"minMember": job.spec.nodes}
    if job.spec.scheduling.queue:
        spec["queue"] = job.spec.scheduling.queue
    group = _pod_group(VOLCANO_POD_GROUPS, job, spec)
    return GangParts(
        annotations={"scheduling.k8s.io/group-name": job.metadata.name},
        scheduler_name="volcano",
        objects=((VOLCANO_POD_GROUPS, group),),
    )


def _coscheduling(job: MoETrainingJob) -> GangParts:
    """https://scheduler-plugins.sigs.k8s.io/docs/kep/42-podgroup-coscheduling/readme/"""
    group = _pod_group(COSCHEDULING_POD_GROUPS, job, {"minMember": job.spec.nodes})
    return GangParts(
        labels={"scheduling.x-k8s.io/pod-group": job.metadata.name},
        scheduler_name="scheduler-plugins-scheduler",
        objects=((COSCHEDULING_POD_GROUPS, group),),
    )


def _pod_group(resource: Resource, job: MoETrainingJob, spec: Object) -> Object:
    return {
        "apiVersion": f"{resource.group}/{resource.version}",
        "kind": "PodGroup",
        "metadata": {"name": job.metadata.name},
        "spec": spec,
    }


_GANGS: dict[Gang, Callable[[MoETrainingJob], GangParts]] = {
    Gang.NONE: _none,
    Gang.KUEUE: _none,  # not the pods: `workloads`
    Gang.KUEUE_POD_GROUP: _kueue_pods,
    Gang.VOLCANO: _volcano,
    Gang.COSCHEDULING: _coscheduling,
}
