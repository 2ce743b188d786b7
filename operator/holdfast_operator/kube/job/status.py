"""A job's status as the API shows it. Pure.

The status is a copy for readers: all of it may be deleted. A new control loop reads back the
`counters`, and the lists that it continues: members, recoveries, times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.experts.loss_reports import JobLoss
from holdfast_core.job.hang_story import hang_from
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import (
    CorruptionStatus,
    ExpertsStatus,
    FailureStatus,
    HangDetectionStatus,
    HangStatus,
    JobCondition,
    JobStatus,
    MemberStatus,
    PaceStatus,
    Phase,
    ProtectionTrafficStatus,
    SlowLinksStatus,
    StragglerStatus,
    StrengthStatus,
    TokenLossStatus,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import RestoreSource
from holdfast_core.stragglers import Straggler
from holdfast_operator.kube.client.resources import JOB_LABEL
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.reconciler.failures.keeping import kept_until
from holdfast_operator.reconciler.failures.slow_links import in_words as slow_links_in_words
from holdfast_operator.reconciler.failures.unprotected import is_unprotected
from holdfast_operator.reconciler.membership.joining import joining_state
from holdfast_operator.reconciler.membership.shrinking import Strength, strength
from holdfast_operator.reconciler.membership.staying import recovery_mode
from holdfast_operator.reconciler.observe.counters import to_document
from holdfast_operator.reconciler.observe.last_failure import LastCorruption, TrainerFailure
from holdfast_operator.reconciler.observe.lookups import agent_at, fewest_slots, ranks_in
from holdfast_operator.reconciler.observe.silence import hang_limit, limit_in_words
from holdfast_operator.reconciler.observe.stragglers import named_stragglers, straggler_in_words
from holdfast_operator.reconciler.observe.timestamps import seconds_of
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    Condition,
    ConditionType,
    ControlState,
    Decision,
)
from holdfast_operator.reconciler.report.conditions import newest_protected, newest_step, refused
from holdfast_operator.reconciler.report.conditions import phase as phase_of
from holdfast_operator.reconciler.report.losses import loss_text
from holdfast_operator.reconciler.report.pace import MeasuredPace, measured_pace
from holdfast_operator.reconciler.report.protection_traffic import (
    ProtectionTraffic,
    traffic_of,
    traffic_text,
)
from holdfast_operator.reconciler.report.recoveries import Recovery
from holdfast_operator.reconciler.report.seats import plan_text

if TYPE_CHECKING:  # a local run writes this status, too, and needs no client of an API server
    from holdfast_operator.kube.client.api import Object

ATTEMPTS = "attempts"
"""Field of `counters` with the number of the newest pod that was ever made, by member. No name of a
pod is used again."""
RECOVERIES_SHOWN = 10
RATIO_DIGITS = 6
LINKS_SHOWN = 16
"""Nodes and links that a status names as slow."""
STRAGGLERS_SHOWN = 16
STRAGGLER_DIGITS = 2
PROBLEM_CHARACTERS_MAX = 1024
MESSAGE_CHARACTERS_MAX = 32768


def status_of(
    job: MoETrainingJob,
    observed: ClusterView,
    decision: Decision,
    *,
    previous: Object,
    pods: Mapping[tuple[int, str], str],
    recoveries: Sequence[Recovery],
    clocks: ClockPair,
    now: float,
) -> Object:
    """The status after one turn.

    Args:
        previous: the status before; conditions keep their transition times.
        pods: (member, node) → name of the pod.
        recoveries: oldest first, with wall-clock times.
    """
    state, membership = decision.state, decision.state.membership
    phase = phase_of(decision.conditions)
    ready, nodes_ready = _at_work(observed, membership)
    step = newest_step(observed, membership) if membership is not None else 0
    protected = _protected(observed, state, previous)
    generation = job.metadata.generation
    started = previous.get("startedAt") or (clocks.text(now) if membership is not None else None)
    slow = _slow_ranks(observed, state) if phase is Phase.RUNNING else ()
    return _document(
        JobStatus(
            phase=phase,
            epoch=state.epoch,
            step=step or _step_before(previous, state.epoch, state.started_from),
            ready=ready,
            desired=job.world_size,
            ready_text=f"{ready}/{job.world_size}",
            nodes_ready=nodes_ready,
            protected=None if protected is None else str(protected),
            protected_step=None if protected is None else protected.step,
            persisted=None if state.stored is None else str(state.stored),
            restarts=state.counted,
            recoveries=state.recoveries,
            recovery_mode=recovery_mode(observed, membership),
            started_at=started,
            ended_at=_time(clocks, state.ended_at),
            kept_until=_time(clocks, kept_until(job, state)),
            problem=_problem(decision, phase)[:PROBLEM_CHARACTERS_MAX] or None,
            observed_generation=generation,
            selector=f"{JOB_LABEL}={job.metadata.name}",
            conditions=conditions_of(decision.conditions, generation, previous, clocks.text(now)),
            last_failure=None if state.failure is None else _failure(state.failure),
            last_corruption=None if state.corruption is None else _corruption(state.corruption),
            corruption_count=state.corruptions or None,
            steps_not_repeated=state.steps_not_repeated or None,
            strength=_strength(strength(job, membership, len(state.joining))),
            members=_members(observed, membership, pods),
            joining=_joining(observed, state.joining, pods),
            last_recoveries=tuple(each.status for each in recoveries[-RECOVERIES_SHOWN:]),
            stragglers=_stragglers(membership, slow),
            straggler_count=len(slow) or None,
            slow_links=_slow_links(state, phase),
            token_loss=None if state.losses is None else _token_loss(state.losses),
            experts=None if state.plan is None else _experts(state.plan),
            pace=_pace(measured_pace(job, observed, membership)),
            hang_detection=_hang_detection(job, state) if phase is Phase.RUNNING else None,
            protection_traffic=_traffic(traffic_of(observed, membership)),
            slots=fewest_slots(observed, membership) or None,
            counters=to_document(state, now=clocks.now, wall=clocks.wall),
            last_hang=_hang(state, previous, clocks),
        )
    )


def refusal_status(resource: Object, reason: str, message: str, now: str) -> Object:
    """The status of a job that cannot be carried out as it is written; `resource` is the job."""
    previous = resource.get("status") or {}
    generation = resource["metadata"].get("generation", 0)
    refusal = refused(reason, message)
    # Nobody observes any more whether it is at work.
    kept = {each["type"]: each.get("status") for each in previous.get("conditions") or []}
    unknown = [
        Condition(type=kind, status=None, reason=reason, message=message)
        for kind in (ConditionType.RUNNING, ConditionType.RECOVERING)
        if kept.get(kind) in ("True", "Unknown")
    ]
    found = _document(
        JobStatus(
            phase=phase_of(refusal),
            problem=message[:PROBLEM_CHARACTERS_MAX],
            observed_generation=generation,
            conditions=conditions_of((*refusal, *unknown), generation, previous, now),
        )
    )
    names = {each["type"] for each in found["conditions"]}
    others = [c for c in previous.get("conditions") or [] if c["type"] not in names]
    return {**previous, **found, "conditions": [*found["conditions"], *others]}


def _document(status: JobStatus) -> Object:
    """`status` as it would come back from an API server, so that equal ones compare equal."""
    document: Object = msgspec.json.decode(msgspec.json.encode(status))
    return document


def conditions_of(
    conditions: Sequence[Condition], generation: int, previous: Object, now: str
) -> tuple[JobCondition, ...]:
    """Conditions in the standard form; a transition time changes only with the status."""
    earlier = {each["type"]: each for each in previous.get("conditions") or []}
    found = []
    for condition in conditions:
        status = condition.status_word
        before = earlier.get(condition.type.value, {})
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        found.append(
            JobCondition(
                type=condition.type.value,
                status=status,
                reason=condition.reason,
                message=condition.message[:MESSAGE_CHARACTERS_MAX],
                observed_generation=generation,
                last_transition_time=since or now,
            )
        )
    return tuple(found)


def essence(status: Object) -> object:
    """The part of a status that must be written at once, before actions are carried out: what a
    control loop that starts again needs, and what users wait for. Statuses with the same essence
    may differ in steps and texts."""
    kept = {**(status.get("counters") or {})}
    kept["saved"] = bool(kept.get("saved"))  # grows with every step
    kept.pop("tokenLosses", None)  # likewise
    kept.pop(ATTEMPTS, None)  # while a pod exists, it has the same number
    kept["stored"] = bool(kept.get("stored"))  # whether there is a copy matters, not which
    conditions = [(c["type"], c["status"], c["reason"]) for c in status.get("conditions") or []]
    names = ("phase", "epoch", "observedGeneration")
    return (*(status.get(name) for name in names), conditions, kept)


def recoveries_of(status: Object) -> list[Recovery]:
    """The recoveries in a status, for a control loop that starts again, which continues the last
    one if it was not over."""
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
                replay=each.get("replay", ""),
                advice=each.get("advice", ""),
                left_nodes=tuple(each.get("leftNodes") or ()),
                advanced_at=None if seconds is None else at + seconds,
            )
        )
    return found


def _step_before(previous: Object, epoch: int, started_from: int | None) -> int:
    """The newest step that is known when no rank reports any, such as after the end."""
    reached: int = previous.get("step", 0)
    same = previous.get("epoch") == epoch
    return max(reached, started_from or 0) if same else started_from or reached


def _at_work(observed: ClusterView, membership: Membership | None) -> tuple[int, int]:
    """(ranks at work, nodes whose ranks are all at work)."""
    if membership is None:
        return 0, 0
    views = [view for view in observed.views(membership) if view is not None]
    at_work = [sum(rank.at_work for rank in view.ranks) for view in views]
    return sum(at_work), at_work.count(membership.nproc_per_node)


def _pace(found: MeasuredPace | None) -> PaceStatus | None:
    if found is None:
        return None
    return PaceStatus(
        interval_steps=found.interval_steps or None,
        window_steps=found.window_steps or None,
        text=found.text,
    )


def _hang_detection(job: MoETrainingJob, state: ControlState) -> HangDetectionStatus | None:
    """None for pods of other controllers, which end their hangs themselves."""
    if job.spec.trainer.external:
        return None
    quiet_s = hang_limit(job, state).quiet_s
    return HangDetectionStatus(quiet_seconds=quiet_s, text=limit_in_words(job, state))


def _strength(found: Strength) -> StrengthStatus:
    return StrengthStatus(
        active=found.active,
        desired=found.desired,
        minimum=found.least,
        joining=found.joining or None,
    )


def _members(
    observed: ClusterView, membership: Membership | None, pods: Mapping[tuple[int, str], str]
) -> tuple[MemberStatus, ...]:
    members = []
    for member in membership.members if membership is not None else ():
        agent = agent_at(observed, member)
        members.append(
            MemberStatus(
                index=member.index,
                node=member.node,
                pod=pods.get((member.index, member.node), ""),
                state="absent" if agent is None else agent.state.value,
            )
        )
    return tuple(members)


def _joining(
    observed: ClusterView,
    joining: Sequence[tuple[int, str]],
    pods: Mapping[tuple[int, str], str],
) -> tuple[MemberStatus, ...] | None:
    members = [
        MemberStatus(
            index=member,
            node=node,
            pod=pods.get((member, node), ""),
            state=joining_state(observed, member, node),
        )
        for member, node in joining
    ]
    return tuple(members) or None


def _time(clocks: ClockPair, at: float | None) -> str | None:
    return None if at is None else clocks.text(at)


def _protected(observed: ClusterView, state: ControlState, previous: Object) -> Generation | None:
    """The newest protected generation, also once the memory of a job that ended was freed."""
    found = newest_protected(observed)
    if found is None and state.outcome is not None and previous.get("protected"):
        return Generation.parse(previous["protected"])
    return found


def _hang(state: ControlState, previous: Object, clocks: ClockPair) -> HangStatus | None:
    if state.hang is None:  # An earlier control loop may have seen one.
        return hang_from(previous.get("lastHang"))
    return structs.replace(state.hang, detected_at=clocks.text(state.hung_at))


def _failure(failure: TrainerFailure) -> FailureStatus:
    return FailureStatus(
        text=failure.text,
        epoch=failure.epoch,
        member=failure.member,
        exit_code=failure.exit_code,
        last_lines=failure.last_lines or None,
        kernel_messages=failure.kernel_messages or None,
    )


def _corruption(last: LastCorruption) -> CorruptionStatus:
    return CorruptionStatus(
        text=last.text,
        unit=last.unit,
        step=last.step,
        equal_step=last.equal_step,
        ranks=last.ranks,
        member=last.member,
        node=last.node or None,
        proof=last.proof.value,
        epoch=last.epoch,
    )


def _slow_ranks(observed: ClusterView, state: ControlState) -> tuple[Straggler, ...]:
    """The ranks for which others wait in the present epoch, the slowest first."""
    membership = state.membership
    named = named_stragglers(membership, state) if membership is not None else ()
    if membership is None or not named:
        return ()
    at_work = {rank.rank for rank in ranks_in(observed, membership) if rank.at_work}
    return tuple(each for each in named if each.rank in at_work)


def _stragglers(
    membership: Membership | None, slow: Sequence[Straggler]
) -> tuple[StragglerStatus, ...] | None:
    """The slowest of the `slow` ranks; None without any, so that no status of a job that is well
    changes."""
    if membership is None:
        return None
    found = []
    for each in slow[:STRAGGLERS_SHOWN]:
        member = membership.member(membership.member_of(each.rank))
        found.append(
            StragglerStatus(
                rank=each.rank,
                member=member.index,
                node=member.node,
                cause=each.cause.value,
                slower_ratio=round(each.slower, STRAGGLER_DIGITS),
                text=straggler_in_words(membership, each),
            )
        )
    return tuple(found) or None


def _slow_links(state: ControlState, phase: Phase) -> tuple[SlowLinksStatus, ...] | None:
    """The links that are slow in the present epoch of a job that runs; None without any."""
    membership, watch = state.membership, state.links
    if phase is not Phase.RUNNING or membership is None or watch.epoch != membership.epoch:
        return None
    found = [
        SlowLinksStatus(
            node=membership.member(each.members[0]).node if each.peers else None,
            text=slow_links_in_words(membership, each),
        )
        for each in watch.slow[:LINKS_SHOWN]
    ]
    return tuple(found) or None


def _token_loss(loss: JobLoss) -> TokenLossStatus:
    return TokenLossStatus(
        lost=f"{loss.lost:.2%}",
        lost_tokens=loss.lost_tokens,
        lost_ratio=round(loss.lost, RATIO_DIGITS),
        lost_mlt=round(loss.lost_mlt, RATIO_DIGITS),
        at_risk_ratio=round(loss.at_risk, RATIO_DIGITS),
        at_risk_mlt=round(loss.at_risk_mlt, RATIO_DIGITS),
        limit=loss.limit,
        experts_per_layer=loss.k,
        text=loss_text(loss),
    )


def _experts(plan: PlanReport) -> ExpertsStatus:
    return ExpertsStatus(
        least_nodes=plan.least_nodes,
        ranks=plan.ranks,
        seats_per_rank=plan.rank_seats,
        busiest_node_ratio=round(plan.busiest_node, RATIO_DIGITS),
        epoch=plan.epoch,
        step=plan.step,
        cause=plan.cause.value,
        text=plan_text(plan),
    )


def _traffic(traffic: ProtectionTraffic | None) -> ProtectionTrafficStatus | None:
    if traffic is None:
        return None
    return ProtectionTrafficStatus(
        node_bytes_per_second=traffic.node_bytes_s,
        bytes_per_second=traffic.bytes_s,
        limit=traffic.limit_bytes_s or None,
        text=traffic_text(traffic),
    )


def _problem(decision: Decision, phase: Phase) -> str:
    if phase is Phase.FAILED:
        return decision.state.outcome_reason
    if phase is Phase.RUNNING:
        return next((c.message for c in decision.conditions if is_unprotected(c)), "")
    if phase in (Phase.COMPLETE, Phase.SUSPENDED):
        return ""
    refused = (c.message for c in decision.conditions if c.type is ConditionType.PODS_REFUSED)
    return next(refused, decision.reason)
