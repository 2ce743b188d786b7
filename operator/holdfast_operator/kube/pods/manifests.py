"""The objects of a job: a pod for each member, and the objects that its pods share. Pure.

The trainer's container becomes the launcher, which starts the command of the template once for each
rank. Everything else in the template stays as it is, unless Holdfast needs it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.job.parsing import API_VERSION, KIND, MoETrainingJob
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import (
    ATTEMPT_LABEL,
    CSI_DRIVER,
    DISRUPTION_BUDGETS,
    GROUP,
    JOB_LABEL,
    MEMBER_LABEL,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    TOLERATION,
    Resource,
)
from holdfast_operator.kube.pods.containers import (
    CONTAINER_ANNOTATION,
    DEFAULT_ANNOTATION,
    SOCKET_VARIABLE,
)
from holdfast_operator.kube.pods.gangs import gang_parts

NODE_ANNOTATION = f"{GROUP}/node"
"""Annotation that names the node a pod was made for, also while the pod waits for its scheduler."""

TRAINER_SELECTOR = JOB_LABEL
"""Pods of jobs, whoever made them."""

_TRAINERS = {"app.kubernetes.io/component": "trainer"}

VOLUME_PATH = "/run/holdfast"
SOCKETS_PATH = f"{VOLUME_PATH}/sockets"
SOCKET_PATH = f"{SOCKETS_PATH}/daemon.sock"
TOKEN_DIRECTORY = "/var/run/secrets/holdfast.dev"
TOKEN_AUDIENCE = f"{GROUP}/daemon"
TOKEN_S = 3600
POD_IP = "HOLDFAST_POD_IP"
"""Environment variable with the address at which other nodes reach the trainer, not its daemon."""
DEFAULT_VARIABLES = {"PYTHONUNBUFFERED": "1"}
"""Variables of the trainer that the template may set otherwise."""
SHARED_MEMORY_PATH = "/dev/shm"
LINES_OF_LOG = "FallbackToLogsOnError"
"""Policy by which a pod's status has the last lines of a container that failed."""
GRACE_S = 8
"""Seconds between SIGTERM and SIGKILL of a pod whose template gives none: longer than the launcher
gives its workers."""
LAUNCHER_S = 3
"""Part of a pod's grace that is left for the launcher, after the grace of its workers."""


class TrainerVolume(StrEnum):
    """How trainers' pods get at the daemon's sockets."""

    CSI = "csi"
    """An inline volume of the daemons' CSI driver, with a token of the pod's own."""
    HOST_PATH = "host-path"
    """The node's directory, and a service-account token."""


def common_labels(job: MoETrainingJob) -> dict[str, str]:
    """Labels of every object of the job."""
    return {
        JOB_LABEL: job.metadata.name,
        "app.kubernetes.io/name": "moetrainingjob",
        "app.kubernetes.io/instance": job.metadata.name,
        "app.kubernetes.io/part-of": "holdfast",
        "app.kubernetes.io/managed-by": "holdfast-operator",
    }


def pod_name(job: MoETrainingJob, member: int, attempt: int) -> str:
    return f"{job.metadata.name}-{member}-{attempt}"


def template_of(job: MoETrainingJob) -> Object:
    """The template of the job's pods, which Holdfast makes."""
    template = job.spec.trainer.template
    assert template is not None, "another controller makes the job's pods"
    return template


