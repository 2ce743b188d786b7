"""A control loop that dies in the middle of a recovery: the next one finishes it exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from virtual_world import World, make_job, running

from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.views import (
    Action,
    AgentState,
    ControlState,
    PublishMembership,
)
from holdfast_operator.reconciler.reconcile import reconcile


@dataclass(frozen=True)
class Failure:
    happens: Callable[[World], None]
    counted: int
    node_of_member_2: str


def _lose_rank(world: World) -> None:
    world.lose_rank(2)


def _lose_node(world: World) -> None:
    world.kill_node("n2")


def _evict(world: World) -> None:
    world.evict(2)


def _exit_agent(world: World) -> None:
    world.lose_rank(2)
    world.exit_agent(2, 1)


FAILURES = {
    "rank": Failure(_lose_rank, 1, "n2"),
    "node": Failure(_lose_node, 1, "n4"),
    "eviction": Failure(_evict, 0, "n4"),
    "agent": Failure(_exit_agent, 1, "n2"),
}
CUTS = 8
"""More than any recovery here has actions."""


def decide_and_die(world: World, actions_done: int) -> tuple[dict[str, Any], list[Action]]:
    """Look until something is decided, store it, carry out the first actions, and die."""
    while True:
        world.beat()
        before = world.state
        decision = reconcile(world.job, world.observed(), before, world.now)
        world.state = decision.state
        if any(isinstance(action, PublishMembership) for action in decision.actions):
            stored = world.stored()
            for action in decision.actions[:actions_done]:
                world.carry_out(action)
            return stored, list(decision.actions)
        world.now += 0.25


def settle(world: World) -> None:
    for _ in range(200):
        world.look()
        world.reap()
        world.now += 0.25


@pytest.mark.parametrize("cut", range(CUTS))
@pytest.mark.parametrize("kind", FAILURES)
def test_a_recovery_that_was_cut_is_finished_once(kind: str, cut: int) -> None:
    failure = FAILURES[kind]
    world = running()
    failure.happens(world)
    stored, actions = decide_and_die(world, cut)
    assert len(actions) < CUTS
    published = len(world.published) - 1
    world.restart(stored)
    settle(world)
    assert world.phase() == "Running"
    assert len(world.published) == 2, "one epoch for one failure"
    assert world.membership.epoch == (2 if published else 3)
    assert (world.state.recoveries, world.state.counted) == (1, failure.counted)
    assert world.membership.member(2).node == failure.node_of_member_2
    assert {key[0] for key in world.agents} == {0, 1, 2, 3} and len(world.agents) == 4
    assert all(agent.state is AgentState.RUNNING for agent in world.agents.values())


@pytest.mark.parametrize("kind", FAILURES)
def test_a_recovery_is_finished_once_when_the_loop_dies_after_every_look(kind: str) -> None:
    failure = FAILURES[kind]
    world = running()
    failure.happens(world)
    stored = world.stored()
    for _ in range(60):
        world.state = ControlState()
        world.restart(stored)
        for _ in range(15):  # it lives for long enough to know what is silent
            world.look()
            stored = world.stored()
            world.now += 0.5
        world.reap()
    assert world.membership.epoch == 2
    assert (world.state.recoveries, world.state.counted) == (1, failure.counted)
    assert len(world.agents) == 4


@pytest.mark.parametrize("reached", [{"n0"}, {"n1", "n3"}, {"n0", "n1", "n2"}])
def test_an_epoch_that_reached_only_some_daemons_is_sent_to_the_others(reached: set[str]) -> None:
    world = running()
    old = world.membership
    world.lose_rank(2)
    stored, _ = decide_and_die(world, 8)
    for name, daemon in world.daemons.items():
        if name not in reached and daemon.membership is not None:
            daemon.membership = old
            daemon.lost = {2} if name == "n2" else set()
    world.restart(stored)
    world.published.clear()
    settle(world)
    assert {membership.epoch for membership in world.published} == {2}
    assert all(_epoch(world.daemons[f"n{i}"].membership) == 2 for i in range(4))
    assert world.phase() == "Running" and world.state.recoveries == 1


def _epoch(membership: Membership | None) -> int:
    return 0 if membership is None else membership.epoch


def test_a_control_loop_that_finds_nothing_stored_still_begins_one_epoch_only() -> None:
    world = running(make_job())
    world.lose_rank(2)
    _, actions = decide_and_die(world, 1)
    assert len(actions) == 1
    world.restart({})
    settle(world)
    assert world.membership.epoch == 2 and world.phase() == "Running"


def test_an_agent_that_failed_in_the_epoch_before_is_only_started_again() -> None:
    """Adapters carry out actions side by side: the epoch may be published first."""
    world = running()
    _exit_agent(world)
    left = world.agents[2, "n2"]
    stored, _ = decide_and_die(world, CUTS)
    world.agents[2, "n2"] = left
    world.restart(stored)
    settle(world)
    assert world.membership.epoch == 2 and world.phase() == "Running"
    assert (world.state.recoveries, world.state.counted) == (1, 1)


def test_an_agent_that_fails_again_and_again_after_a_restart_of_the_loop_counts() -> None:
    world = World(make_job(maxRestarts=3))
    world.full.add("n2")  # its agent never comes to work
    world.look()
    world.restart()
    for _ in range(200):
        world.look()
        if (2, "n2") in world.agents and world.state.outcome is None:
            world.exit_agent(2, 1)
        world.now += 0.25
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"
