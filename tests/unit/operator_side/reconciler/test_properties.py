"""What holds for any sequence of faults: found by Hypothesis on virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_world import World, make_job

from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_operator.reconciler.observe.evidence import PATIENCE_S
from holdfast_operator.reconciler.observe.views import AgentState, PublishMembership

MAX_RESTARTS = 6
LEAST, JOIN_WAIT_S = 2, 3.0
NO_REPLACEMENT_S = 20.0
SETTLED_S = PATIENCE_S + NO_REPLACEMENT_S + 10.0
"""After this long without a fault, everything that is waited for has come or was given up."""
PIPELINES = {
    "minNodes": LEAST,
    "parallelism": {"dp": 3, "pp": 2},
    "redundancy": {"type": "RAIM5", "raim5": {"groupSize": 2}},
}
"""A job of six nodes, of which a copy of the model takes two."""
RULES = [
    {"when": "NoReplacement", "action": "Fail", "afterSeconds": NO_REPLACEMENT_S},
    {"when": "Disruption", "action": "ReplaceNode", "countTowardsMax": False},
    {"when": "Any", "action": "RestartInPlace"},
]

faults = st.one_of(
    st.tuples(st.just("lose_rank"), st.integers(0, 3)),
    st.tuples(st.just("exit_agent"), st.integers(0, 3)),
    st.tuples(st.just("exit_rank"), st.integers(0, 3)),
    st.tuples(st.just("vanish"), st.integers(0, 3)),
    st.tuples(st.just("evict"), st.integers(0, 3)),
    st.tuples(st.just("drain"), st.integers(0, 3)),
    st.tuples(st.just("uncordon"), st.integers(0, 5)),
    st.tuples(st.just("notice"), st.integers(0, 5)),
    st.tuples(st.just("kill_node"), st.integers(0, 5)),
    st.tuples(st.just("kill_daemon"), st.integers(0, 5)),
    st.tuples(st.just("revive"), st.integers(0, 5)),
    st.tuples(st.just("reboot"), st.integers(0, 5)),
    st.tuples(st.just("chill"), st.integers(0, 5)),
    st.tuples(st.just("warm_up"), st.integers(0, 5)),
    st.tuples(st.just("exit_joiner"), st.integers(0, 3)),
    st.tuples(st.just("forget"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("train"), st.integers(1, 9)),
)
schedules = st.lists(st.tuples(faults, st.sampled_from([0.0, 0.5, 2.0, 7.0])), max_size=12)


def harm(world: World, kind: str, which: int) -> None:
    name = f"n{min(which, len(world.daemons) - 1)}"
    match kind:
        case "lose_rank" if world.membership.has(which):
            world.lose_rank(which)
        case "exit_rank" if world.membership.has(which):
            world.exit_rank(which, 137)
        case "exit_agent" | "vanish" | "evict" | "drain":
            harm_agent(world, kind, which)
        case "uncordon":
            world.cordoned.discard(name)
        case "notice":
            world.notices[name] = "soon"
        case "chill":
            world.cold.add(name)
        case "warm_up":
            world.cold.discard(name)
        case "exit_joiner":
            exit_joiner(world, which)
        case "kill_node":
            world.kill_node(name)
        case "kill_daemon":
            world.kill_daemon(name)
        case "revive" | "reboot" if name not in world.gone and not world.daemons[name].alive:
            world.revive_daemon(name, new_memory=kind == "reboot")
        case "forget":
            world.forget()
            world.look()
        case "restart":
            world.restart()
            world.look()
        case "train":
            world.train(world.step + which)


def exit_joiner(world: World, member: int) -> None:
    """End the agent of a missing member."""
    for key, agent in world.agents.items():
        waits = agent.state in (AgentState.STARTING, AgentState.RUNNING)
        if key[0] == member and not world.membership.has(member) and waits:
            world.agents[key] = replace(agent, state=AgentState.EXITED, exit_code=1)


def harm_agent(world: World, kind: str, member: int) -> None:
    if not world.membership.has(member):
        return
    node = world.membership.member(member).node
    if (member, node) not in world.agents or node in world.gone:
        return
    match kind:
        case "exit_agent":
            world.exit_agent(member, 1)
        case "vanish":
            world.vanish(member)
        case "evict":
            world.evict(member)
        case "drain":
            world.cordoned.add(node)
            world.evict(member)


def pass_time(world: World, seconds: float, *, step_s: float) -> None:
    until = world.now + seconds
    while world.now < until:
        world.look()
        world.reap()
        world.now += step_s


def run(schedule: list[tuple[tuple[str, int], float]]) -> World:
    return disturbed(World(make_job(spares=2, maxRestarts=MAX_RESTARTS, rules=RULES)), schedule)


def run_elastic(schedule: list[tuple[tuple[str, int], float]], spares: int = 0) -> World:
    """Without spares, so that the members change often, or with spares on which agents must start
    first."""
    job = make_job(
        spares=spares, spec={"minNodes": LEAST}, joinWaitSeconds=JOIN_WAIT_S, rules=RULES
    )
    return disturbed(World(job), schedule)


def disturbed(world: World, schedule: list[tuple[tuple[str, int], float]]) -> World:
    world.settle(1.0)
    for (kind, which), pause_s in schedule:
        if world.state.outcome is None and world.state.membership is not None:
            harm(world, kind, which)
        pass_time(world, pause_s, step_s=0.5)
    world.cold.clear()
    pass_time(world, SETTLED_S, step_s=2.0)
    world.settle()
    return world


@settings(max_examples=60)
@given(schedules)
def test_epochs_only_grow_and_a_membership_never_doubles_a_node(
    schedule: list[tuple[tuple[str, int], float]],
) -> None:
    world = run(schedule)
    order = [(membership.epoch, membership.revision) for membership in world.published]
    assert order == sorted(set(order))
    for membership in world.published:
        nodes = [member.node for member in membership.members]
        assert len(set(nodes)) == len(nodes) == 4
        assert membership.groups == ((0, 1, 2, 3),)


@settings(max_examples=60)
@given(schedules)
def test_a_job_ends_up_running_on_living_nodes_or_shows_why_not(
    schedule: list[tuple[tuple[str, int], float]],
) -> None:
    world = run(schedule)
    if world.state.outcome is not None:
        assert world.state.outcome_reason and world.agents == {}
        return
    for member in world.membership.members:
        daemon = world.daemons[member.node]
        assert daemon.alive and daemon.memory_id == member.memory_id
        assert world.agents[member.index, member.node].state is AgentState.RUNNING
    assert len(world.agents) == 4


@settings(max_examples=60)
@given(schedules)
def test_the_restart_loop_is_bounded(schedule: list[tuple[tuple[str, int], float]]) -> None:
    without_amnesia = [item for item in schedule if item[0][0] != "forget"]
    world = run(without_amnesia)
    assert world.state.counted <= MAX_RESTARTS


@settings(max_examples=60)
@given(schedules)
def test_a_control_loop_that_forgets_in_the_end_keeps_the_membership(
    schedule: list[tuple[tuple[str, int], float]],
) -> None:
    world = run(schedule)
    if world.state.outcome is not None:
        return
    before, agents = world.membership, dict(world.agents)
    world.forget()
    world.actions.clear()
    world.settle(20.0, step_s=1.0)
    assert world.membership == before and world.agents == agents
    assert not any(isinstance(action, PublishMembership) for action in world.actions)


@settings(max_examples=60)
@given(schedules)
def test_worlds_follow_each_other_and_none_that_is_needed_is_forgotten(
    schedule: list[tuple[tuple[str, int], float]],
) -> None:
    world = run_elastic(schedule)
    order = [(membership.epoch, membership.revision) for membership in world.published]
    assert order == sorted(set(order))
    worlds: dict[int, MemberWorld] = {}
    for membership in world.published:
        nodes = [member.node for member in membership.members]
        assert len(set(nodes)) == len(nodes)
        assert LEAST <= len(nodes) <= 4 and set(membership.world.members) <= set(range(4))
        present = worlds.setdefault(membership.since, membership.world)
        assert membership.world == present and membership.restarting <= set(present.members)
        assert all(past == worlds[past.since] for past in membership.past)
    saved = world.state.saved
    if saved is not None and world.state.membership is not None:
        assert (
            world.membership.world_of(saved)
            == worlds[max(since for since in worlds if since <= saved.epoch)]
        )


@settings(max_examples=60)
@given(schedules, st.sampled_from([0, 2]))
def test_a_job_that_may_shrink_runs_on_what_is_left_or_shows_why_not(
    schedule: list[tuple[tuple[str, int], float]], spares: int
) -> None:
    check_that_it_runs(run_elastic(schedule, spares))


@settings(max_examples=60)
@given(schedules, st.sampled_from([0, 2]))
def test_a_job_whose_copies_take_two_nodes_runs_on_whole_copies_or_shows_why_not(
    schedule: list[tuple[tuple[str, int], float]], spares: int
) -> None:
    job = make_job(6, spares=spares, spec=PIPELINES, joinWaitSeconds=JOIN_WAIT_S, rules=RULES)
    world = disturbed(World(job), schedule)
    assert {len(membership.members) for membership in world.published} <= {2, 4, 6}
    check_that_it_runs(world)


def check_that_it_runs(world: World) -> None:
    """Check that the job's members train on living nodes, and that missing ones wait there; or that
    the job has ended with a reason."""
    if world.state.outcome is not None:
        assert world.state.outcome_reason and world.agents == {}
        return
    for member in world.membership.members:
        daemon = world.daemons[member.node]
        assert daemon.alive and daemon.memory_id == member.memory_id
        assert world.agents[member.index, member.node].state is AgentState.RUNNING
    joining = dict(world.state.joining)
    assert joining.keys().isdisjoint(world.membership.world.members)
    assert not set(joining.values()).intersection(world.nodes_of_members())
    for index, node in joining.items():
        assert world.agents[index, node].state is AgentState.RUNNING
    assert len(world.agents) == len(world.membership.members) + len(joining)
    document, membership = world.stored(), world.membership
    world.forget()
    world.settle(20.0, step_s=1.0)
    if "resizedAt" not in document:  # else members may have joined
        assert world.membership == membership


@settings(max_examples=60)
@given(schedules, st.sampled_from([0, 2]))
def test_no_world_waits_for_a_member_that_joins_while_enough_others_are_there(
    schedule: list[tuple[tuple[str, int], float]], spares: int
) -> None:
    world = run_elastic(schedule, spares)
    for (before, _), (after, cold) in pairwise(zip(world.published, world.cold_then, strict=True)):
        stays = set(before.world.members).intersection(after.world.members)
        joined = [member for member in after.members if not before.has(member.index)]
        if len(stays) >= LEAST:
            assert cold.isdisjoint(member.node for member in joined)


@settings(max_examples=40)
@given(schedules, st.sampled_from([(4, {"minNodes": 4}), (4, {"minNodes": 3}), (6, PIPELINES)]))
def test_a_job_is_not_given_up_for_want_of_a_node_and_goes_on_when_nodes_are_back(
    schedule: list[tuple[tuple[str, int], float]], job_of: tuple[int, dict[str, Any]]
) -> None:
    """Without a rule of the user: whatever is away for whatever time."""
    at_most_away = [item for item in schedule if item[0][0] not in ("kill_node", "forget")]
    nodes, spec = job_of
    job = make_job(nodes, spares=0, spec=spec, joinWaitSeconds=JOIN_WAIT_S, maxRestarts=1000)
    world = disturbed(World(job), at_most_away)
    assert world.state.outcome is None and not world.dropped
    world.now += 86_400.0
    world.look()
    world.cordoned.clear()
    world.notices.clear()
    for name, daemon in world.daemons.items():
        if not daemon.alive:
            world.revive_daemon(name)
    pass_time(world, PATIENCE_S, step_s=1.0)
    world.reap()
    pass_time(world, 30.0, step_s=1.0)
    assert world.phase() == "Running" and world.state.no_replacement_since is None
