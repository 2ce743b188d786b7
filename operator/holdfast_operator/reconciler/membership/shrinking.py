"""Chooses the members that the next epoch leaves out, and how few members are enough. Pure.

A job with `minNodes` below `nodes` waits neither for a node nor for an agent: a member that could
not start its ranks at once leaves, and joins again when its agent waits for a world (`joining`,
`growing`). It can start them if an agent is where the member will be: its own, when only ranks are
lost, or one that waits on a spare. Without a spare the member leaves too, and joins when a node
comes. Below `minNodes` the job waits, like one without `minNodes` (`waiting`). Members that are
ready to join do so in any new epoch.

If a copy of the model takes several nodes, members leave in such numbers that whole copies remain
(`whole_copies`). Leaving then takes the memory of members with it that are well, so the job waits
for members that have a node, and continues only without those that have none.

Members whose memory may still be there leave only while their parity groups can rebuild it
(`replacing`), however long that takes. Members that still train leave right after a generation was
protected, so that nothing is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast_core.job.parsing import FailureAction as RuleAction
from holdfast_core.job.parsing import FailureRule, MoETrainingJob, On
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.reconciler.membership.joining import arriving_members, ready_members
from holdfast_operator.reconciler.membership.whole_copies import (
    in_whole_copies,
    joining_in_whole_copies,
)
from holdfast_operator.reconciler.observe.lookups import just_saved, node_of, suspension_of
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.views import AgentState, ControlState, NodeView
from holdfast_operator.reconciler.placement import Moves
from holdfast_operator.reconciler.rules import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Strength:
    """Members that a job has, wants and needs."""

    active: int
    desired: int
    least: int
    joining: int = 0
    """Missing members whose agents start or wait."""


def strength(job: MoETrainingJob, membership: Membership | None, joining: int = 0) -> Strength:
    """Strength of the job; without a membership, no member is active."""
    return Strength(
        active=0 if membership is None else len(membership.members),
        desired=job.spec.nodes,
        least=job.spec.least_nodes,
        joining=joining,
    )


def shrinks_after_s(job: MoETrainingJob) -> float:
    """Seconds that the job waits for a node before it continues without it."""
    rule = no_replacement_rule(job, RuleAction.SHRINK)
    return 0.0 if rule is None else rule.after_seconds or 0.0


def no_replacement_rule(job: MoETrainingJob, action: RuleAction) -> FailureRule | None:
    """First rule on NoReplacement with this action; None without one. A job may have a rule for
    each: to continue without a node after some time, and to fail after another time where it
    cannot."""
    rules = job.spec.failure_policy.rules
    return next((r for r in rules if r.on is On.NO_REPLACEMENT and r.action is action), None)


def leave_out(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    moves: Moves,
    rules: Iterable[FailureRule],
    groups: ParityGroups,
) -> Moves:
    """`moves`, with further members that the next epoch leaves out beside `leaving`, and with
    members that join it."""
    job, since = observation.job, state.no_replacement_since
    at_once = any(rule.action is RuleAction.SHRINK for rule in rules)
    may_leave = len(membership.members) - len(moves.leaving) - job.spec.least_nodes
    waited_s = 0.0 if since is None else observation.now - since
    lost = moves.unplaced
    joining = _joining(observation, state, membership, missing=len(lost) - may_leave)
    moves = replace(moves, to=moves.to | joining)
    may_leave += len(joining)
    if may_leave <= 0:
        if not lost:  # minNodes was raised: those that are ready may be no whole copy
            for member in joining.keys() - joining_in_whole_copies(job, membership, joining):
                del moves.to[member]
        return moves
    if len(lost) > may_leave or (lost and not at_once and waited_s < shrinks_after_s(job)):
        return moves
    leaving = set(lost)
    if state.ran and len(moves.stuck) <= may_leave - len(leaving):
        leaving.update(moves.stuck)
    if just_saved(state, membership, observation.now):
        leaving.update(moves.warned[: may_leave - len(leaving)])
    left = replace(
        moves,
        leaving=moves.leaving | leaving,
        unplaced=[],
    )
    if job.spec.copy_nodes > 1:
        whole = in_whole_copies(observation, membership, left, groups)
        if whole is None and not lost:  # nobody has to leave
            whole = in_whole_copies(observation, membership, moves, groups)
        return whole or moves
    if not state.ran or not job.spec.may_shrink or (shrinks_after_s(job) and not at_once):
        return left
    return _without_unready(observation, state, membership, left, groups, may_leave - len(leaving))


def _joining(
    observation: Observation, state: ControlState, membership: Membership, *, missing: int
) -> dict[int, NodeView]:
    """Missing members that join an epoch which begins anyway: the ready ones, and also those on
    their way if the job cannot continue without them, because it lacks `missing` members."""
    if suspension_of(observation.job, observation.cluster) is not None:
        return {}
    ready = ready_members(observation, state, membership)
    return ready if missing <= len(ready) else arriving_members(observation, state, membership)


def _without_unready(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    moves: Moves,
    groups: ParityGroups,
    may_leave: int,
) -> Moves:
    """`moves`, without members that the others would wait for: those without an agent on their
    future node. They leave, and get ready there. Members with a notice stay until a generation is
    protected, and leave right after."""
    later, leaving, to = dict[int, NodeView](), set(moves.leaving), dict(moves.to)
    saved = just_saved(state, membership, observation.now)
    for member in sorted(membership.members, key=lambda each: each.index not in moves.lost):
        index, node = member.index, moves.to.get(member.index)
        node = node or node_of(observation.cluster, member)
        waits = index in moves.held or index in moves.silent
        if index in leaving or waits or _is_ready_on(observation, member, node.name):
            continue
        if len(later) >= may_leave:
            break
        if index in moves.on_notice and not saved:
            del to[index]
        elif index in moves.lost or groups.bear_loss_of(index):
            groups.give_up(index)
            leaving.add(index)
            to.pop(index, None)
            later[index] = node
    return replace(moves, leaving=frozenset(leaving), later=later, to=to)


def _is_ready_on(observation: Observation, member: Member, node: str) -> bool:
    """Whether ranks of the member can start on the node at once."""
    agent = observation.cluster.agent(member.index, node)
    if agent is not None:
        return agent.state is AgentState.RUNNING and not agent.disruption
    standbys = (each for each in observation.cluster.standbys if each.node == node)
    return any(each.ready and each.state is AgentState.RUNNING for each in standbys)
