"""What each permission of Holdfast is for, as something that one can see done, or not done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jobs
from audit import Audit, Permission
from daemon_calls import hello, token_for
from holdfast_system import NAMESPACE, Holdfast
from machine import ClusterError, wait_for

from holdfast_core.errors import HoldfastError

TEAM = "rbac-test"
WAIT_S = 60.0
OPERATOR, DAEMON = f"{NAMESPACE}:holdfast-operator", f"{NAMESPACE}:holdfast-daemon"
LEASE = ("lease", "holdfast-operator", "-n", NAMESPACE)
ENDPOINTS = ("endpointslice", "holdfast-control", "-n", NAMESPACE)

Document = dict[str, Any]


class Scene:
    """The system, and the job that a check makes."""

    def __init__(self, holdfast: Holdfast, name: str) -> None:
        self.holdfast, self.cluster = holdfast, holdfast.cluster
        self.name = name
        self.seen = ""
        """What a check noted when it began."""
        self.audit = Audit(self.cluster.audit_log)

    def job(self, **spec: Any) -> None:
        """Apply a job of one member, whose pod never gets further than its image."""
        self.cluster.apply(jobs.small_job(self.name, TEAM, **spec))

    def queued_job(self, suspend: bool = False, **labels: str) -> None:
        """Apply such a job in a queue of Kueue."""
        document = jobs.small_job(self.name, TEAM, suspend=suspend)
        named = {f"kueue.x-k8s.io/{name.replace('_', '-')}": each for name, each in labels.items()}
        document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"} | named
        self.cluster.apply(document)

    def workload(self) -> Document:
        """The job's Workload; empty without one."""
        label = f"holdfast.dev/job={self.name}"
        found = self.cluster.get("workloads.kueue.x-k8s.io", "-n", TEAM, "-l", label)["items"]
        return found[0] if found else {}

    def short_job(self) -> None:
        """Apply a job that is done at once, and goes."""
        self._run("pass", ttlSecondsAfterFinished=0)

    def failing_job(self) -> None:
        """Apply a job whose rank fails at once."""
        self._run("raise SystemExit(3)")

    def _run(self, program: str, **spec: Any) -> None:
        document = jobs.trainer_job(self.name, namespace=TEAM)
        pod = document["spec"]["trainer"]["template"]["spec"]
        pod["containers"][0] |= {"command": ["python", "-c", program], "args": []}
        self.cluster.apply(jobs.small_job(self.name, TEAM, pod, **spec))

    def record(self, failures: Mapping[str, str | None]) -> None:
        """Write into the record of nodes, as another operator would."""
        words = ("configmap", "holdfast-node-record", "-n", NAMESPACE, "--type=merge")
        self.cluster.kubectl("patch", *words, "-p", json.dumps({"data": failures}))

    def open_nodes(self) -> None:
        """Undo by hand what was done to suspect nodes."""
        self.record({SUSPECT_NODE: None})
        mark = {"metadata": {"annotations": {"holdfast.dev/suspect": None}}}
        self.cluster.kubectl("patch", "node", SUSPECT_NODE, "--type=merge", "-p", json.dumps(mark))
        with suppress(ClusterError):  # it has no taint
            self.cluster.kubectl("taint", "node", SUSPECT_NODE, "holdfast.dev/suspect-")

    def find(self, kind: str, name: str = "") -> Document:
        """An object of the job's namespace; empty when there is none."""
        with suppress(ClusterError):
            found: Document = self.cluster.get(kind, name or self.name, "-n", TEAM)
            return found
        return {}

    def status(self) -> Document:
        found: Document = self.find("moejob").get("status") or {}
        return found

    def pods(self) -> list[Document]:
        """The job's pods that are not being deleted."""
        label = f"holdfast.dev/job={self.name}"
        found = self.cluster.get("pods", "-n", TEAM, "-l", label)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def wait_standby(self) -> None:
        """Return when one operator leads and another waits to follow, and none of an earlier
        release goes on working."""
        ready = "{.status.readyReplicas}/{.status.updatedReplicas}/{.status.replicas}"
        words = ("deployment", "holdfast-operator", "-n", NAMESPACE, "-o", f"jsonpath={ready}")
        label = ("-l", "app.kubernetes.io/component=operator")

        def stands_by() -> bool:
            found = self.cluster.get("pods", "-n", NAMESPACE, *label)["items"]
            pods = [pod["metadata"] for pod in found]
            ends = any("deletionTimestamp" in pod for pod in pods)
            leads = self.holdfast.leader() in [pod["name"] for pod in pods]
            return self.cluster.kubectl("get", *words) == "2/2/2" and leads and not ends

        wait_for("two operators", stands_by, WAIT_S)

    def change_leader(self) -> None:
        """Let the other operator follow."""
        leader = self.holdfast.leader()
        self.cluster.kubectl("delete", "pod", leader, "-n", NAMESPACE, "--wait=false")
        wait_for("another leader", lambda: self.holdfast.leader() not in ("", leader), WAIT_S)

    def endpoint(self) -> str:
        """Address that daemons are sent to; empty when there is none."""
        with suppress(ClusterError):
            return str(self.cluster.get(*ENDPOINTS)["endpoints"][0]["addresses"][0])
        return ""

    def leader_address(self) -> str:
        with suppress(ClusterError):
            pod = self.cluster.get("pod", self.holdfast.leader(), "-n", NAMESPACE)
            return str(pod["status"].get("podIP", ""))
        return ""

    def used(self, account: str) -> set[Permission]:
        """What was asked and allowed since the check began."""
        return {r.permission for r in self.audit.requests(account) if not r.refused}

    def refused(self, account: str) -> set[Permission]:
        return {r.permission for r in self.audit.requests(account) if r.refused}


