"""Missing members join again, on virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from virtual_world import Daemon, World, make_job, running

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import PAST_WORLDS_MAX, Tier
from holdfast_operator.reconciler.observe.evidence import UNSCHEDULABLE_S
from holdfast_operator.reconciler.observe.views import AgentState, NodeView, StartAgent
from holdfast_operator.reconciler.placement import (
    choose_joiners,
    following,
    form,
)

WAIT_S = 120.0


def job(nodes: int = 4, **more: Any) -> MoETrainingJob:
    return make_job(nodes, spares=0, spec={"minNodes": nodes - 2}, **more)


def shrunk(*lost: str) -> World:
    """A job of four, or of five if two are `lost`, that trains in epoch 2 without these nodes, and
    has protected step 20; none of them is back yet."""
    world = running(job(5, redundancy="RAIM6") if len(lost) == 2 else job())
    nodes = len(world.membership.members)
    for name in lost:
        world.kill_daemon(name)
    world.agents = {key: agent for key, agent in world.agents.items() if key[1] not in lost}
    world.settle(6.0)
    assert len(world.membership.members) == nodes - len(lost)
    world.train(20)
    world.settle(2.0)
    world.actions.clear()
    return world


def train_on(world: World, seconds: float) -> None:
    """Let a generation be protected in each second."""
    until = world.now + seconds
    while world.now < until:
        world.train(world.step + 1)
        world.settle(1.0, step_s=0.5)


def indices(world: World) -> list[int]:
    return [member.index for member in world.membership.members]


def test_a_node_that_comes_back_joins_after_the_wait() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    world.settle(1.0)
    assert world.actions == [StartAgent(member=2, node="n2")]
    train_on(world, WAIT_S - 20.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])
    train_on(world, 30.0)
    membership = world.membership
    assert (membership.epoch, membership.since, indices(world)) == (3, 3, [0, 1, 2, 3])
    assert membership.groups == ((0, 1, 2, 3),) and membership.restarting == {2}
    assert [past.members for past in membership.past] == [(0, 1, 3)]
    assert world.messages("Joined") == ["n2 joins as member 2; 4 of 4 members in epoch 3"]
    assert list(world.kinds()) == ["StartAgent", "PublishMembership"]
    assert (world.state.recoveries, world.state.counted) == (1, 1)
    assert world.phase() == "Running"


def test_members_join_when_a_generation_has_just_been_protected() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S - 20.0)
    world.settle(40.0)
    assert world.membership.epoch == 2
    world.train(500)
    world.look()
    assert world.membership.epoch == 3 and world.state.saved == Generation(2, 500)


def test_members_do_not_wait_for_that_for_longer_than_as_long_again() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    world.settle(2 * WAIT_S - 20.0)
    assert world.membership.epoch == 2
    world.settle(30.0)
    assert world.membership.epoch == 3


def test_members_do_not_join_at_the_cost_of_many_steps() -> None:
    world = shrunk("n2")
    world.settle(3 * WAIT_S)
    world.revive_daemon("n2", new_memory=True)
    world.settle(10 * WAIT_S)
    assert world.membership.epoch == 2
    world.train(500)
    world.look()
    assert world.membership.epoch == 3


def test_nodes_for_all_missing_members_join_without_a_second_wait() -> None:
    world = shrunk("n2")
    train_on(world, WAIT_S + 10.0)
    world.revive_daemon("n2", new_memory=True)
    train_on(world, 2.0)
    assert indices(world) == [0, 1, 2, 3]


def test_a_first_node_of_several_waits_for_more() -> None:
    world = shrunk("n1", "n2")
    train_on(world, WAIT_S + 10.0)
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S - 10.0)
    assert indices(world) == [0, 3, 4]
    train_on(world, 20.0)
    assert indices(world) == [0, 1, 3, 4]
    assert world.nodes_of_members() == ["n0", "n2", "n3", "n4"]
    world.revive_daemon("n1", new_memory=True)
    train_on(world, WAIT_S + 10.0)
    assert world.nodes_of_members() == ["n0", "n2", "n1", "n3", "n4"]


def test_a_second_node_ends_the_wait_for_it() -> None:
    world = shrunk("n1", "n2")
    train_on(world, WAIT_S + 10.0)
    world.revive_daemon("n2", new_memory=True)
    train_on(world, 10.0)
    assert indices(world) == [0, 3, 4]
    world.revive_daemon("n1", new_memory=True)
    train_on(world, 2.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("why", ["cordoned", "notice", "suspended"])
def test_nodes_that_do_not_stay_take_no_member(why: str) -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    if why == "cordoned":
        world.cordoned.add("n2")
    elif why == "notice":
        world.notices["n2"] = "spot"
    else:
        world.job = job(suspend=True)
    for _ in range(20):
        world.train(world.step + 1)
        world.settle(WAIT_S / 10)
    assert world.membership.epoch == 2


def test_a_job_that_is_ending_does_not_grow() -> None:
    world = shrunk("n2")
    world.exit_agent(0, 0)
    world.revive_daemon("n2", new_memory=True)
    train_on(world, 2 * WAIT_S)
    assert world.membership.epoch == 2


def test_an_agent_that_finds_no_room_waits_for_it_and_training_does_not() -> None:
    world = running(job())
    world.exit_agent(1, 42)
    world.full.add("n1")
    world.settle(40.0)
    assert indices(world) == [0, 2, 3]
    train_on(world, 5 * WAIT_S)
    assert (world.membership.epoch, world.agents[1, "n1"].state) == (2, AgentState.STARTING)
    why = "member 1 gets ready on n1 (Unschedulable: 0/5 nodes are available)"
    assert why in world.condition("FullStrength")[2]
    world.full.clear()
    world.agents[1, "n1"] = replace(world.agents[1, "n1"], state=AgentState.RUNNING, reason="")
    train_on(world, 2.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 1, 2, 3])


def test_an_agent_that_finds_no_room_for_long_moves_to_a_node_that_is_free() -> None:
    world = shrunk("n2")
    world.full.add("n2")
    world.revive_daemon("n2", new_memory=True)
    train_on(world, 5.0)
    world.daemons["n9"] = Daemon("memory-9")
    train_on(world, UNSCHEDULABLE_S + 5.0)
    assert (2, "n2") not in world.agents and (2, "n9") in world.agents


def test_a_joined_node_that_is_lost_again_leaves_again() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S + 5.0)
    assert world.membership.epoch == 3
    world.kill_node("n2")
    world.settle(6.0)
    membership = world.membership
    assert (membership.epoch, indices(world)) == (4, [0, 1, 3])
    assert membership.world_of(world.state.saved or Generation(9, 9)) is not None


def test_a_control_loop_that_starts_again_keeps_the_time_of_the_last_change() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S - 20.0)
    world.restart()
    world.look()
    train_on(world, 25.0)
    assert world.membership.epoch == 3


def test_a_control_loop_that_forgot_everything_waits_anew() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S - 20.0)
    world.forget()
    world.look()
    train_on(world, WAIT_S - 20.0)
    assert world.membership.epoch == 2
    train_on(world, 30.0)
    assert world.membership.epoch == 3


def test_a_job_of_all_its_members_remembers_no_change() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S + 20.0)
    assert world.state.resized_at is None and world.state.joinable_since is None


def test_the_condition_tells_which_node_joins() -> None:
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    world.settle(1.0)
    assert world.condition("FullStrength")[2].endswith(
        "members [2] are missing; member 2 is ready on n2; they join when a generation has just "
        "been protected, failurePolicy.joinWaitSeconds = 120 s after the last change"
    )


def test_a_job_that_is_resumed_takes_the_nodes_that_are_there() -> None:
    world = shrunk("n2")
    world.job = make_job(spares=0, spec={"minNodes": 2}, suspend=True)
    world.settle(1.0)
    world.revive_daemon("n2")
    world.settle(1.0)
    world.job = job()
    world.settle(3.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 1, 2, 3])
    assert world.messages("Resumed") == [
        "no longer suspended; n2 joins as member 2; epoch 3 begins"
    ]


def test_what_all_members_of_a_smaller_world_protected_is_protected_after_they_became_more() -> (
    None
):
    world = shrunk("n2")
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S + 1.0)
    assert world.membership.epoch == 3
    assert world.condition("Protected")[:2] == (True, "ParityInPlace")


def test_joining_nodes_are_spread_over_failure_domains() -> None:
    def node(name: str, domain: str) -> NodeView:
        return NodeView(name=name, memory_id=name, domain=domain)

    membership = form(make_job(3), [node(f"n{i}", "ab"[i % 2]) for i in range(3)], 1)
    free = [node("n3", "a"), node("n4", "b"), node("n5", "c"), node("n6", "c")]
    chosen = choose_joiners(membership, free, 3)
    assert [each.name for each in chosen] == ["n5", "n4", "n6"]
    assert len(choose_joiners(membership, free, 9)) == 4


def test_a_job_that_may_no_longer_shrink_still_grows() -> None:
    world = shrunk("n2")
    world.job = make_job(spares=0)
    world.settle(1.0)
    assert (
        "3 of 4 members since epoch 2, and at least 4 are needed"
        in world.condition("FullStrength")[2]
    )
    world.revive_daemon("n2", new_memory=True)
    train_on(world, WAIT_S + 5.0)
    assert indices(world) == [0, 1, 2, 3]


def test_a_job_with_copies_in_storage_grows_however_often_its_world_has_changed() -> None:
    nodes = [NodeView(name=f"n{i}", memory_id=f"n{i}") for i in range(4)]
    elastic = make_job(4, spec={"minNodes": 2})
    membership = replace(form(elastic, nodes, 1), tier=Tier(uri="s3://bucket"))
    everyone = membership.members
    for epoch in range(2, PAST_WORLDS_MAX + 4):
        members = everyone[: 3 if epoch % 2 == 0 else 4]
        membership = following(elastic, membership, members, epoch=epoch, saved=None)
    assert len(membership.past) == PAST_WORLDS_MAX
    assert membership.past[0].since > 1
