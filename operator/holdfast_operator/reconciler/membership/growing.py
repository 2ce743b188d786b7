"""Lets missing members join a job that continued without them, once their agents are ready. Pure.

Growing costs a recovery of all members, so it waits for the next protected generation: as little as
possible is trained twice. Members that left although a node was available join then. Nodes that
came later first wait for `joinWaitSeconds`, during which more may come. A job waits for a protected
generation no longer than another `joinWaitSeconds`, unless it would train more than twice that time
again: then protection is behind, or rare, and growing would cost more than it gains. Nothing has
failed, so nothing is counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.membership.joining import (
    absent_members,
    free_nodes,
    not_before,
    places,
    prepare,
    ready_members,
)
from holdfast_operator.reconciler.membership.recovering import begin_epoch
from holdfast_operator.reconciler.membership.shrinking import strength
from holdfast_operator.reconciler.membership.whole_copies import joining_in_whole_copies
from holdfast_operator.reconciler.observe.lookups import just_saved, suspension_of
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    Condition,
    ConditionType,
    ControlState,
    EventReason,
    NodeView,
)
from holdfast_operator.reconciler.placement import Moves, choose_joiners
from holdfast_operator.reconciler.report.conditions import training_runs
from holdfast_operator.reconciler.rules import Observation, RuleResult

_NOBODY_JOINS: dict[str, Any] = {
    "joining": (),
    "replaced": frozenset[int](),
    "joinable_since": None,
    "ready_since": None,
    "unscheduled_since": (),
}
GATHER_S = 10.0
"""How long replacements that are ready wait for others that get ready."""


def grow(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Have agents of missing members get ready, and begin the next epoch with the ready ones when
    it is time."""
    absent = absent_members(observation.job, membership)
    if not absent:
        return RuleResult(replace(state, resized_at=None, **_NOBODY_JOINS))
    if state.confirmed_epoch != membership.epoch:
        return RuleResult(state)
    if state.resized_at is None:  # by a control loop that was forgotten
        state = replace(state, resized_at=observation.now)
    result = prepare(observation, state, membership)
    ready = ready_members(observation, result.state, membership)
    joining = joining_in_whole_copies(observation.job, membership, ready)
    result = replace(result, state=_noted(observation, result.state, joining))
    if not joining or not _is_time(observation, result.state, membership, joining, absent):
        return result
    moves = Moves(to=joining)
    result = result.then(begin_epoch(observation, result.state, membership, moves, ()))
    count = len(membership.members) + len(joining)
    return result.post(
        EventReason.JOINED,
        f"{moves.in_words(membership)}; {count} of {observation.job.spec.nodes} members in epoch "
        f"{result.state.epoch}",
    ).wait()


def _noted(observation: Observation, state: ControlState, joining: Collection[int]) -> ControlState:
    """Remember since when members could join, and since when they are ready to."""
    joinable = observation.now if state.joinable_since is None else state.joinable_since
    ready = observation.now if state.ready_since is None else state.ready_since
    return replace(
        state,
        joinable_since=joinable if state.joining else None,
        ready_since=ready if joining else None,
    )


def joiners(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    taken: Collection[str] = (),
) -> dict[int, NodeView]:
    """Member that is missing → the node on which it could join, the lowest members first.

    Args:
        taken: nodes that get other members.
    """
    free = free_nodes(observation, state, membership, taken)
    absent = absent_members(observation.job, membership)
    chosen = choose_joiners(membership, free, len(absent))
    return dict(zip(absent, chosen, strict=False))


def strength_condition(observation: Observation, state: ControlState) -> tuple[Condition, ...]:
    """Condition on whether all members are there, and what happens to missing ones. None for a job
    that has all members and would not continue without one."""
    kind, membership, job = ConditionType.FULL_STRENGTH, state.membership, observation.job
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
        f"{_prospect(observation, state, membership)}"
    )
    return (Condition(type=kind, status=False, reason="MembersMissing", message=message),)


def _prospect(observation: Observation, state: ControlState, membership: Membership) -> str:
    """Text on when members join."""
    if suspension_of(observation.job, observation.cluster) is not None:
        return "they join when the job is resumed, on nodes that are free then"
    ready = ready_members(observation, state, membership)
    texts, found = [], places(observation, state, membership)
    for member, name in found.items():
        agent = observation.cluster.agent(member, name)
        why = f" ({agent.why})" if agent is not None and agent.why else ""
        stands = "is ready" if member in ready else "gets ready"
        texts.append(f"member {member} {stands} on {name}{why}")
    if not texts:
        return _without_place(observation, state)
    lack = observation.job.spec.copy_nodes - len(found)
    if lack > 0:
        return (
            f"{', '.join(texts)}; a copy of the model takes {observation.job.spec.copy_nodes} "
            f"nodes: members join when {lack} more {'is' if lack == 1 else 'are'} free"
        )
    wait_s = observation.job.spec.failure_policy.join_wait_seconds
    when = (
        ""
        if state.replaced.intersection(member for member, _ in state.joining)
        else f", failurePolicy.joinWaitSeconds = {wait_s:g} s after the last change"
    )
    return f"{', '.join(texts)}; they join when a generation has just been protected{when}"


def _without_place(observation: Observation, state: ControlState) -> str:
    """Text on missing members for which no agent gets ready."""
    paused = [each for each in state.setbacks if not_before(state, each.node) > observation.now]
    if not paused:
        return "no node is free for them: repair a node, or add one"
    first = min(paused, key=lambda each: not_before(state, each.node)).node
    left_s = not_before(state, first) - observation.now
    return (
        f"no node is free for them but {listed(each.node for each in paused)}, where members left "
        f"soon after they had joined, or agents ended: {first} is tried again in {left_s:.0f} s"
    )


def _is_time(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    joining: Collection[int],
    absent: Collection[int],
) -> bool:
    """Whether the members that are ready should join now."""
    if not _trains(observation, state, membership):
        return False
    due = _due(observation, state, joining, absent)
    if observation.now < due:
        return False
    if just_saved(state, membership, observation.now):
        return True
    wait_s = observation.job.spec.failure_policy.join_wait_seconds
    lost_s = observation.now - max(state.saved_at, state.began_at)
    return observation.now >= due + wait_s and lost_s <= 2.0 * wait_s


def _due(
    observation: Observation, state: ControlState, joining: Collection[int], absent: Collection[int]
) -> float:
    """Time from which members join: at once for replacements, which wait only for each other for a
    moment, and after `joinWaitSeconds` on nodes that came later."""
    assert state.resized_at is not None and state.joinable_since is not None
    assert state.ready_since is not None
    if state.replaced.intersection(joining):
        on_their_way = {member for member, _ in state.joining} & state.replaced
        return state.ready_since + (0.0 if on_their_way <= set(joining) else GATHER_S)
    wait_s = observation.job.spec.failure_policy.join_wait_seconds
    due = state.resized_at + wait_s
    return due if len(joining) == len(absent) else max(due, state.joinable_since + wait_s)


def _trains(observation: Observation, state: ControlState, membership: Membership) -> bool:
    """Whether all members train, and none has ended."""
    return (
        state.resumed_epoch == membership.epoch
        and training_runs(observation.cluster, membership)
        and all(
            agent.state is not AgentState.EXITED
            for agent in observation.cluster.agents
            if membership.has(agent.member)
        )
    )