# --- what each permission is for ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What the system does by a permission.

    Args:
        provoke: makes the system want to use it.
        done: whether it has done so.
        again: it does not try again by itself, so that it is provoked once more.
        changes_leader: the permission is used when an operator begins to lead.
        refusal: what is refused without it; the permission itself when None.
        values: of the chart, when the rule is not among its default ones.
    """

    provoke: Callable[[Scene], None]
    done: Callable[[Scene], object]
    again: bool = False
    changes_leader: bool = False
    refusal: Permission | None = None
    account: str = OPERATOR
    values: Mapping[str, str] = field(default_factory=dict)


def _job_of_a_new_leader(scene: Scene) -> None:
    scene.change_leader()
    scene.job()


def suspended_job(scene: Scene) -> None:
    """A job that has had its pod, and shall have none."""
    scene.job()
    wait_for("the pod", scene.pods, WAIT_S)
    scene.job(suspend=True)


def _job_whose_pod_is_there(scene: Scene) -> None:
    container = {"name": "trainer", "image": "localhost/none", "imagePullPolicy": "Never"}
    metadata = {"name": f"{scene.name}-0-1", "namespace": TEAM}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    scene.cluster.apply({**pod, "spec": {"containers": [container]}})
    scene.job()


def _put(scene: Scene, version: str, kind: str, suffix: str = "", **fields: Any) -> None:
    """Make an object of somebody else with the name of one that a job gets."""
    metadata = {"name": f"{scene.name}{suffix}", "namespace": TEAM}
    scene.cluster.apply({"apiVersion": version, "kind": kind, "metadata": metadata, **fields})


def _job_whose_names_are_taken(scene: Scene) -> None:
    _put(scene, "v1", "Service", spec={"clusterIP": "None", "selector": {"app": "web"}})
    _put(scene, "v1", "ServiceAccount", "-trainer")
    scene.job()


def _job_whose_role_is_taken(scene: Scene) -> None:
    version, group = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    _put(scene, version, "Role", "-trainer", rules=[])
    reference = {"apiGroup": group, "kind": "Role", "name": f"{scene.name}-trainer"}
    _put(scene, version, "RoleBinding", "-trainer", roleRef=reference)
    scene.job()


PROTECTED: Document = {
    "nodes": 2,
    "parallelism": {"dp": 2, "ep": 1},
    "redundancy": {"type": "RAIM5"},
}
"""Part of a job that can bear the loss of a node."""


def _protected_job(scene: Scene) -> None:
    scene.job(**PROTECTED)


def _job_whose_budget_is_taken(scene: Scene) -> None:
    _put(scene, "policy/v1", "PodDisruptionBudget", spec={"maxUnavailable": 1})
    _protected_job(scene)


def _gang_whose_group_is_taken(name: str, version: str) -> Callable[[Scene], None]:
    def provoke(scene: Scene) -> None:
        scene.change_leader()
        _put(scene, version, "PodGroup", spec={"minMember": 1})
        scene.job(scheduling={"gang": name})

    return provoke


def _names_the_owner(scene: Scene) -> bool:
    """Whether the job shows that a name is taken."""
    found = scene.status().get("conditions") or []
    return any(c["type"] == "PodsRefused" and c["reason"] == "NameTaken" for c in found)


def _deleted_for_a_new_leader(kind: str, suffix: str = "", **spec: Any) -> Callable[[Scene], None]:
    """Delete an object of a job whose pod is there."""

    def provoke(scene: Scene) -> None:
        scene.change_leader()
        scene.job(**spec)
        wait_for("the pod", scene.pods, WAIT_S)
        scene.cluster.kubectl("delete", kind, f"{scene.name}{suffix}", "-n", TEAM)

    return provoke


def _note_renewal(scene: Scene) -> None:
    scene.seen = scene.cluster.get(*LEASE)["spec"]["renewTime"]


def _is_renewed(scene: Scene) -> bool:
    return bool(scene.cluster.get(*LEASE)["spec"]["renewTime"] > scene.seen)


def _delete(*what: str) -> Callable[[Scene], None]:
    def provoke(scene: Scene) -> None:
        scene.cluster.kubectl("delete", *what)

    return provoke


def _exists(*what: str) -> Callable[[Scene], bool]:
    def done(scene: Scene) -> bool:
        with suppress(ClusterError):
            return bool(scene.cluster.get(*what))
        return False

    return done


def _made(kind: str, suffix: str = "") -> Check:
    """Of an object that a job gets."""
    return Check(provoke=Scene.job, done=lambda scene: scene.find(kind, f"{scene.name}{suffix}"))


def _is_known(scene: Scene) -> bool:
    """Whether the daemon takes the pod for one of its job."""
    pod = scene.pods()[0]
    token = token_for(scene.cluster, pod["metadata"]["name"], TEAM)
    try:
        return bool(hello(scene.cluster, pod["spec"]["nodeName"], token, f"{TEAM}.{scene.name}"))
    except HoldfastError as error:
        scene.seen = str(error)
        return False


def _show_token(scene: Scene) -> None:
    scene.job()
    wait_for("the pod", lambda: [p for p in scene.pods() if "nodeName" in p["spec"]], WAIT_S)
    assert not _is_known(scene)
    assert "let its service account create tokenreviews.authentication.k8s.io" in scene.seen


def _events(scene: Scene) -> bool:
    chosen = f"regarding.name={scene.name},regarding.kind=MoETrainingJob"
    words = ("events.events.k8s.io", "-n", TEAM, "--field-selector", chosen)
    return bool(scene.cluster.get(*words)["items"])


def _change_daemons(scene: Scene) -> None:
    scene.seen = str(_renewal_events(scene))
    scene.holdfast.change_daemons(scene.name)


def _daemons_for_a_new_leader(scene: Scene) -> None:
    scene.change_leader()
    _change_daemons(scene)


def _renewal_events(scene: Scene) -> int:
    """Number of events about the renewal of daemons."""
    chosen = "regarding.kind=DaemonSet,reason=RenewingDaemon"
    words = ("events.events.k8s.io", "-n", NAMESPACE, "--field-selector", chosen)
    return len(scene.cluster.get(*words)["items"])


def _recorded_failures(scene: Scene) -> bool:
    """Whether the record has a failure of the job."""
    found = scene.cluster.get("configmap", "holdfast-node-record", "-n", NAMESPACE)
    return any(f"{TEAM}.{scene.name}" in text for text in (found.get("data") or {}).values())


def _suspect(scene: Scene, failures: int = 3) -> None:
    """Have a node's record say that it was lost several times."""
    failure = {"kind": "LostNode", "job": f"{TEAM}.{scene.name}", "at": time.time() - 60.0}
    lost = [failure | {"epoch": epoch} for epoch in range(failures)]
    scene.record({SUSPECT_NODE: json.dumps(lost)})


