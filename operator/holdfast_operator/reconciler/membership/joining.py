"""Agents of missing members start, and wait, before their members join. Pure.

Starting an agent takes seconds in which no rank of the world could train, so a member joins only
once its agent waits for a world. Until then the agent is no part of the world: its daemon tells it
to wait, and its end is neither a cause nor a restart. It is started again, on any node that is
free, but not soon on the same one: the pause doubles each time that an agent of a missing member
ends on the node, and each time that a member joins there, so that a node on which members join and
die costs ever fewer recoveries.

This module must not decide when members join: `growing` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.counters import Setback
from holdfast_operator.reconciler.observe.evidence import UNSCHEDULABLE_S, is_unschedulable
from holdfast_operator.reconciler.observe.text import exit_in_words
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    ControlState,
    EventReason,
    NodeView,
    Observed,
    StartAgent,
)
from holdfast_operator.reconciler.placement import choose_joiners
from holdfast_operator.reconciler.steps import Look, Step, stop

PAUSE_S, PAUSE_S_MAX = 30.0, 3600.0
"""Pause before a member may join again on a node where one joined, or its agent ended, and the
maximum of that pause: it doubles each time."""
FORGET_S = 2 * PAUSE_S_MAX
"""Time after which such an event no longer makes the next pause longer."""
UNFIT_WAITS = 10.0
"""How many `joinWaitSeconds` a node is left alone on which a member of the world had no room."""


def absent_members(job: MoETrainingJob, membership: Membership) -> list[int]:
    """Members that the job lacks, ascending."""
    return [index for index in range(job.spec.nodes) if not membership.has(index)]


def places(look: Look, state: ControlState, membership: Membership) -> dict[int, str]:
    """Missing member → node on which its agent starts or waits. What a control loop has forgotten
    is read from the agents that are there."""
    absent = set(absent_members(look.job, membership))
    seen = {a.member: a.node for a in look.observed.agents if a.state is not AgentState.STOPPING}
    found = seen | dict(state.joining)
    return {member: found[member] for member in sorted(absent & found.keys())}


def ready_members(look: Look, state: ControlState, membership: Membership) -> dict[int, NodeView]:
    """Missing members whose agents wait for a world, and their nodes."""
    nodes = {node.name: node for node in look.candidates(state) if node.agent_waits}
    found = _under_way(look, state, membership)
    return {m: nodes[name] for m, name in found.items() if name in nodes}


def arriving_members(
    look: Look, state: ControlState, membership: Membership
) -> dict[int, NodeView]:
    """Missing members whose agents wait or are on their way, and their nodes."""
    nodes = {node.name: node for node in look.candidates(state)}
    found = _under_way(look, state, membership)
    return {m: nodes[name] for m, name in found.items() if name in nodes}


def _under_way(look: Look, state: ControlState, membership: Membership) -> dict[int, str]:
    """Where agents of missing members are at work, on nodes that stay."""
    found = {}
    for member, name in places(look, state, membership).items():
        agent = look.observed.agent(member, name)
        at_work = agent is not None and agent.state in (AgentState.STARTING, AgentState.RUNNING)
        if at_work and _may_take(look, state, membership, name):
            found[member] = name
    return found


def joining_state(observed: Observed, member: int, node: str) -> str:
    """How far the agent of a missing member is, in one word: ready once it waits for a world."""
    agent, view = observed.agent(member, node), observed.nodes.get(node)
    if agent is None or agent.state is AgentState.STARTING:
        return AgentState.STARTING.value
    if agent.state is not AgentState.RUNNING:
        return agent.state.value
    return "ready" if view is not None and view.agent_waits else AgentState.STARTING.value


def prepare(look: Look, state: ControlState, membership: Membership) -> Step:
    """Start agents of missing members where these will join, and stop those that are not wanted.
    New places are chosen while training runs: before that, the processor belongs to agents that
    are needed at once."""
    step = _note_ends(look, state, membership)
    kept = dict(_kept(look, step.state, membership))
    if state.resumed_epoch == membership.epoch:
        taken = {*kept.values(), *places(look, step.state, membership).values()}
        free = free_nodes(look, step.state, membership, taken)
        absent = [m for m in absent_members(look.job, membership) if m not in kept]
        chosen = choose_joiners(membership, free, len(absent))
        kept.update((m, node.name) for m, node in zip(absent, chosen, strict=False))
    strays = [
        agent
        for agent in _agents_of_absent(look, membership)
        if agent.state is AgentState.EXITED or kept.get(agent.member) != agent.node
    ]
    step = step.then(stop(look, step.state, strays))
    step = step.act(
        *(
            StartAgent(member=member, node=name)
            for member, name in sorted(kept.items())
            if look.observed.agent(member, name) is None
        )
    )
    return replace(step, state=_remember(look, step.state, membership, kept))


def free_nodes(
    look: Look, state: ControlState, membership: Membership, taken: Collection[str]
) -> list[NodeView]:
    """Nodes on which missing members could join, without those `taken` by others."""
    homes = {member.node for member in membership.members}.union(taken)
    wait_s = look.job.spec.failure_policy.join_wait_seconds
    since = look.now if state.resized_at is None else state.resized_at
    tries_again = look.now - since >= UNFIT_WAITS * wait_s
    return [
        node
        for node in look.candidates(state)
        if node.name not in homes
        and not node.disruption
        and (tries_again or node.name not in state.unfit)
        and look.now >= not_before(state, node.name)
    ]


def not_before(state: ControlState, node: str) -> float:
    """Time before which no agent of a missing member is started on the node."""
    found = next((each for each in state.setbacks if each.node == node), None)
    if found is None:
        return float("-inf")
    return found.at + min(PAUSE_S * 2.0 ** (found.times - 1), PAUSE_S_MAX)


def with_setback(look: Look, state: ControlState, nodes: Collection[str]) -> ControlState:
    """`state`, with the pause of `nodes` begun anew, twice as long as before."""
    known = {each.node: each for each in state.setbacks if look.now - each.at < FORGET_S}
    for name in sorted(nodes):
        times = known[name].times + 1 if name in known else 1
        known[name] = Setback(node=name, times=times, at=look.now)
    return replace(state, setbacks=tuple(known.values()))


def _agents_of_absent(look: Look, membership: Membership) -> list[AgentView]:
    return [agent for agent in look.observed.agents if not membership.has(agent.member)]


def _may_take(look: Look, state: ControlState, membership: Membership, name: str) -> bool:
    """Whether an agent may go on waiting on a node, or on its way there."""
    node = look.observed.nodes.get(name)
    return (
        node is not None
        and look.may_return(node, state)
        and not node.disruption
        and membership.member_on(name) is None
    )


def _kept(look: Look, state: ControlState, membership: Membership) -> Iterator[tuple[int, str]]:
    """Yield the missing members that keep their places, each place once."""
    taken: set[str] = set()
    found = places(look, state, membership)
    for member, name in found.items():
        agent = look.observed.agent(member, name)
        there = agent is not None and agent.state is not AgentState.EXITED
        if name in taken or not _may_take(look, state, membership, name):
            continue
        if not there and look.now < not_before(state, name):
            continue
        elsewhere = free_nodes(look, state, membership, found.values())
        if _finds_no_room(look, state, member) and elsewhere:
            continue
        taken.add(name)
        yield member, name


def _finds_no_room(look: Look, state: ControlState, member: int) -> bool:
    """Whether there has been no room for an agent for so long that another node is tried."""
    since = dict(state.unscheduled_since).get(member)
    return since is not None and look.now - since >= UNSCHEDULABLE_S


def _note_ends(look: Look, state: ControlState, membership: Membership) -> Step:
    """Begin the pause of nodes on which an agent has ended, or finds no room, with an event."""
    step, since = Step(state), dict(state.unscheduled_since)
    agents = _agents_of_absent(look, membership)
    waiting = [agent for agent in agents if is_unschedulable(agent)]
    since = {agent.member: since.get(agent.member, look.now) for agent in waiting}
    ended = [agent for agent in agents if agent.state is AgentState.EXITED]
    state = replace(
        with_setback(look, state, {agent.node for agent in ended}),
        unscheduled_since=tuple(since.items()),
    )
    step = replace(step, state=state)
    known = places(look, state, membership)
    for agent in ended:
        if known.get(agent.member) != agent.node:
            continue
        how = (
            "ended"
            if agent.exit_code is None
            else exit_in_words(agent.exit_code, agent.reason, agent.message)
        )
        pause_s = not_before(state, agent.node) - look.now
        text = (
            f"the agent of member {agent.member} on {agent.node} {how} before the member joined, "
            f"which disturbs nobody; the node is tried again in {pause_s:g} s"
        )
        step = step.post(EventReason.JOINER_EXITED, text, warning=True)
    return step


def _remember(
    look: Look, state: ControlState, membership: Membership, kept: Mapping[int, str]
) -> ControlState:
    """Remember the places, and forget replacements for which no node is left: a node that comes
    later is a new one."""
    spare = [
        name
        for name in look.observed.nodes
        if name not in kept.values() and _may_take(look, state, membership, name)
    ]
    replaced = state.replaced & set(absent_members(look.job, membership))
    return replace(
        state,
        joining=tuple(sorted(kept.items())),
        replaced=frozenset(m for m in replaced if m in kept or spare),
    )
