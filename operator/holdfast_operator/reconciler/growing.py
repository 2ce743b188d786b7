"""Let missing members join a job that went on without them. Pure.

Growing costs a recovery of all members, so the job waits for `joinWaitSeconds`, in which more nodes
may come, and then for the next generation that is protected, so that as little as possible is
trained twice. It does not wait for that longer than another `joinWaitSeconds`, unless it would
train more than twice that time again: then protection is behind, or rare, and growing would cost
more than it brings. Nothing has failed, so nothing is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.conditions import training_runs
from holdfast_operator.reconciler.placement import choose_joiners, would_forget
from holdfast_operator.reconciler.recovering import begin_epoch
from holdfast_operator.reconciler.replacing import Moves
from holdfast_operator.reconciler.shrinking import just_saved, strength
from holdfast_operator.reconciler.steps import Look, Step
from holdfast_operator.reconciler.text import listed
from holdfast_operator.reconciler.views import (
    AgentState,
    Condition,
    ConditionType,
    ControlState,
    EventReason,
    NodeView,
)

UNFIT_WAITS = 10.0
"""How many `joinWaitSeconds` a node is left alone that had no room for a member."""


def grow(look: Look, state: ControlState, membership: Membership) -> Step:
    """Begin the next epoch with more members, once nodes have been there for long enough."""
    absent = absent_members(look.job, membership)
    if not absent:
        return Step(replace(state, joinable_since=None, resized_at=None))
    if state.resized_at is None:  # by a control loop that was forgotten
        state = replace(state, resized_at=look.now)
    joining = joiners(look, state, membership)
    if not joining:
        return Step(replace(state, joinable_since=None))
    if state.joinable_since is None:
        state = replace(state, joinable_since=look.now)
    if not _is_time(look, state, membership, whole=len(joining) == len(absent)):
        return Step(state)
    step = begin_epoch(look, state, membership, Moves(to=joining), ())
    step = replace(step, state=replace(step.state, joinable_since=None))
    count = len(membership.members) + len(joining)
    return step.post(
        EventReason.JOINED,
        f"{joins_in_words(joining)}; {count} of {look.job.spec.nodes} members in epoch "
        f"{step.state.epoch}",
    ).wait()


def joiners(
    look: Look, state: ControlState, membership: Membership, taken: Collection[str] = ()
) -> dict[int, NodeView]:
    """Member that is missing → the node on which it could join, the lowest members first.

    Args:
        taken: nodes that get other members.
    """
    homes = {member.node for member in membership.members}.union(taken)
    wait_s = look.job.spec.failure_policy.join_wait_seconds
    since = look.now if state.resized_at is None else state.resized_at
    tries_again = look.now - since >= UNFIT_WAITS * wait_s
    free = [
        node
        for node in look.candidates(state)
        if node.name not in homes
        and not node.disruption
        and (tries_again or node.name not in state.unfit)
    ]
    absent = absent_members(look.job, membership)
    chosen = choose_joiners(membership, free, len(absent))
    return dict(zip(absent, chosen, strict=False))


def joins_in_words(joining: Mapping[int, NodeView]) -> str:
    """Text on which node joins as which member; empty when none does."""
    return listed(f"{node.name} joins as member {index}" for index, node in joining.items())


def strength_condition(look: Look, state: ControlState) -> tuple[Condition, ...]:
    """Whether all members are there, and what becomes of those that are not; none for a job that
    has all of them and does not go on without."""
    kind, membership, job = ConditionType.FULL_STRENGTH, state.membership, look.job
    if membership is None or state.outcome is not None:
        return ()
    has, absent = strength(job, membership), absent_members(job, membership)
    if not absent and not job.spec.may_shrink:
        return ()
    if not absent:
        message = f"all {has.desired} members are there; the job goes on with {has.least} or more"
        return (Condition(type=kind, status=True, reason="AllMembers", message=message),)
    message = (
        f"{has.active} of {has.desired} members since epoch {membership.since}, and at least "
        f"{has.least} are needed: members [{listed(absent)}] are missing; "
        f"{_prospect(look, state, membership)}"
    )
    return (Condition(type=kind, status=False, reason="MembersMissing", message=message),)


def _prospect(look: Look, state: ControlState, membership: Membership) -> str:
    """Text on when members join."""
    if look.job.spec.suspend:
        return "they join when the job is resumed, on nodes that are free then"
    names = [node.name for node in joiners(look, state, membership).values()]
    if not names:
        return "no node is free for them: repair a node, or add one"
    wait_s = look.job.spec.failure_policy.join_wait_seconds
    return (
        f"{listed(names)} can take members, which join after failurePolicy.joinWaitSeconds = "
        f"{wait_s:g} s, when a generation has just been protected"
    )


def absent_members(job: MoETrainingJob, membership: Membership) -> list[int]:
    """Members that the job lacks, ascending."""
    return [index for index in range(job.spec.nodes) if not membership.has(index)]


def _is_time(look: Look, state: ControlState, membership: Membership, *, whole: bool) -> bool:
    """Whether members should join now. `whole`: they are all that are missing."""
    assert state.resized_at is not None and state.joinable_since is not None
    wait_s = look.job.spec.failure_policy.join_wait_seconds
    due = state.resized_at + wait_s
    if not whole:
        due = max(due, state.joinable_since + wait_s)
    if look.now < due or not _trains(look, state, membership):
        return False
    if would_forget(membership, state.saved):
        return False  # the world of what is saved would be forgotten
    if just_saved(look, state, membership):
        return True
    lost_s = look.now - max(state.saved_at, state.began_at)
    return look.now >= due + wait_s and lost_s <= 2.0 * wait_s


def _trains(look: Look, state: ControlState, membership: Membership) -> bool:
    """Whether all members train, and none has ended."""
    return (
        state.resumed_epoch == membership.epoch
        and training_runs(look.observed, membership)
        and all(agent.state is not AgentState.EXITED for agent in look.observed.agents)
    )