def _is_closed(scene: Scene) -> bool:
    taints = scene.cluster.get("node", SUSPECT_NODE)["spec"].get("taints") or []
    return any(taint["key"] == "holdfast.dev/suspect" for taint in taints)


def _open_or_suspect(scene: Scene) -> None:
    scene.seen = str(_node_events(scene))
    if _is_closed(scene):
        scene.record({SUSPECT_NODE: None})
    else:
        _suspect(scene, failures=4)  # in other words than before, which would be a repetition


def _node_events(scene: Scene) -> int:
    """Number of events about what was done to suspect nodes."""
    chosen = f"regarding.kind=Node,regarding.name={SUSPECT_NODE}"
    found = scene.cluster.get("events.events.k8s.io", "-n", "default", "--field-selector", chosen)
    return sum(each["reason"] in ("NodeSuspected", "NodeOpened") for each in found["items"])


def _gang(name: str) -> Callable[[Scene], None]:
    return lambda scene: scene.job(scheduling={"gang": name})


def _job_that_leaves_its_queue(scene: Scene) -> None:
    scene.queued_job()
    wait_for("the Workload", scene.workload, WAIT_S)
    scene.queued_job(suspend=True)


def _admitted_job(scene: Scene) -> None:
    """A queued job, admitted in Kueue's place with a flavor that exists."""
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor"}
    scene.cluster.apply({**flavor, "metadata": {"name": "any"}})
    scene.queued_job()
    wait_for("the Workload", scene.workload, WAIT_S)
    time = "2026-01-01T00:00:00Z"
    admitted = {"type": "Admitted", "status": "True", "reason": "Admitted", "message": ""}
    status = {
        "conditions": [{**admitted, "lastTransitionTime": time}],
        "admission": {"podSetAssignments": [{"name": "main", "flavors": {"cpu": "any"}}]},
    }
    name = scene.workload()["metadata"]["name"]
    words = ("workloads.kueue.x-k8s.io", name, "-n", TEAM, "--subresource=status", "--type=merge")
    scene.cluster.kubectl("patch", *words, "-p", json.dumps({"status": status}))


