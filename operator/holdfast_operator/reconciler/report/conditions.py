"""Derives the job's conditions from the observation and the state. Pure; decides nothing."""

from __future__ import annotations

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.locations import Locations
from holdfast_core.job.parsing import MoETrainingJob, check_storage
from holdfast_core.job.status import Phase
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_operator.reconciler.failures.unprotected import (
    TRAINS_UNPROTECTED,
    refusal_of,
    unprotected_in_words,
)
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import is_unschedulable
from holdfast_operator.reconciler.observe.lookups import (
    agent_at,
    is_reachable,
    node_of,
    ranks_in,
    suspension_of,
)
from holdfast_operator.reconciler.observe.stalls import stall_of
from holdfast_operator.reconciler.observe.text import listed, ranks_in_words
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    ClusterView,
    Condition,
    ConditionType,
    ControlState,
)
from holdfast_operator.reconciler.report.losses import loss_condition
from holdfast_operator.reconciler.report.seats import plan_condition

INSECURE = Condition(
    type=ConditionType.INSECURE,
    status=True,
    reason="IdentityIsOff",
    message="daemons and the operator do not authenticate each other: anyone who reaches them "
    "can read and change training state; set security.insecure to false in the chart's values",
)
"""Condition of every job in a cluster that runs without identity; other jobs do not have it."""

UNSCHEDULABLE_SHOWN_S = 5.0
"""How long an agent may wait for room before the job counts as not scheduled."""


def newest_protected(observed: ClusterView) -> Generation | None:
    """The newest generation that any daemon reports as protected."""
    views = (node.job for node in observed.nodes.values())
    return max((v.protected for v in views if v and v.protected), default=None)


def has_all_who_captured(membership: Membership, generation: Generation) -> bool:
    """Whether all members that captured `generation` are there, and so its parity."""
    if membership.is_present(generation):
        return True
    world = membership.world_of(generation)
    return world is not None and set(world.members) <= set(membership.world.members)


def newest_complete(observed: ClusterView, membership: Membership) -> Generation | None:
    """The newest generation such that every member's daemon holds it or a newer one; None while one
    of them has reported none."""
    views = observed.views(membership)
    held = [view.complete for view in views if view is not None and view.complete is not None]
    return min(held) if len(held) == len(membership.members) else None


def newest_step(observed: ClusterView, membership: Membership) -> int:
    """The newest step that any rank has completed in this epoch."""
    return max((r.step for r in ranks_in(observed, membership)), default=0)


def training_runs(observed: ClusterView, membership: Membership) -> bool:
    """Whether every rank of the world trains in this epoch, and none is lost."""
    ranks = ranks_in(observed, membership)
    return len(ranks) == membership.world_size and all(r.at_work and not r.lost for r in ranks)


def all_agents_succeeded(observed: ClusterView, membership: Membership) -> bool:
    """Whether every member's agent has exited with code 0."""
    agents = (agent_at(observed, member) for member in membership.members)
    return all(a is not None and a.state is AgentState.EXITED and a.exit_code == 0 for a in agents)


def conditions(
    job: MoETrainingJob,
    observed: ClusterView,
    state: ControlState,
    now: float,
    waiting: str,
    locations: Locations = None,
) -> tuple[Condition, ...]:
    """Compute all conditions, in the order of `ConditionType`, without those that belong only to
    other kinds of jobs. `waiting`: text on what the loop waits for."""
    refusal = unsupported(job, observed, locations) if state.membership is None else None
    found = (
        _suspended(job, observed, state),
        refusal or _scheduled(job, observed, state, now, waiting),
        _running(job, observed, state, now, waiting),
        _recovering(job, observed, state, waiting),
        _protected(job, observed, state, now),
        _degraded(job, observed, state, now),
        loss_condition(job, state),
        plan_condition(job, state),
        _ended(ConditionType.COMPLETE, Outcome.COMPLETE, state),
        _ended(ConditionType.FAILED, Outcome.FAILED, state),
    )
    return tuple(condition for condition in found if condition is not None)