def pod_manifest(
    job: MoETrainingJob, member: int, node: str, attempt: int, volume: TrainerVolume
) -> Object:
    """The pod that runs `member` on `node`."""
    gang = gang_parts(job)
    template = deepcopy(template_of(job))
    given = template.get("metadata") or {}
    labels = {
        **(given.get("labels") or {}),
        **common_labels(job),
        **_TRAINERS,
        MEMBER_LABEL: str(member),
        ATTEMPT_LABEL: str(attempt),
        **gang.labels,
    }
    spec: Object = template["spec"]
    trainer = spec["containers"][0]  # of the template, which nobody else changes
    annotations = {
        DEFAULT_ANNOTATION: trainer.get("name", ""),
        **(given.get("annotations") or {}),
        NODE_ANNOTATION: node,
        CONTAINER_ANNOTATION: trainer.get("name", ""),
        **gang.annotations,
    }
    spec["restartPolicy"] = "Never"
    spec.setdefault("serviceAccountName", account_of(job) or f"{job.metadata.name}-trainer")
    spec.setdefault("hostname", f"{job.metadata.name}-{member}")
    spec.setdefault("subdomain", job.metadata.name)
    if gang.scheduler_name:
        spec.setdefault("schedulerName", gang.scheduler_name)
    _pin(spec, node)
    spec["tolerations"] = [*(spec.get("tolerations") or []), TOLERATION]
    access = _ACCESS[volume]
    _launch(job, trainer, node, access.token_file, _grace_options(spec))
    _mount(spec, trainer, access)
    spec.setdefault("terminationGracePeriodSeconds", GRACE_S)
    for container in spec.get("initContainers") or ():
        container.setdefault("terminationMessagePolicy", LINES_OF_LOG)
    metadata = {
        "name": pod_name(job, member, attempt),
        "namespace": job.metadata.namespace,
        "labels": labels,
        "annotations": annotations,
        "ownerReferences": [owner_reference(job)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def account_of(job: MoETrainingJob) -> str:
    """Service account that the template names; empty when it names none. `serviceAccount` is the
    older name of the field."""
    spec = template_of(job)["spec"]
    return str(spec.get("serviceAccountName") or spec.get("serviceAccount") or "")


def job_objects(
    job: MoETrainingJob, *, budgets: bool = True
) -> tuple[tuple[Resource, Object], ...]:
    """Objects that the pods of the job share, in the order in which they are made. A job whose
    template names a service account gets none of its own.

    Args:
        budgets: whether evictions must leave as many of the job's pods as its redundancy needs.
    """
    name = job.metadata.name
    account = f"{name}-trainer"
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _TRAINERS | {JOB_LABEL: name},
        },
    }
    service_account: Object = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": account},
    }
    role: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": account},
        "rules": [
            {
                "apiGroups": [GROUP],
                "resources": ["moetrainingjobs"],
                "resourceNames": [name],
                "verbs": ["get"],
            }
        ],
    }
    binding: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": account},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
        "subjects": [
            {"kind": "ServiceAccount", "name": account, "namespace": job.metadata.namespace}
        ],
    }
    identity = [(SERVICE_ACCOUNTS, service_account), (ROLES, role), (ROLE_BINDINGS, binding)]
    objects = [
        (SERVICES, service),
        *([] if account_of(job) else identity),
        *([(DISRUPTION_BUDGETS, _budget(job))] if budgets and job.spec.redundancy.losses else []),
        *gang_parts(job).objects,
    ]
    for _, body in objects:
        body["metadata"] |= {
            "namespace": job.metadata.namespace,
            "labels": common_labels(job),
            "ownerReferences": [owner_reference(job)],
        }
    return tuple(objects)


def _budget(job: MoETrainingJob) -> Object:
    """The largest number of the job's pods that evictions, such as those of drained nodes, may take
    away at once: as many as any parity group can lose."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": job.metadata.name},
        "spec": {
            "maxUnavailable": job.spec.redundancy.losses,
            "selector": {"matchLabels": _TRAINERS | {JOB_LABEL: job.metadata.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def owner_reference(job: MoETrainingJob) -> Object:
    """Reference by which an object is deleted with the job. It does not block the job's deletion:
    that would need a permission on finalizers and gain nothing."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def _pin(spec: Object, node: str) -> None:
    """Have the scheduler put the pod on `node` and nowhere else. Unlike `nodeName`, this keeps its
    accounts of what nodes have left, and its messages about what is missing."""
    for term in _node_terms(spec):
        term["matchFields"] = [{"key": "metadata.name", "operator": "In", "values": [node]}]


