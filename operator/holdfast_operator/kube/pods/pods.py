"""Reads trainers' pods for the reconciler. Pure, and tolerant, because the cluster may have changed
them.

A pod with a job's label but without an attempt's label is adopted: another controller has made it.
Its number comes from that controller (`NUMBERS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from holdfast_core.last_lines import last_lines, secrets_among
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.kube.client.amounts import Amounts, amounts
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import ATTEMPT_LABEL, JOB_LABEL, MEMBER_LABEL
from holdfast_operator.kube.pods.containers import (
    others_run,
    starts_again,
    trainer_container,
    trainer_status,
)
from holdfast_operator.kube.pods.manifests import GRACE_S, NODE_ANNOTATION
from holdfast_operator.kube.pods.pod_reasons import disruption_of, end_of
from holdfast_operator.kube.pods.shared_objects import controller_of
from holdfast_operator.reconciler.observe.views import AgentState, AgentView, StartAgent

NUMBERS = (
    MEMBER_LABEL,
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
)
"""Labels that number the pods of another controller, the first that is there: our own, those of an
indexed Job and of a StatefulSet."""
JOBSET = "jobset.sigs.k8s.io"
UNNUMBERED = -1
"""Member of an adopted pod without a number."""

SCHEDULED = "PodScheduled"
_ENDED = ("Succeeded", "Failed")
"""Phases in which no container of a pod starts again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPod:
    """One pod of a job."""

    namespace: str
    name: str
    uid: str
    job: str
    """Name of the job."""
    owner: str
    """Uid of the job that the pod was made for."""
    member: int
    """Index of the member; for an adopted pod its number, which is the position of its member."""
    attempt: int
    """Grows with each pod of a member; of an adopted pod, the time when it was made."""
    node: str
    state: AgentState
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    disruption: str = ""
    last_lines: str = ""
    """Last lines that the pod's container wrote before it failed."""
    requests: Amounts = ()
    adopted: bool = False
    """Whether another controller has made it."""
    grace_s: int = GRACE_S
    """Seconds between SIGTERM and SIGKILL."""
    trainer_ended: bool = False
    """Whether its trainer has ended, also while the pod is being stopped."""
    others_run: bool = False
    """Whether a container beside the trainer's is running."""

    @property
    def job_key(self) -> str:
        return f"{self.namespace}.{self.job}"