def _suspended(job: MoETrainingJob, observed: ClusterView, state: ControlState) -> Condition:
    kind = ConditionType.SUSPENDED
    suspension = suspension_of(job, observed)
    if suspension is None:
        return Condition(type=kind, status=False, reason="NotSuspended")
    left = sorted({a.member for a in observed.agents if a.state is not AgentState.EXITED})
    if left:
        message = f"agents of members [{listed(left)}] are being stopped"
        return Condition(type=kind, status=False, reason="Stopping", message=message)
    kept = "" if state.membership is None else "; snapshots are kept in memory"
    message = f"{suspension.message}{kept}"
    return Condition(type=kind, status=True, reason=suspension.reason, message=message)


def _scheduled(
    job: MoETrainingJob, observed: ClusterView, state: ControlState, now: float, waiting: str
) -> Condition:
    kind = ConditionType.SCHEDULED
    if state.membership is None:
        return Condition(type=kind, status=False, reason="WaitingForNodes", message=waiting)
    if state.no_replacement_since is not None:
        return Condition(type=kind, status=False, reason="NoReplacement", message=waiting)
    if now - max(state.began_at, state.attentive_since) >= UNSCHEDULABLE_SHOWN_S:
        without = _without_room(observed, state.membership)
        if without:
            return Condition(type=kind, status=False, reason="Unschedulable", message=without)
    members, nodes = state.membership.members, job.spec.nodes
    count = nodes if len(members) == nodes else f"{len(members)} of {nodes}"
    message = f"{count} members on {listed(p.node for p in members)}"
    return Condition(type=kind, status=True, reason="NodesAssigned", message=message)


def _without_room(observed: ClusterView, membership: Membership) -> str:
    """Text about members whose agents cannot be scheduled, with the scheduler's message on the
    first; empty when there are none."""
    agents = [agent_at(observed, member) for member in membership.members]
    waiting = [agent for agent in agents if agent is not None and is_unschedulable(agent)]
    if not waiting:
        return ""
    members = listed(agent.member for agent in waiting)
    first = waiting[0]
    text = first.message or "the scheduler gives no reason"
    return f"members [{members}] wait for room; member {first.member} on {first.node}: {text}"


def unsupported(
    job: MoETrainingJob, observed: ClusterView, locations: Locations = None
) -> Condition | None:
    """Condition of a job that asks for what is not allowed, or whose agents the cluster would
    refuse; None for all others. It is not placed while that is so."""
    kind, refusal = ConditionType.SCHEDULED, observed.refusal
    try:
        check_storage(job, locations)
    except InvalidJobError as error:
        return Condition(type=kind, status=False, reason="StorageNotAllowed", message=str(error))
    if refusal is None:
        return None
    return Condition(type=kind, status=False, reason=refusal.reason, message=refusal.message)


def refused(reason: str, message: str) -> tuple[Condition, ...]:
    """Conditions of a job that cannot even be examined, for example because its document is not
    valid: it is not scheduled, for this reason, and nothing else is known."""
    return (Condition(type=ConditionType.SCHEDULED, status=False, reason=reason, message=message),)


_PHASES = {
    ConditionType.FAILED: Phase.FAILED,
    ConditionType.COMPLETE: Phase.COMPLETE,
    ConditionType.SUSPENDED: Phase.SUSPENDED,
    ConditionType.RECOVERING: Phase.RECOVERING,
    ConditionType.RUNNING: Phase.RUNNING,
    ConditionType.SCHEDULED: Phase.STARTING,
}
"""Phase for each condition: the first of these that is true gives the job its phase."""


def phase(conditions: tuple[Condition, ...]) -> Phase:
    """Phase of the whole job; Waiting while its nodes are not assigned."""
    true = {condition.type for condition in conditions if condition.status}
    return next((phase for kind, phase in _PHASES.items() if kind in true), Phase.WAITING)


def _goes_on(state: ControlState, membership: Membership) -> bool:
    """Whether training was seen running in this epoch and nothing is known to have stopped it. A
    silent daemon does not stop it (invariant 3), and neither does a control loop that starts again
    and has not heard of all daemons yet."""
    if state.no_replacement_since is not None:
        return False
    return state.resumed_epoch == membership.epoch or _ran_before(state, membership)


