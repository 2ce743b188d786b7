"""Fields of a pod template that a local run treats differently from the kubelet.

A local run starts the trainer's command as a process of this machine. It has nothing else that a
pod would have. A job that relies on such a field must not find that out by failing: each field is
named, with what happens instead. docs/local-cluster.md has the same table for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

POD = "spec.trainer.template.spec"

OF_CONTAINER: dict[str, str] = {
    "env.valueFrom": "the variable keeps what this shell gives it, and references to it stay as "
    "they are written",
    "envFrom": "its variables keep what this shell gives them, and references to them stay as they "
    "are written",
    "image": "the trainer runs with the programs and packages of this machine",
    "imagePullPolicy": "no image is pulled",
    "lifecycle": "no hook runs when the trainer starts or is stopped",
    "livenessProbe": "nothing probes the trainer; Holdfast's own detection of hangs works",
    "ports": "the trainer has the ports of this machine, beside those of other members",
    "readinessProbe": "nothing probes the trainer; it is ready when it trains",
    "resizePolicy": "resources are neither requested nor limited",
    "resources": "resources are neither requested nor limited: all members share this machine, and "
    "its devices are not divided",
    "restartPolicy": "the job's failure rules decide",
    "securityContext": "the trainer runs as the user who runs this, with that user's rights",
    "startupProbe": "nothing probes the trainer; failurePolicy.detection.startSeconds works",
    "stdin": "the trainer has no input",
    "stdinOnce": "the trainer has no input",
    "terminationMessagePath": "the reason of a failure is taken from the end of the log",
    "terminationMessagePolicy": "the reason of a failure is taken from the end of the log",
    "tty": "the trainer has no terminal",
    "volumeDevices": "no device is attached",
    "volumeMounts": "nothing is mounted: paths are those of this machine",
}
"""Field of the trainer's container → what a local run does instead."""

APPLIED_TO_CONTAINER = frozenset({"name", "command", "args", "env", "workingDir"})
"""Fields of the trainer's container that a local run applies. A `workingDir` that is not absolute
is below the directory in which the run was started."""

OF_POD: dict[str, str] = {
    "activeDeadlineSeconds": "no member is ended after a time",
    "affinity": "members are virtual nodes of this machine",
    "containers": "containers beside the trainer's are not started",
    "dnsConfig": "names are resolved as on this machine",
    "dnsPolicy": "names are resolved as on this machine",
    "ephemeralContainers": "containers beside the trainer's are not started",
    "hostAliases": "names are resolved as on this machine",
    "hostIPC": "all members share the namespaces of this machine",
    "hostNetwork": "all members share the namespaces of this machine",
    "hostPID": "all members share the namespaces of this machine",
    "hostUsers": "all members share the namespaces of this machine",
    "hostname": "the host name is that of this machine",
    "imagePullSecrets": "no image is pulled",
    "initContainers": "init containers, and sidecars among them, are not started: do by hand what "
    "they do",
    "nodeName": "members are virtual nodes of this machine",
    "nodeSelector": "members are virtual nodes of this machine",
    "os": "the trainer runs on this machine",
    "overhead": "resources are neither requested nor limited",
    "preemptionPolicy": "nothing preempts a local run",
    "priority": "nothing preempts a local run",
    "priorityClassName": "nothing preempts a local run",
    "readinessGates": "nothing probes the trainer; it is ready when it trains",
    "resourceClaims": "no device is attached",
    "resources": "resources are neither requested nor limited",
    "restartPolicy": "the job's failure rules decide",
    "runtimeClassName": "the trainer runs as a process of this machine",
    "schedulerName": "members are virtual nodes of this machine",
    "schedulingGates": "members start at once",
    "securityContext": "the trainer runs as the user who runs this, with that user's rights",
    "serviceAccount": "the trainer has no account of a cluster",
    "serviceAccountName": "the trainer has no account of a cluster",
    "automountServiceAccountToken": "the trainer has no account of a cluster",
    "setHostnameAsFQDN": "the host name is that of this machine",
    "shareProcessNamespace": "all members share the namespaces of this machine",
    "subdomain": "the host name is that of this machine",
    "terminationGracePeriodSeconds": "a trainer that is stopped gets 5 seconds",
    "tolerations": "members are virtual nodes of this machine",
    "topologySpreadConstraints": "members are virtual nodes of this machine",
    "volumes": "nothing is mounted: paths are those of this machine",
}
"""Field of the pod → what a local run does instead."""

_UNKNOWN = "a local run does not know this field"


def local_differences(template: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each field of a pod's template that a local run does not apply.

    Args:
        template: the template of a valid job.
        trainer: the trainer's container, one of those of the template.
    """
    spec = template["spec"]
    containers = spec["containers"]
    at = f"{POD}.containers[{next(i for i, one in enumerate(containers) if one is trainer)}]"
    for i, entry in enumerate(trainer.get("env") or ()):
        if "valueFrom" in entry:
            field = f"{at}.env[{i}].valueFrom ({entry['name']})"
            yield _ignored(field, OF_CONTAINER["env.valueFrom"])
    for name in trainer:
        if name not in APPLIED_TO_CONTAINER:
            yield _ignored(f"{at}.{name}", OF_CONTAINER.get(name, _UNKNOWN))
    for i, container in enumerate(containers):
        if container is not trainer:
            named = container.get("name") if isinstance(container, Mapping) else None
            yield _ignored(f"{POD}.containers[{i}] ({named})", OF_POD["containers"])
    for name in spec:
        if name != "containers":
            yield _ignored(f"{POD}.{name}", OF_POD.get(name, _UNKNOWN))


def _ignored(field: str, instead: str) -> str:
    return f"{field[:200]} is ignored here: {instead}"
