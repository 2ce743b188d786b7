"""Starts agents of missing members before these members join. Pure.

Starting an agent takes seconds in which no rank of the world could train, so a member joins only
once its agent waits for a world. Until then the agent is not part of the world: its daemon tells it
to wait, and its end is neither a cause nor a restart. It is started again on any free node, but not
soon on the same one: the pause doubles each time that an agent of a missing member ends on the
node, and each time that a member joins there, so that a node on which members join and die costs
ever fewer recoveries.

`growing`, not this module, decides when members join.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.failures.blaming import blame_start
from holdfast_operator.reconciler.observe.counters import Setback
from holdfast_operator.reconciler.observe.evidence import UNSCHEDULABLE_S, is_unschedulable
from holdfast_operator.reconciler.observe.text import agent_exit_in_words
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    ClusterView,
    ControlState,
    EventReason,
    NodeView,
    StartAgent,
)
from holdfast_operator.reconciler.placement import choose_joiners, unrated
from holdfast_operator.reconciler.rules import Observation, RuleResult, note_avoided, stop

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


def places(observation: Observation, state: ControlState, membership: Membership) -> dict[int, str]:
    """Missing member → node on which its agent starts or waits. What a control loop has forgotten
    is read from the agents that are there."""
    absent = set(absent_members(observation.job, membership))
    seen = {
        a.member: a.node for a in observation.cluster.agents if a.state is not AgentState.STOPPING
    }
    found = seen | dict(state.joining)
    return {member: found[member] for member in sorted(absent & found.keys())}


def ready_members(
    observation: Observation, state: ControlState, membership: Membership
) -> dict[int, NodeView]:
    """Missing members whose agents wait for a world, and their nodes."""
    nodes = {node.name: node for node in observation.candidates(state) if node.agent_waits}
    found = _under_way(observation, state, membership)
    return {m: nodes[name] for m, name in found.items() if name in nodes}


def arriving_members(
    observation: Observation, state: ControlState, membership: Membership
) -> dict[int, NodeView]:
    """Missing members whose agents wait or are on their way, and their nodes."""
    nodes = {node.name: node for node in observation.candidates(state)}
    found = _under_way(observation, state, membership)
    return {m: nodes[name] for m, name in found.items() if name in nodes}


def _under_way(
    observation: Observation, state: ControlState, membership: Membership
) -> dict[int, str]:
    """Where agents of missing members are at work, on nodes that stay."""
    found = {}
    for member, name in places(observation, state, membership).items():
        agent = observation.cluster.agent(member, name)
        at_work = agent is not None and agent.state in (AgentState.STARTING, AgentState.RUNNING)
        if at_work and _may_take(observation, state, membership, name):
            found[member] = name
    return found


def joining_state(observed: ClusterView, member: int, node: str) -> str:
    """How far the agent of a missing member is, in one word: ready once it waits for a world."""
    agent, view = observed.agent(member, node), observed.nodes.get(node)
    if agent is None or agent.state is AgentState.STARTING:
        return AgentState.STARTING.value
    if agent.state is not AgentState.RUNNING:
        return agent.state.value
    return "ready" if view is not None and view.agent_waits else AgentState.STARTING.value


def prepare(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Start agents of missing members where these will join, and stop agents that are not wanted.
    New places are chosen while training runs: before that, agents that are needed at once have the
    processor."""
    result = _note_ends(observation, state, membership)
    kept = dict(_kept(observation, result.state, membership))
    if state.resumed_epoch == membership.epoch:
        taken = {*kept.values(), *places(observation, result.state, membership).values()}
        free = free_nodes(observation, result.state, membership, taken)
        absent = [m for m in absent_members(observation.job, membership) if m not in kept]
        chosen = choose_joiners(membership, free, len(absent))
        plain = choose_joiners(membership, unrated(free), len(absent))
        result = result.then(note_avoided(observation, result.state, chosen, plain))
        kept.update((m, node.name) for m, node in zip(absent, chosen, strict=False))
    strays = [
        agent
        for agent in _agents_of_absent(observation, membership)
        if agent.state is AgentState.EXITED or kept.get(agent.member) != agent.node
    ]
    result = result.then(stop(observation, result.state, strays))
    result = result.act(
        *(
            StartAgent(member=member, node=name)
            for member, name in sorted(kept.items())
            if observation.cluster.agent(member, name) is None
        )
    )
    return replace(result, state=_remember(observation, result.state, membership, kept))


