"""Finds the trainer's container in a pod, and any other container that is at work. Pure.

The cluster may change a pod. Webhooks add containers, and some put theirs first; the kubelet lists
states in an order of its own. So no container is found by its position: the operator writes the
container's name from the job's template on each pod, and other controllers may do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast_operator.kube.client.resources import CSI_DRIVER, GROUP

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Object

CONTAINER_ANNOTATION = f"{GROUP}/container"
"""Annotation of a pod with the name of the trainer's container."""
DEFAULT_ANNOTATION = "kubectl.kubernetes.io/default-container"
"""Annotation with the container that `kubectl logs` and `kubectl exec` choose."""
SOCKET_VARIABLE = "HOLDFAST_SOCKET"


def trainer_container(pod: Object) -> Object:
    """The trainer's container in the spec of a pod, in the API's form; empty in a pod without any.

    It is the one that `CONTAINER_ANNOTATION` names. Where that is missing, as on pods of other
    controllers, it is the only one that is given the daemon's socket, then the one that kubectl
    chooses, and then the first.
    """
    containers: list[Object] = (pod.get("spec") or {}).get("containers") or []
    named = {each.get("name"): each for each in containers}
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if annotations.get(CONTAINER_ANNOTATION) in named:
        return named[annotations[CONTAINER_ANNOTATION]]
    served = [each for each in containers if _has_socket(pod, each)]
    if len(served) == 1:
        return served[0]
    if annotations.get(DEFAULT_ANNOTATION) in named:
        return named[annotations[DEFAULT_ANNOTATION]]
    return (served or containers or [{}])[0]


def trainer_status(pod: Object) -> Object:
    """Status of the trainer's container; empty while the kubelet has reported none."""
    name = trainer_container(pod).get("name")
    found = (each for each in _statuses(pod, "containerStatuses") if each.get("name") == name)
    return next(found, {})


def others_run(pod: Object) -> bool:
    """Whether a container other than the trainer's is running, such as a sidecar that uploads."""
    name = trainer_container(pod).get("name")
    others = [each for each in _statuses(pod, "containerStatuses") if each.get("name") != name]
    others += _statuses(pod, "initContainerStatuses")  # sidecars of Kubernetes' own kind
    return any("running" in (each.get("state") or {}) for each in others)


def starts_again(pod: Object, exit_code: int) -> bool:
    """Whether the kubelet starts a container that has ended with this code again in its pod."""
    policy = (pod.get("spec") or {}).get("restartPolicy", "Always")
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def _statuses(pod: Object, kind: str) -> list[Object]:
    found: list[Object] = (pod.get("status") or {}).get(kind) or []
    return found


def _has_socket(pod: Object, container: Object) -> bool:
    """Whether a container is given the daemon's socket, by a variable or as a volume."""
    if any(each.get("name") == SOCKET_VARIABLE for each in container.get("env") or []):
        return True
    volumes: list[dict[str, Any]] = (pod.get("spec") or {}).get("volumes") or []
    ours = {
        each.get("name") for each in volumes if (each.get("csi") or {}).get("driver") == CSI_DRIVER
    }
    return any(mount.get("name") in ours for mount in container.get("volumeMounts") or [])