def read_pod(raw: Object) -> TrainerPod | None:
    """Read a pod from the API's form; None when its labels are not those of a trainer."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    labels = metadata.get("labels") or {}
    adopted = ATTEMPT_LABEL not in labels
    try:
        job = labels[JOB_LABEL]
        if adopted:
            member = number_of(labels)
            attempt = int(datetime.fromisoformat(metadata["creationTimestamp"]).timestamp())
        else:
            member, attempt = int(labels[MEMBER_LABEL]), int(labels[ATTEMPT_LABEL])
    except (KeyError, ValueError):
        return None
    annotations = metadata.get("annotations") or {}
    state, exit_code, reason, message, written = _state(raw)
    in_its_pod = adopted and status.get("phase") not in _ENDED
    if exit_code is not None and in_its_pod and starts_again(raw, exit_code):
        state, exit_code = AgentState.STARTING, None
    return TrainerPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        job=job,
        owner=controller_of(raw).get("uid", ""),
        member=member,
        attempt=attempt,
        node=annotations.get(NODE_ANNOTATION) or spec.get("nodeName", ""),
        state=state,
        exit_code=exit_code,
        reason=reason,
        message=message,
        disruption=disruption_of(status),
        last_lines=_last_lines(raw, written) if state is AgentState.EXITED else "",
        requests=amounts(spec),
        adopted=adopted,
        grace_s=spec.get("terminationGracePeriodSeconds", GRACE_S),
        trainer_ended="terminated" in (trainer_status(raw).get("state") or {}),
        others_run=others_run(raw),
    )


def number_of(labels: Mapping[str, str]) -> int:
    """Number that its controller has given to a pod; UNNUMBERED without a number, or with an
    ambiguous one."""
    found = next((labels[name] for name in NUMBERS if name in labels), "")
    if MEMBER_LABEL not in labels and labels.get(f"{JOBSET}/replicatedjob-replicas", "1") != "1":
        # Many Jobs of the same pods: the Job's number counts, where each has one pod.
        found = labels.get(f"{JOBSET}/job-index", "") if found in ("", "0") else ""
    return int(found) if found.isascii() and found.isdigit() else UNNUMBERED


def adopted_agents(
    pods: Iterable[TrainerPod], membership: Membership | None
) -> tuple[AgentView, ...]:
    """The agents of a job whose pods another controller makes: the newest pod of each number, as
    the agent of the member on its node. A pod that has failed, or is to be removed, does not count,
    since its controller makes another; but a container that has ended starts again in its pod."""
    on = {} if membership is None else {m.node: m.index for m in membership.members}
    newest: dict[object, TrainerPod] = {}
    for pod in pods:
        key = pod.name if pod.member == UNNUMBERED else pod.member
        other = newest.get(key)
        if other is None or _rank(pod) > _rank(other):
            newest[key] = pod
    return tuple(
        AgentView(
            member=on.get(pod.node, UNNUMBERED),
            node=pod.node,
            state=pod.state,
            exit_code=pod.exit_code,
            reason=pod.reason,
            message=pod.message or f"pod {pod.name}",
            number=pod.member,
        )
        for pod in sorted(newest.values(), key=lambda pod: (pod.member, pod.name))
        if pod.state is not AgentState.STOPPING and not pod.exit_code
    )


def pod_names(
    pods: Iterable[TrainerPod], membership: Membership | None
) -> dict[tuple[int, str], str]:
    """(member, node) → the name of its newest pod."""
    on = {} if membership is None else {m.node: m.index for m in membership.members}
    return {
        (on.get(pod.node, UNNUMBERED) if pod.adopted else pod.member, pod.node): pod.name
        for pod in sorted(pods, key=_rank)
    }


def agents(pods: Iterable[TrainerPod], pending: Iterable[StartAgent] = ()) -> tuple[AgentView, ...]:
    """The members' agents: for each member and node the newest pod that is not being stopped, or
    else the newest that is; and those whose pods are still to be created. A pod that is being
    stopped is no agent any more once its trainer has ended, though a sidecar may still work, unless
    it shows that the cluster takes it away."""
    newest: dict[tuple[int, str], TrainerPod] = {}
    for pod in pods:
        if pod.state is AgentState.STOPPING and pod.trainer_ended and not pod.disruption:
            continue
        key = (pod.member, pod.node)
        other = newest.get(key)
        if other is None or _rank(pod) > _rank(other):
            newest[key] = pod
    found = {
        key: AgentView(
            member=pod.member,
            node=pod.node,
            state=pod.state,
            exit_code=pod.exit_code,
            reason=pod.reason,
            message=pod.message,
            disruption=pod.disruption,
            last_lines=pod.last_lines,
        )
        for key, pod in newest.items()
    }
    for start in pending:
        starting = AgentView(member=start.member, node=start.node, state=AgentState.STARTING)
        found[start.member, start.node] = starting
    return tuple(agent for _, agent in sorted(found.items()))


def _rank(pod: TrainerPod) -> tuple[bool, int]:
    return pod.state is not AgentState.STOPPING, pod.attempt


def _state(raw: Object) -> tuple[AgentState, int | None, str, str, str]:
    """(state, exit code, reason in one word, reason in a sentence, end of the log)."""
    if raw["metadata"].get("deletionTimestamp"):
        return AgentState.STOPPING, None, "", "", ""
    status, trainer = raw.get("status") or {}, trainer_status(raw)
    end = end_of(raw.get("spec") or {}, status, trainer)
    if end is not None:
        return AgentState.EXITED, end.exit_code, end.reason, end.message, end.written
    state = trainer.get("state") or {}
    if status.get("phase", "Pending") == "Running" and "running" in state:
        return AgentState.RUNNING, None, "", "", ""
    return AgentState.STARTING, None, *_waits_for(status, state), ""


def _last_lines(raw: Object, written: str) -> str:
    """End of the log of a container that failed, which the kubelet reports by
    `terminationMessagePolicy: FallbackToLogsOnError`. Secret variables of the template are
    hidden."""
    given = trainer_container(raw).get("env") or []
    variables = {str(each.get("name")): str(each.get("value", "")) for each in given}
    return last_lines(written, secrets_among(variables))


def _waits_for(status: Object, trainer_state: Object) -> tuple[str, str]:
    unscheduled = _condition(status, SCHEDULED, "False")
    if unscheduled:
        return _why(unscheduled)
    inits = [each.get("state") or {} for each in status.get("initContainerStatuses") or []]
    for state in (*inits, trainer_state):
        waiting = state.get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing"):
            return _why(waiting)
    return "", ""


def _condition(status: Object, kind: str, value: str) -> Object:
    conditions: list[Object] = status.get("conditions") or []
    matching = (c for c in conditions if c.get("type") == kind and c.get("status") == value)
    return next(matching, {})


def _why(found: Object) -> tuple[str, str]:
    return found.get("reason", ""), found.get("message", "").strip()