def free_nodes(
    observation: Observation, state: ControlState, membership: Membership, taken: Collection[str]
) -> list[NodeView]:
    """Nodes on which missing members could join, without those `taken` by others."""
    homes = {member.node for member in membership.members}.union(taken)
    wait_s = observation.job.spec.failure_policy.join_wait_seconds
    since = observation.now if state.resized_at is None else state.resized_at
    tries_again = observation.now - since >= UNFIT_WAITS * wait_s
    return [
        node
        for node in observation.candidates(state)
        if node.name not in homes
        and not node.disruption
        and (tries_again or node.name not in state.unfit)
        and observation.now >= not_before(state, node.name)
    ]


def not_before(state: ControlState, node: str) -> float:
    """Time before which no agent of a missing member is started on the node."""
    found = next((each for each in state.setbacks if each.node == node), None)
    if found is None:
        return float("-inf")
    return found.at + min(PAUSE_S * 2.0 ** (found.times - 1), PAUSE_S_MAX)


def with_setback(
    observation: Observation, state: ControlState, nodes: Collection[str]
) -> ControlState:
    """`state`, with the pause of `nodes` restarted, twice as long as before."""
    known = {each.node: each for each in state.setbacks if observation.now - each.at < FORGET_S}
    for name in sorted(nodes):
        times = known[name].times + 1 if name in known else 1
        known[name] = Setback(node=name, times=times, at=observation.now)
    return replace(state, setbacks=tuple(known.values()))


def _agents_of_absent(observation: Observation, membership: Membership) -> list[AgentView]:
    return [agent for agent in observation.cluster.agents if not membership.has(agent.member)]


def _may_take(
    observation: Observation, state: ControlState, membership: Membership, name: str
) -> bool:
    """Whether an agent may keep waiting on a node, or on its way there."""
    node = observation.cluster.nodes.get(name)
    return (
        node is not None
        and observation.may_return(node, state)
        and not node.disruption
        and membership.member_on(name) is None
    )


def _kept(
    observation: Observation, state: ControlState, membership: Membership
) -> Iterator[tuple[int, str]]:
    """Yield the missing members that keep their places, each place once."""
    taken: set[str] = set()
    found = places(observation, state, membership)
    for member, name in found.items():
        agent = observation.cluster.agent(member, name)
        there = agent is not None and agent.state is not AgentState.EXITED
        if name in taken or not _may_take(observation, state, membership, name):
            continue
        if not there and observation.now < not_before(state, name):
            continue
        elsewhere = free_nodes(observation, state, membership, found.values())
        if _finds_no_room(observation, state, member) and elsewhere:
            continue
        taken.add(name)
        yield member, name


def _finds_no_room(observation: Observation, state: ControlState, member: int) -> bool:
    """Whether there has been no room for an agent for so long that another node is tried."""
    since = dict(state.unscheduled_since).get(member)
    return since is not None and observation.now - since >= UNSCHEDULABLE_S


def _note_ends(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Begin the pause of nodes on which an agent has ended, or finds no room, with an event."""
    result, since = RuleResult(state), dict(state.unscheduled_since)
    agents = _agents_of_absent(observation, membership)
    waiting = [agent for agent in agents if is_unschedulable(agent)]
    since = {agent.member: since.get(agent.member, observation.now) for agent in waiting}
    ended = [agent for agent in agents if agent.state is AgentState.EXITED]
    state = replace(
        with_setback(observation, state, {agent.node for agent in ended}),
        unscheduled_since=tuple(since.items()),
    )
    result = replace(result, state=state)
    known = places(observation, state, membership)
    for agent in ended:
        if known.get(agent.member) != agent.node:
            continue
        how = (
            "ended"
            if agent.exit_code is None
            else agent_exit_in_words(observation.job, agent.exit_code, agent.reason, agent.message)
        )
        pause_s = not_before(state, agent.node) - observation.now
        text = (
            f"the agent of member {agent.member} on {agent.node} {how} before the member joined, "
            f"which disturbs nobody; the node is tried again in {pause_s:g} s"
        )
        result = result.post(EventReason.JOINER_EXITED, text, warning=True)
        if agent.exit_code and not agent.disruption:
            end = agent.node, agent.exit_code, agent.last_lines, agent.reason
            result = blame_start(observation, result, *end)
    return result


def _remember(
    observation: Observation, state: ControlState, membership: Membership, kept: Mapping[int, str]
) -> ControlState:
    """Remember the places, and forget replacements for which no node is left: a node that comes
    later is a new one."""
    spare = [
        name
        for name in observation.cluster.nodes
        if name not in kept.values() and _may_take(observation, state, membership, name)
    ]
    replaced = state.replaced & set(absent_members(observation.job, membership))
    return replace(
        state,
        joining=tuple(sorted(kept.items())),
        replaced=frozenset(m for m in replaced if m in kept or spare),
    )