def keep_off(spec: Object, nodes: Iterable[str]) -> None:
    """Have the scheduler put the pod on none of `nodes`."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    for term in _node_terms(spec) if fields else ():
        term["matchFields"] = [*term.get("matchFields", ()), *fields]


def _node_terms(spec: Object) -> list[Object]:
    """Terms of the pod's required node affinity. They are alternatives, so what holds for a pod
    goes into each of them."""
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    if not required.get("nodeSelectorTerms"):
        required["nodeSelectorTerms"] = [{}]
    terms: list[Object] = required["nodeSelectorTerms"]
    return terms


def _grace_options(spec: Object) -> list[str]:
    """Options that give workers the time that the template gives its pods."""
    grace_s = spec.get("terminationGracePeriodSeconds")
    if not isinstance(grace_s, int):
        return []  # the API server says what is wrong with it
    return ["--grace-s", str(max(1, grace_s - LAUNCHER_S))]


def _launch(
    job: MoETrainingJob, container: Object, node: str, token_file: str, options: list[str]
) -> None:
    container["command"] = [
        *("python", "-m", "holdfast.launch"),
        *("--socket", SOCKET_PATH),
        *("--job", job.key),
        *("--nodes", str(job.spec.nodes)),
        *("--nproc", str(job.spec.nproc_per_node)),
        *("--member-node", node),
        *("--host", f"$({POD_IP})"),
        *job.launcher_options,
        *options,
        "--",
        *job.command,
    ]
    container.pop("args", None)
    # A launcher that cannot even start logs the reason, which the pod's status then shows.
    container.setdefault("terminationMessagePolicy", LINES_OF_LOG)
    ours = {
        SOCKET_VARIABLE: SOCKET_PATH,
        **job.variables,
        "HOLDFAST_TOKEN_FILE": token_file,
    }
    own = {"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    taken = {*ours, POD_IP}
    given = [entry for entry in container.get("env") or [] if entry["name"] not in taken]
    named = {entry["name"] for entry in given}
    texts = [
        {"name": name, "value": text}
        for name, text in (DEFAULT_VARIABLES | ours).items()
        if name not in named
    ]
    container["env"] = [*given, *texts, own]


def _mount(spec: Object, container: Object, access: _Access) -> None:
    volumes = deepcopy([*access.volumes.values()])
    mounts: list[Object] = [
        {"name": volume["name"], "mountPath": path, "readOnly": True}
        for path, volume in access.volumes.items()
    ]
    given = container.get("volumeMounts") or []
    if all(mount.get("mountPath") != SHARED_MEMORY_PATH for mount in given):
        # A container's own /dev/shm has 64 MiB, too little for NCCL and data loaders.
        volumes.append({"name": "holdfast-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "holdfast-shm", "mountPath": SHARED_MEMORY_PATH})
    spec["volumes"] = [*(spec.get("volumes") or []), *volumes]
    container["volumeMounts"] = [*given, *mounts]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Access:
    """The volume through which a pod reaches its daemon."""

    volumes: Mapping[str, Object]
    """By the path at which each is mounted."""
    token_file: str


_TOKEN: Object = {"audience": TOKEN_AUDIENCE, "expirationSeconds": TOKEN_S, "path": "token"}
_ACCESS = {
    TrainerVolume.CSI: _Access(
        volumes={
            VOLUME_PATH: {"name": "holdfast", "csi": {"driver": CSI_DRIVER, "readOnly": True}}
        },
        token_file=f"{VOLUME_PATH}/token",
    ),
    TrainerVolume.HOST_PATH: _Access(
        volumes={
            SOCKETS_PATH: {
                "name": "holdfast-sockets",
                "hostPath": {"path": SOCKETS_PATH, "type": "Directory"},
            },
            TOKEN_DIRECTORY: {
                "name": "holdfast-token",
                "projected": {"sources": [{"serviceAccountToken": _TOKEN}]},
            },
        },
        token_file=f"{TOKEN_DIRECTORY}/token",
    ),
}
