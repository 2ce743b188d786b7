"""A job's status as the API shows it. Pure.

A copy for readers: only `counters` is ever read back by the operator, and all of it may be deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast_core.jobs import MoETrainingJob
from holdfast_core.loss_reports import JobLoss
from holdfast_core.states import RestoreSource
from holdfast_core.values import Generation, Membership
from holdfast_operator.conditions import newest_protected, newest_step, refused
from holdfast_operator.conditions import phase as phase_of
from holdfast_operator.counters import counters, to_document
from holdfast_operator.kube.api import Object
from holdfast_operator.kube.manifests import JOB_LABEL
from holdfast_operator.kube.times import ClockPair, micro_timestamp, seconds_of
from holdfast_operator.last_failure import TrainerFailure
from holdfast_operator.lookups import agent_at
from holdfast_operator.losses import loss_text
from holdfast_operator.recoveries import Recovery
from holdfast_operator.traffic import ProtectionTraffic, traffic_of, traffic_text
from holdfast_operator.views import (
    Condition,
    ConditionType,
    Decision,
    Observed,
)

RECOVERIES_SHOWN = 10
RATIO_DIGITS = 6
PROBLEM_CHARACTERS_MAX = 1024
MESSAGE_CHARACTERS_MAX = 32768


def status_of(
    job: MoETrainingJob,
    observed: Observed,
    decision: Decision,
    *,
    previous: Object,
    pods: Mapping[tuple[int, str], str],
    recoveries: Sequence[Recovery],
    clocks: ClockPair,
    now: float,
) -> Object:
    """The status after one look.

    Args:
        previous: the status before; conditions keep their transition times.
        pods: (member, node) → name of the pod.
        recoveries: oldest first, with wall-clock times.
    """
    state, membership = decision.state, decision.state.membership
    phase = phase_of(decision.conditions)
    ready, nodes_ready = _at_work(observed, membership)
    step = newest_step(observed, membership) if membership is not None else 0
    protected = newest_protected(observed)
    if protected is None and state.outcome is not None and previous.get("protected"):
        protected = Generation.parse(previous["protected"])  # its memory was freed
    status: Object = {
        "phase": phase,
        "epoch": state.epoch,
        "step": step or _step_before(previous, state.epoch, state.started_from),
        "ready": ready,
        "desired": job.world_size,
        "readyText": f"{ready}/{job.world_size}",
        "nodesReady": nodes_ready,
        "restarts": state.counted,
        "recoveries": state.recoveries,
        "observedGeneration": job.metadata.generation,
        "selector": f"{JOB_LABEL}={job.metadata.name}",
        "conditions": conditions_of(
            decision.conditions, job.metadata.generation, previous, clocks.text(now)
        ),
        "members": _members(observed, membership, pods),
        "lastRecoveries": [_recovery(each) for each in recoveries[-RECOVERIES_SHOWN:]],
        "counters": to_document(counters(state, now=clocks.now, wall=clocks.wall)),
    }
    if protected is not None:
        status |= {"protected": str(protected), "protectedStep": protected.step}
    started = previous.get("startedAt") or (clocks.text(now) if membership is not None else None)
    if started:
        status["startedAt"] = started
    if state.ended_at is not None:
        status["endedAt"] = clocks.text(state.ended_at)
    if state.failure is not None:
        status["lastFailure"] = _failure(state.failure)
    if state.losses is not None:
        status["tokenLoss"] = _token_loss(state.losses)
    traffic = traffic_of(observed, membership)
    if traffic is not None:
        status["protectionTraffic"] = _traffic(traffic)
    problem = _problem(decision, phase)
    if problem:
        status["problem"] = problem[:PROBLEM_CHARACTERS_MAX]
    return status


def refusal_status(resource: Object, reason: str, message: str, now: str) -> Object:
    """The status of a job that cannot be carried out as it is written; `resource` is the job."""
    previous = resource.get("status") or {}
    generation = resource["metadata"].get("generation", 0)
    refusal = refused(reason, message)
    told = conditions_of(refusal, generation, previous, now)
    names = {each["type"] for each in told}
    others = [c for c in previous.get("conditions") or [] if c["type"] not in names]
    return {
        **previous,
        "phase": phase_of(refusal),
        "problem": message[:PROBLEM_CHARACTERS_MAX],
        "observedGeneration": generation,
        "conditions": [*told, *others],
    }


def conditions_of(
    conditions: Sequence[Condition], generation: int, previous: Object, now: str
) -> list[Object]:
    """Conditions in the standard form; a transition time changes with the status alone."""
    earlier = {each["type"]: each for each in previous.get("conditions") or []}
    found = []
    for condition in conditions:
        status = condition.status_word
        before = earlier.get(condition.type.value, {})
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        found.append(
            {
                "type": condition.type.value,
                "status": status,
                "reason": condition.reason,
                "message": condition.message[:MESSAGE_CHARACTERS_MAX],
                "observedGeneration": generation,
                "lastTransitionTime": since or now,
            }
        )
    return found


def essence(status: Object) -> object:
    """What of a status must be written at once, and before actions are carried out: what a control
    loop that starts again must not forget, and what people wait for. Two equal ones may differ in
    steps and texts."""
    kept = {**(status.get("counters") or {})}
    kept.pop("saved", None)  # grows with every step
    kept.pop("losses", None)  # likewise
    kept["stored"] = bool(kept.get("stored"))  # whether there is a copy matters, not which
    conditions = [(c["type"], c["status"], c["reason"]) for c in status.get("conditions") or []]
    names = ("phase", "epoch", "observedGeneration")
    return (*(status.get(name) for name in names), conditions, kept)


def recoveries_of(status: Object) -> list[Recovery]:
    """The recoveries in a status, for a control loop that starts again. The last one, if it was not
    over, is taken up again."""
    found = []
    for each in status.get("lastRecoveries") or []:
        seconds, at = each.get("seconds"), seconds_of(each.get("detectedAt")) or 0.0
        source = RestoreSource.of(each.get("source", ""))
        found.append(
            Recovery(
                epoch=status.get("epoch", 0) if seconds is None else 0,
                cause=each.get("cause", ""),
                decided_at=at,
                step_before=status.get("step", 0),
                resumed_at=None if seconds is None else at + seconds,
                restored_step=each.get("restoredStep"),
                lost_steps=each.get("lostSteps"),
                sources=((0, source),) if source else (),
                advanced_at=None if seconds is None else at + seconds,
            )
        )
    return found


def _step_before(previous: Object, epoch: int, started_from: int | None) -> int:
    """The newest step that is known when no rank tells of any, such as after the end."""
    reached: int = previous.get("step", 0)
    same = previous.get("epoch") == epoch
    return max(reached, started_from or 0) if same else started_from or reached


def _at_work(observed: Observed, membership: Membership | None) -> tuple[int, int]:
    """(ranks at work, nodes whose ranks are all at work)."""
    if membership is None:
        return 0, 0
    views = [view for view in observed.views(membership) if view is not None]
    at_work = [sum(rank.state.at_work for rank in view.ranks) for view in views]
    return sum(at_work), at_work.count(membership.nproc_per_node)


def _members(
    observed: Observed, membership: Membership | None, pods: Mapping[tuple[int, str], str]
) -> list[Object]:
    members = []
    for place in membership.members if membership is not None else ():
        agent = agent_at(observed, place)
        members.append(
            {
                "index": place.index,
                "node": place.node,
                "pod": pods.get((place.index, place.node), ""),
                "state": "absent" if agent is None else agent.state.value,
            }
        )
    return members


def _recovery(recovery: Recovery) -> Object:
    found: Object = {"cause": recovery.cause, "detectedAt": micro_timestamp(recovery.decided_at)}
    if recovery.restored_step is not None:
        found["restoredStep"] = recovery.restored_step
    if recovery.lost_steps is not None:
        found["lostSteps"] = recovery.lost_steps
    if recovery.resumed_at is not None:
        found["seconds"] = round(recovery.resumed_at - recovery.decided_at, 3)
        found["source"] = recovery.source
    return found


def _failure(failure: TrainerFailure) -> Object:
    code, lines = failure.exit_code, failure.last_lines
    return {
        "text": failure.text,
        "epoch": failure.epoch,
        "member": failure.member,
        **({} if code is None else {"exitCode": code}),
        **({"lastLines": lines} if lines else {}),
    }


def _token_loss(loss: JobLoss) -> Object:
    return {
        "lost": f"{loss.lost:.2%}",
        "lostTokens": loss.lost_tokens,
        "lostRatio": round(loss.lost, RATIO_DIGITS),
        "lostMLT": round(loss.lost_mlt, RATIO_DIGITS),
        "atRiskRatio": round(loss.at_risk, RATIO_DIGITS),
        "atRiskMLT": round(loss.at_risk_mlt, RATIO_DIGITS),
        "limit": loss.limit,
        "expertsPerLayer": loss.k,
        "text": loss_text(loss),
    }


def _traffic(traffic: ProtectionTraffic) -> Object:
    return {
        "nodeBytesPerSecond": traffic.node_bytes_s,
        "bytesPerSecond": traffic.bytes_s,
        **({"limit": traffic.limit_bytes_s} if traffic.limit_bytes_s else {}),
        "text": traffic_text(traffic),
    }


def _problem(decision: Decision, phase: str) -> str:
    if phase == ConditionType.FAILED.value:
        return decision.state.outcome_reason
    if phase in (ConditionType.RUNNING.value, ConditionType.COMPLETE.value, "Suspended"):
        return ""
    return decision.reason