def _queued_job_of_a_new_leader(scene: Scene) -> None:
    scene.change_leader()
    scene.queued_job()


def _urgent_job(scene: Scene) -> None:
    kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass"}
    scene.cluster.apply({**kind, "metadata": {"name": "urgent"}, "value": 7})
    scene.queued_job(priority_class="urgent")


def _reports_pods(scene: Scene) -> bool:
    conditions = (scene.workload().get("status") or {}).get("conditions") or []
    return any(each["type"] == "PodsReady" for each in conditions)


RENEWAL = {"daemon__updateStrategy__type": "Protected", "operator__watchNamespaces[0]": TEAM}
GANGS = {"gangScheduling__volcano": "true", "gangScheduling__coscheduling": "true"}
KUEUE = {"kueue__enabled": "true"}
SUSPECTS = {"operator__suspectNodes": "Taint", "operator__watchNamespaces[0]": TEAM}
SUSPECT_NODE = "node5"
CREATE_ROLE = Permission(verb="create", group="rbac.authorization.k8s.io", resource="roles")
GET_POD = Permission(verb="get", group="", resource="pods")

CHECKS = {
    "jobs-watch": Check(provoke=_job_of_a_new_leader, done=Scene.status, changes_leader=True),
    # An account may grant only what it may do itself.
    "jobs-get": Check(
        provoke=Scene.job,
        done=lambda scene: scene.find("role", f"{scene.name}-trainer"),
        refusal=CREATE_ROLE,
    ),
    "jobs-patch": Check(
        provoke=Scene.job, done=lambda scene: scene.find("moejob")["metadata"].get("finalizers")
    ),
    "jobs-delete": Check(provoke=Scene.short_job, done=lambda scene: not scene.find("moejob")),
    "jobs-status": Check(provoke=Scene.job, done=Scene.status),
    "pods-watch": Check(provoke=_job_of_a_new_leader, done=Scene.status, changes_leader=True),
    "pods-get": Check(
        provoke=_job_whose_pod_is_there,
        done=lambda scene: GET_POD in scene.used(OPERATOR),
        again=True,
    ),
    "pods-create": Check(provoke=Scene.job, done=Scene.pods, again=True),
    "pods-delete": Check(provoke=suspended_job, done=lambda scene: not scene.pods()),
    "services-create": _made("service"),
    "serviceaccounts-create": _made("serviceaccount", "-trainer"),
    "roles-create": _made("role", "-trainer"),
    "rolebindings-create": _made("rolebinding", "-trainer"),
    "shared-get": Check(provoke=_job_whose_names_are_taken, done=_names_the_owner),
    "shared-watch": Check(
        provoke=_deleted_for_a_new_leader("service"),
        done=lambda scene: scene.find("service"),
        changes_leader=True,
    ),
    "shared-roles-get": Check(provoke=_job_whose_role_is_taken, done=_names_the_owner),
    "shared-roles-watch": Check(
        provoke=_deleted_for_a_new_leader("rolebinding", "-trainer"),
        done=lambda scene: scene.find("rolebinding", f"{scene.name}-trainer"),
        changes_leader=True,
    ),
    "budgets-create": Check(
        provoke=_protected_job, done=lambda scene: scene.find("poddisruptionbudget")
    ),
    "budgets-get": Check(provoke=_job_whose_budget_is_taken, done=_names_the_owner),
    "budgets-watch": Check(
        provoke=_deleted_for_a_new_leader("poddisruptionbudget", **PROTECTED),
        done=lambda scene: scene.find("poddisruptionbudget"),
        changes_leader=True,
    ),
    "events-create": Check(provoke=Scene.job, done=_events, again=True),
    "volcano-create": Check(
        provoke=_gang("Volcano"),
        done=lambda scene: scene.find("podgroups.scheduling.volcano.sh"),
        values=GANGS,
    ),
    "coscheduling-create": Check(
        provoke=_gang("Coscheduling"),
        done=lambda scene: scene.find("podgroups.scheduling.x-k8s.io"),
        values=GANGS,
    ),
    "volcano-watch": Check(
        provoke=_gang_whose_group_is_taken("Volcano", "scheduling.volcano.sh/v1beta1"),
        done=_names_the_owner,
        changes_leader=True,
        values=GANGS,
    ),
    "coscheduling-watch": Check(
        provoke=_gang_whose_group_is_taken("Coscheduling", "scheduling.x-k8s.io/v1alpha1"),
        done=_names_the_owner,
        changes_leader=True,
        values=GANGS,
    ),
    "workloads-watch": Check(
        provoke=_queued_job_of_a_new_leader,
        done=Scene.workload,
        changes_leader=True,
        values=KUEUE,
    ),
    "workloads-create": Check(provoke=Scene.queued_job, done=Scene.workload, values=KUEUE),
    "workloads-delete": Check(
        provoke=_job_that_leaves_its_queue, done=lambda scene: not scene.workload(), values=KUEUE
    ),
    "workloads-status": Check(provoke=_admitted_job, done=_reports_pods, values=KUEUE),
    "flavors-get": Check(provoke=_admitted_job, done=Scene.pods, values=KUEUE),
    "workloadpriorities-get": Check(provoke=_urgent_job, done=Scene.workload, values=KUEUE),
    "priorities-list": Check(provoke=Scene.queued_job, done=Scene.workload, values=KUEUE),
    "nodes-watch": Check(provoke=_job_of_a_new_leader, done=Scene.status, changes_leader=True),
    "nodes-patch": Check(provoke=_suspect, done=_is_closed, values=SUSPECTS),
    "nodes-events": Check(
        provoke=_open_or_suspect,
        done=lambda scene: _node_events(scene) > int(scene.seen),
        again=True,
        values=SUSPECTS,
    ),
    "daemons-watch": Check(
        provoke=_job_of_a_new_leader,
        done=Scene.status,
        changes_leader=True,
        values=RENEWAL,
    ),
    "daemons-delete": Check(
        provoke=_change_daemons, done=lambda scene: scene.holdfast.renewed(), values=RENEWAL
    ),
    "daemons-events": Check(
        provoke=_change_daemons,
        done=lambda scene: _renewal_events(scene) > int(scene.seen),
        again=True,
        values=RENEWAL,
    ),
    "revisions-watch": Check(
        provoke=_daemons_for_a_new_leader,
        done=lambda scene: scene.holdfast.renewed(),
        changes_leader=True,
        values=RENEWAL,
    ),
    "lease-create": Check(provoke=_delete(*LEASE), done=_exists(*LEASE)),
    "lease-renew": Check(provoke=_note_renewal, done=_is_renewed),
    "endpoints-create": Check(provoke=_delete(*ENDPOINTS), done=_exists(*ENDPOINTS)),
    "endpoints-renew": Check(
        provoke=Scene.change_leader,
        done=lambda scene: scene.endpoint() == scene.leader_address() != "",
        changes_leader=True,
    ),
    "node-record": Check(provoke=Scene.failing_job, done=_recorded_failures),
    "tokenreviews-create": Check(provoke=_show_token, done=_is_known, account=DAEMON),
}
