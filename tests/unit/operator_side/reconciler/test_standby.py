"""Agents that wait on spares, on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from virtual_world import World, make_job

from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_operator.reconciler.membership.own_pods import OwnPods
from holdfast_operator.reconciler.membership.standby import (
    FORGET_S,
    PAUSE_S,
    PAUSE_S_MAX,
    keep_standbys,
)
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    ClusterView,
    ControlState,
    NodeView,
    StartAgent,
    StartStandby,
    StopStandby,
)
from holdfast_operator.reconciler.rules import Observation


def with_standbys(count: int = 1, *, spares: int = 2, nodes: int = 4) -> World:
    """A world whose job trains, with an agent waiting on `count` of its spares."""
    world = World(make_job(nodes, spares=spares))
    world.standbys_wanted = count
    world.settle(1.0)
    world.train(10)
    world.settle(1.0)
    world.events.clear()
    world.actions.clear()
    return world


def test_a_standby_agent_starts_on_the_first_spare_once_training_runs() -> None:
    world = World(make_job(spares=2))
    world.standbys_wanted = 1
    assert StartStandby(node="n4") not in world.look().actions
    world.settle(1.0)
    assert world.actions.count(StartStandby(node="n4")) == 1
    assert list(world.standbys) == ["n4"]


@pytest.mark.parametrize(("count", "nodes"), [(0, []), (2, ["n4", "n5"]), (9, ["n4", "n5"])])
def test_there_are_as_many_as_are_wanted_and_there_are_spares(count: int, nodes: list[str]) -> None:
    assert list(with_standbys(count).standbys) == nodes


def test_it_becomes_the_agent_of_the_member_that_moves_to_its_node_and_another_waits() -> None:
    world = with_standbys()
    world.kill_node("n2")
    world.settle(6.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.actions.count(StartAgent(member=2, node="n4")) == 1
    assert not any(isinstance(action, StopStandby) for action in world.actions)
    assert list(world.standbys) == ["n5"] and world.phase() == "Running"


def test_the_end_of_a_standby_agent_is_no_failure_of_the_job() -> None:
    world = with_standbys()
    world.exit_standby("n4")
    world.look()
    assert world.phase() == "Running" and world.membership.epoch == 1
    assert world.state.failure is None and world.state.recoveries == 0
    assert world.messages("StandbyExited") == [
        "the standby agent on n4 exited with code 1; starting it again in 1 s"
    ]
    assert world.standbys == {}


def test_one_that_has_ended_is_started_on_another_spare() -> None:
    world = with_standbys()
    world.exit_standby("n4")
    world.settle(2.0)
    assert list(world.standbys) == ["n5"]


def test_it_is_started_again_after_pauses_that_grow_up_to_a_maximum() -> None:
    world = with_standbys(spares=1)
    pauses = []
    for _ in range(9):
        world.exit_standby("n4")
        since = world.now
        while world.look() and "n4" not in world.standbys:
            world.now += 0.5
        pauses.append(world.now - since)
    assert pauses == [min(PAUSE_S * 2**n, PAUSE_S_MAX) for n in range(9)]
    world.now += FORGET_S
    world.look()
    world.exit_standby("n4")
    world.look()
    assert world.messages("StandbyExited")[-1].endswith("starting it again in 1 s")


def test_one_that_has_ended_does_not_become_an_agent() -> None:
    world = with_standbys()
    world.cordoned.add("n5")
    world.exit_standby("n4")
    world.kill_node("n2")
    world.settle(6.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.actions.count(StartAgent(member=2, node="n4")) == 1
    assert world.phase() == "Running"


def test_none_starts_while_training_does_not_run_and_those_that_wait_go_on() -> None:
    world = with_standbys(2)
    del world.standbys["n5"]
    world.kill_daemon("n1")  # which is waited for
    world.lose_rank(0)
    world.settle(2.0)
    assert list(world.standbys) == ["n4", "n5"]  # training goes on until there is a new epoch
    world.revive_daemon("n1")
    del world.standbys["n5"]
    world.full.add("n3")
    world.vanish(3)
    world.settle(2.0)
    assert world.membership.epoch > 1 and list(world.standbys) == ["n4"]


def test_one_whose_daemon_restarts_goes_on_and_one_on_a_lost_node_is_stopped() -> None:
    world = with_standbys()
    world.kill_daemon("n4")
    world.settle(4.0)
    assert world.actions == [] and list(world.standbys) == ["n4"]
    world.settle(2.0)
    assert world.actions == [StopStandby(node="n4"), StartStandby(node="n5")]


def test_one_whose_daemon_is_seen_starting_gets_more_time() -> None:
    world = with_standbys()
    world.returning.add("n4")
    world.kill_daemon("n4")
    world.settle(30.0)
    assert world.actions == []
    world.settle(6.0)
    assert world.actions == [StopStandby(node="n4"), StartStandby(node="n5")]


@pytest.mark.parametrize("what", ["notices", "cordoned"])
def test_one_on_a_node_that_takes_no_member_is_stopped(what: str) -> None:
    world = with_standbys()
    if what == "notices":
        world.notices["n4"] = "spot"
    else:
        world.cordoned.add("n4")
    world.settle(1.0)
    assert world.actions == [StopStandby(node="n4"), StartStandby(node="n5")]


def test_the_end_of_the_job_stops_all() -> None:
    world = with_standbys(2)
    world.finish()
    world.settle(1.0)
    assert world.standbys == {} and world.phase() == "Complete"
    assert world.messages("StandbyExited") == []


def test_a_suspended_job_has_none_and_no_member_is_said_to_be_stopping() -> None:
    world = with_standbys(2)
    suspended = make_job(spares=2, suspend=True)
    world.job = suspended
    world.settle(1.0)
    assert world.standbys == {} and world.phase() == "Suspended"


def test_a_restarted_control_loop_keeps_them() -> None:
    world = with_standbys(2)
    world.restart()
    world.settle(2.0)
    assert not any(isinstance(action, StartStandby | StopStandby) for action in world.actions)
    assert list(world.standbys) == ["n4", "n5"]


def test_it_waits_on_the_spare_that_most_members_would_take() -> None:
    members = tuple(member(index, f"m{index}", f"zone-{index}") for index in range(3))
    spares = [view("s0", "zone-0"), view("s1", "zone-9")]
    observation = Observation(
        job=make_job(3),
        cluster=ClusterView(nodes={node.name: node for node in spares}),
        now=0.0,
        standbys=1,
        pods=OwnPods(),
    )
    membership = Membership(
        job="default.job",
        epoch=1,
        members=members,
        nproc_per_node=1,
        groups=((0, 1, 2),),
        redundancy=Redundancy.RAIM5,
    )
    state = replace(ControlState(), membership=membership, resumed_epoch=1)
    # Only the member in zone-0 itself could take s0 without sharing a zone of its parity group.
    assert keep_standbys(observation, state).actions == (StartStandby(node="s1"),)


def member(index: int, node: str, domain: str) -> Member:
    return Member(
        index=index, node=node, memory_id="m", peer_address="p", bulk_address="b", domain=domain
    )


def view(name: str, domain: str) -> NodeView:
    return NodeView(name=name, connected=True, heartbeat_at=0.0, memory_id="m", domain=domain)


def test_one_that_is_being_stopped_is_not_stopped_again() -> None:
    world = with_standbys()
    world.standbys["n4"] = replace(world.standbys["n4"], state=AgentState.STOPPING)
    world.cordoned.add("n4")
    world.settle(1.0)
    assert world.actions == [StartStandby(node="n5")]