def _ran_before(state: ControlState, membership: Membership) -> bool:
    """Whether an earlier control loop saw training run, and not all daemons have reported to this
    one yet."""
    return state.ran and not state.recovering and state.confirmed_epoch != membership.epoch


def _trains_still(
    job: MoETrainingJob,
    observed: ClusterView,
    state: ControlState,
    membership: Membership | None,
    now: float,
) -> bool:
    """Whether training continues until a pod that is being removed has ended. The last report of a
    silent daemon proves nothing."""
    return (
        membership is not None
        and training_runs(observed, membership)
        and all(is_reachable(job, node_of(observed, m), state, now) for m in membership.members)
    )


def _running(
    job: MoETrainingJob, observed: ClusterView, state: ControlState, now: float, waiting: str
) -> Condition:
    kind, membership = ConditionType.RUNNING, state.membership
    if state.outcome is not None:
        return Condition(type=kind, status=False, reason="Ended")
    if suspension_of(job, observed) is not None:
        return Condition(type=kind, status=False, reason="Suspended")
    if state.no_replacement_since is not None and not _trains_still(
        job, observed, state, membership, now
    ):
        return Condition(type=kind, status=False, reason="WaitingForNodes", message=waiting)
    if membership is None or not training_runs(observed, membership):
        if membership is not None and _goes_on(state, membership):
            if state.resumed_epoch != membership.epoch:
                message = "it ran when an operator last saw it; not all daemons have reported yet"
                return Condition(type=kind, status=True, reason="ReportsAwaited", message=message)
            stall = stall_of(job, membership, observed, state, now)
            if stall is not None:
                reason = "AllSessionsClosed"
                return Condition(type=kind, status=True, reason=reason, message=stall.message)
            message = "some ranks have closed their sessions, or their daemon has just returned"
            return Condition(type=kind, status=True, reason="SomeRanksReady", message=message)
        return Condition(type=kind, status=False, reason="NotAllRanksReady", message=waiting)
    step = newest_step(observed, membership)
    message = f"{membership.world_size} ranks train in epoch {membership.epoch}, step {step}"
    without = unprotected_in_words(observed, membership)
    if without:
        message = f"{message}; {without}"
        return Condition(type=kind, status=True, reason=TRAINS_UNPROTECTED, message=message)
    return Condition(type=kind, status=True, reason="AllRanksReady", message=message)


def _recovering(
    job: MoETrainingJob, observed: ClusterView, state: ControlState, waiting: str
) -> Condition:
    """Whether the job is on its way back to work after a failure: an epoch that begins for another
    reason is a start, and a job that waits for a node does nothing else."""
    kind, membership = ConditionType.RECOVERING, state.membership
    if state.outcome is not None or membership is None or suspension_of(job, observed) is not None:
        return Condition(type=kind, status=False, reason="NothingToRecover")
    if state.no_replacement_since is not None:
        return Condition(type=kind, status=False, reason="WaitingForNodes", message=waiting)
    if _goes_on(state, membership) and not state.recovering:
        return Condition(type=kind, status=False, reason="TrainingGoesOn")
    reason, message = _repair(observed, membership)
    if not state.recovering:
        return Condition(type=kind, status=False, reason="Starting", message=message)
    message = message or waiting or f"epoch {membership.epoch} is being formed"
    return Condition(type=kind, status=True, reason=reason, message=message)


def _repair(observed: ClusterView, membership: Membership) -> tuple[str, str]:
    """What members get back that their memory lacks: in one word, and in a sentence, which is empty
    when they lack nothing."""
    views = observed.views(membership)
    rebuilding = [
        member.index
        for member, view in zip(membership.members, views, strict=True)
        if view is not None and view.rebuilding
    ]
    if not rebuilding:
        return "FormingEpoch", ""
    if any(view is not None and view.loading for view in views):
        message = f"members [{listed(rebuilding)}] load their snapshots from storage"
        return "LoadingFromStorage", message
    return "Rebuilding", f"members [{listed(rebuilding)}] rebuild their snapshots from parity"


