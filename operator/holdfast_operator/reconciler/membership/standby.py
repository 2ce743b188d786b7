"""Agents that wait on spares, so that a member that moves there has one at once. Pure.

Starting an agent means starting an interpreter and importing torch, twice: seconds in which no rank
trains. A standby agent has done both. It waits for the world like any agent, and belongs to no
member, so it is never evidence of a failure: one that ends is started again after a pause. When a
member moves to its node, `StartAgent` gives the agent to that member.

Standby agents wait on the spares that would be taken first. They start while training runs: before
that, agents that are needed at once have the processor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.failures.blaming import (
    blame_start,
    recent_failed_checks,
    recheck_s,
)
from holdfast_operator.reconciler.membership.joining import places
from holdfast_operator.reconciler.observe.lookups import suspension_of
from holdfast_operator.reconciler.observe.text import agent_exit_in_words
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    ControlState,
    EventReason,
    NodeView,
    StandbyView,
    StartStandby,
    StopStandby,
)
from holdfast_operator.reconciler.placement import choose_spare, preference
from holdfast_operator.reconciler.rules import Observation, RuleResult

PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Pause before a standby agent that has ended is started again, and the maximum of that pause: it
doubles each time."""
FORGET_S = 2 * PAUSE_S_MAX
"""Time after which the end of a standby agent no longer makes the next pause longer."""


def keep_standbys(observation: Observation, state: ControlState) -> RuleResult:
    """Start standby agents that are missing, and stop those that are not wanted.

    This comes after all other rules, whose moves it has to know.
    """
    wanted = _wanted(observation, state)
    result = _note_exits(observation, state, wanted)
    there = {standby.node for standby in observation.cluster.standbys}
    for standby in observation.cluster.standbys:
        ended = standby.state is AgentState.EXITED
        kept = standby.node in wanted or _is_taken_over(observation, state, standby)
        if standby.state is not AgentState.STOPPING and (ended or not kept):
            result = result.act(StopStandby(node=standby.node))
    if state.membership is None or state.resumed_epoch != state.membership.epoch:
        return result
    missing = [
        node
        for node in wanted
        if node not in there and observation.now >= _not_before(observation, result.state, node)
    ]
    return result.act(*(StartStandby(node=node) for node in missing))


def _note_exits(
    observation: Observation, state: ControlState, wanted: Collection[str]
) -> RuleResult:
    """Count the standby agents that have ended, and emit an event for each that is wanted."""
    recent = {
        node: (times, at)
        for node, (times, at) in state.standby_exits.items()
        if observation.now - at < FORGET_S
    }
    result = RuleResult(replace(state, standby_exits=recent))
    for standby in observation.cluster.standbys:
        if standby.state is AgentState.EXITED and standby.node in wanted:
            times = recent.get(standby.node, (0, 0.0))[0] + 1
            recent[standby.node] = times, observation.now
            code = standby.exit_code
            how = "ended" if code is None else agent_exit_in_words(observation.job, code)
            result = blame_start(observation, result, standby.node, code, standby.last_lines)
            pause_s = _not_before(observation, result.state, standby.node) - observation.now
            text = f"the standby agent on {standby.node} {how}; starting it again in {pause_s:g} s"
            result = result.post(EventReason.STANDBY_EXITED, text, warning=True)
    return result


def _not_before(observation: Observation, state: ControlState, node: str) -> float:
    """Time before which a standby agent must not be started on a node. Where a check failed, that
    is when the next one would be due: training runs, and may use the same devices."""
    times, ended_at = state.standby_exits.get(node, (0, float("-inf")))
    failed_at = recent_failed_checks(observation, state).get(node, float("-inf"))
    return max(
        ended_at + min(PAUSE_S * 2.0 ** (times - 1), PAUSE_S_MAX),
        failed_at + recheck_s(observation),
    )


def _is_taken_over(observation: Observation, state: ControlState, standby: StandbyView) -> bool:
    """Whether a member has moved to the node, or will join there, and this is to be its agent."""
    if state.membership is None or state.outcome is not None:
        return False
    if suspension_of(observation.job, observation.cluster) is not None:
        return False
    joining = {node: member for member, node in state.joining}
    member = state.membership.member_on(standby.node)
    member = joining.get(standby.node) if member is None else member
    return member is not None and observation.cluster.agent(member, standby.node) is None


def _wanted(observation: Observation, state: ControlState) -> list[str]:
    """Nodes on which a standby agent shall wait."""
    membership = state.membership
    if not observation.standbys or membership is None or state.outcome is not None:
        return []
    if suspension_of(observation.job, observation.cluster) is not None:
        return []
    return _taken_first(membership, _spares(observation, state, membership), observation.standbys)


def _spares(
    observation: Observation, state: ControlState, membership: Membership
) -> list[NodeView]:
    """Nodes that a member could move to, without those where missing members will join. One with a
    standby agent remains a spare while its daemon is away, for as long as a member would wait for
    it."""
    homes = {member.node for member in membership.members}
    homes.update(places(observation, state, membership).values())
    reachable = {node.name for node in observation.candidates(state)}
    silent = {
        standby.node
        for standby in observation.cluster.standbys
        if observation.may_return(observation.cluster.nodes[standby.node], state)
    }
    return [
        node
        for name, node in observation.cluster.nodes.items()
        if name in reachable | silent
        and name not in homes
        and name not in state.unfit
        and not node.disruption
    ]


def _taken_first(membership: Membership, spares: list[NodeView], count: int) -> list[str]:
    """The spares that would be taken first when a member is lost, `count` at most: first the spares
    that most members would take, then by `preference`."""
    first: Counter[str] = Counter()
    if len(spares) > count:
        settled = {member.index: member for member in membership.members}
        for index in settled:
            spare = choose_spare(membership, index, spares, settled)
            assert spare is not None, "there are spares"
            first[spare.name] += 1
    ranked = sorted(spares, key=lambda node: (-first[node.name], preference(node)))
    return [node.name for node in ranked[:count]]
