"""Why a pod ended, in the words of Kubernetes.

A container's exit code shows what happened to a process; the pod and its conditions show why. An
eviction, a deadline and a node that shuts down all end a container by SIGKILL or SIGTERM, and a pod
whose init container failed has no exit code of its own. Pure: this module does not decide what
follows, but its one table says which ends the cluster has caused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_operator.kube.client.api import Object
from holdfast_operator.reconciler.observe.text import KILLED
from holdfast_operator.reconciler.observe.views import INIT_FAILED

DISRUPTED = "DisruptionTarget"
"""Condition of a pod that the cluster takes away."""

TAKEN_AWAY: Mapping[str, str] = {
    # The kubelet ends a pod that ran: `status.reason` of the pod.
    "Evicted": "the node is short of memory, disk or process ids",
    "Preempting": "the node makes room for a critical pod",
    "NodeShutdown": "the node shuts down",
    "Shutdown": "the node shuts down",
    "Terminated": "the node shuts down",
    "NodeLost": "the node does not answer",
    # The kubelet refuses a pod that was bound to it: no room, or not this one.
    "NodeAffinity": "the node's labels do not suit the pod",
    "NodeNotReady": "the node is not ready",
    "OutOfcpu": "the node has no room",
    "OutOfmemory": "the node has no room",
    "OutOfpods": "the node has no room",
    "OutOfephemeral-storage": "the node has no room",
    "OutOfhugepages-2Mi": "the node has no room",
    "OutOfhugepages-1Gi": "the node has no room",
    "UnexpectedAdmissionError": "a device of the node was not available",
    "ResourceUnavailable": "a device of the node was not available",
    "TopologyAffinityError": "the node could not align the pod's processors and devices",
    "SMTAlignmentError": "the node could not align the pod's processors and devices",
    # Reasons of the condition DisruptionTarget.
    "PreemptionByScheduler": "a pod of higher priority takes its place",
    "DeletionByTaintManager": "the node has a taint that the pod does not tolerate",
    "EvictionByEvictionAPI": "the pod was evicted, as by kubectl drain",
    "DeletionByPodGC": "the node of the pod is gone",
    "TerminationByKubelet": "the kubelet ended the pod",
}
"""Reasons of pods that the cluster took away, which is not their script's failure → what they
mean."""

DEADLINE_EXCEEDED = "DeadlineExceeded"
"""Reason of a pod that has run for longer than `activeDeadlineSeconds` of its template."""

_OUT_OF = "OutOf"
"""How the kubelet begins the reason when a pod does not fit: the name of the resource follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEnd:
    """How a pod's trainer ended."""

    exit_code: int
    reason: str = ""
    """In one word; empty after a success."""
    message: str = ""
    """The same in a sentence."""
    written: str = ""
    """End of the log of what failed, where the kubelet has kept it."""


def end_of(spec: Object, status: Object, trainer: Object) -> PodEnd | None:
    """Why a pod ended; None if it has not ended.

    Args:
        trainer: status of the trainer's container; empty when there is none yet.
    """
    ended = (trainer.get("state") or {}).get("terminated")
    failed = status.get("phase") == "Failed"
    of_pod, message = status.get("reason", ""), status.get("message", "").strip()
    known = failed and (of_pod == DEADLINE_EXCEEDED or _is_taken_away(of_pod))
    if ended is not None:
        code = int(ended.get("exitCode", KILLED))
        return PodEnd(
            exit_code=code,
            reason="" if code == 0 else of_pod if known else ended.get("reason", ""),
            message=message if code and known else "",
            written=str(ended.get("message", "")) if code else "",
        )
    if status.get("phase") == "Succeeded":
        return PodEnd(exit_code=0)
    if not failed:
        return None
    init = None if known else _failed_init(spec, status)
    if init is not None:
        return init
    # The end of the container was not observed.
    return PodEnd(exit_code=KILLED, reason=of_pod, message=message)


def disruption_of(status: Object) -> str:
    """Why the cluster takes the pod away, or has; empty when it does not. Old clusters, and a
    kubelet that refuses a pod, set no condition."""
    reason, why = str(status.get("reason", "")), str(status.get("message", "")).strip()
    if status.get("phase") == "Failed" and _is_taken_away(reason):
        why = why or TAKEN_AWAY.get(reason, "")
        return f"{reason}: {why}" if why else reason
    for condition in status.get("conditions") or ():
        if condition.get("type") == DISRUPTED and condition.get("status") == "True":
            reason = str(condition.get("reason", "")) or DISRUPTED
            why = str(condition.get("message", "")).strip() or TAKEN_AWAY.get(reason, "")
            return f"{reason}: {why}" if why else reason
    return ""


def _is_taken_away(reason: str) -> bool:
    return reason in TAKEN_AWAY or reason.startswith(_OUT_OF)


def _failed_init(spec: Object, status: Object) -> PodEnd | None:
    """End of the init container that kept all other containers from starting."""
    beside = {
        each.get("name")
        for each in spec.get("initContainers") or ()
        if each.get("restartPolicy") == "Always"  # a sidecar
    }
    for each in status.get("initContainerStatuses") or ():
        ended = (each.get("state") or {}).get("terminated") or {}
        code = int(ended.get("exitCode", 0))
        if code and each.get("name") not in beside:
            how = f"exited with code {code}"
            why = ended.get("reason", "")
            how += f" ({why})" if why not in ("", "Error") else ""
            return PodEnd(
                exit_code=code,
                reason=INIT_FAILED,
                message=f"init container {each.get('name')} {how}",
                written=str(ended.get("message", "")),
            )
    return None