def _protected(
    job: MoETrainingJob, observed: ClusterView, state: ControlState, now: float
) -> Condition:
    """Whether a lost node would cost nothing but the steps since the newest snapshot, and saves
    make newer ones. Unknown until a daemon has reported the job."""
    kind, membership, generation = (
        ConditionType.PROTECTED,
        state.membership,
        newest_protected(observed),
    )
    refusal = None if membership is None else refusal_of(observed, membership)
    if refusal is not None:
        reason, message = refusal
        if generation is not None:
            message = f"{message}; generation {generation} is the newest that is protected"
        return Condition(type=kind, status=False, reason=reason, message=message)
    without = "" if membership is None else unprotected_in_words(observed, membership)
    if without and generation is None:
        return Condition(type=kind, status=False, reason=TRAINS_UNPROTECTED, message=without)
    if job.spec.redundancy.type is Redundancy.NONE:
        message = "spec.redundancy.type is None: a lost node loses its snapshots"
        return Condition(type=kind, status=False, reason="NoRedundancy", message=message)
    if (
        generation is not None
        and membership is not None
        and not has_all_who_captured(membership, generation)
    ):
        message = (
            f"generation {generation} is of the members before epoch {membership.since}; nothing "
            f"newer is protected yet"
        )
        return Condition(type=kind, status=False, reason="NothingProtected", message=message)
    if generation is not None:
        losses = job.spec.redundancy.losses
        nodes = "one node" if losses == 1 else f"any {losses} nodes"
        message = f"generation {generation} survives the loss of {nodes} of each parity group"
        return Condition(type=kind, status=True, reason="ParityInPlace", message=message)
    if state.outcome is None and not _has_reports(observed, membership):
        message = "no daemon has reported this job yet"
        return Condition(type=kind, status=None, reason="ReportsAwaited", message=message)
    problems = [] if membership is None else _problems(observed, membership)
    message = problems[0] if problems else "no generation is protected yet"
    stall = None if membership is None else stall_of(job, membership, observed, state, now)
    if stall is not None and stall.working and not stall.ending:
        who, verb = ranks_in_words(stall.working), "works" if len(stall.working) == 1 else "work"
        message += f"; {who} {verb} without a session, and it is not known whether to load or train"
    return Condition(type=kind, status=False, reason="NothingProtected", message=message)


def _has_reports(observed: ClusterView, membership: Membership | None) -> bool:
    """Whether the daemon of any member has reported the job."""
    return membership is not None and any(v is not None for v in observed.views(membership))


def _degraded(
    job: MoETrainingJob, observed: ClusterView, state: ControlState, now: float
) -> Condition:
    kind, membership = ConditionType.DEGRADED, state.membership
    if membership is None or state.outcome is not None:
        return Condition(type=kind, status=False, reason="NotRunning")
    silent = [
        member.node
        for member in membership.members
        if not is_reachable(job, node_of(observed, member), state, now)
    ]
    if silent:
        message = f"no heartbeat from the daemon on {listed(silent)}"
        return Condition(type=kind, status=True, reason="DaemonSilent", message=message)
    if state.resumed_epoch == membership.epoch and newest_protected(observed) is not None:
        problems = _problems(observed, membership)
        if problems:
            return Condition(type=kind, status=True, reason="ProtectionBehind", message=problems[0])
    return Condition(type=kind, status=False, reason="AllDaemonsHeard")


def _problems(observed: ClusterView, membership: Membership) -> list[str]:
    views = observed.views(membership)
    return [view.problem for view in views if view is not None and view.problem]


def _ended(kind: ConditionType, outcome: Outcome, state: ControlState) -> Condition:
    if state.outcome is not outcome:
        return Condition(type=kind, status=False, reason="NotEnded")
    kept = (
        "its snapshots stay in memory until .status.keptUntil: `holdfast persist` and `holdfast "
        "resume` find them there"
    )
    joint = "\n" if "\n" in state.outcome_reason else "; "
    message = f"{state.outcome_reason}{joint}{kept}" if state.kept else state.outcome_reason
    return Condition(type=kind, status=True, reason=state.outcome_word, message=message)
