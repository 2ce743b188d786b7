"""Jobs of which a copy of the model takes several nodes, on virtual time."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from virtual_world import World, make_job, running

LOST_S = 6.0
GROUPS_OF_2 = {"type": "RAIM5", "raim5": {"groupSize": 2}}


def pipelines(
    nodes: int = 4, least: int = 2, *, pp: int = 2, spares: int = 0, **more: Any
) -> World:
    """A job of pipelines, each on `pp` nodes, that trains in epoch 1."""
    spec = {
        "minNodes": least,
        "parallelism": {"dp": nodes // pp, "pp": pp},
        "redundancy": GROUPS_OF_2,
        **more,
    }
    return running(make_job(nodes, spares=spares, spec=spec))


def indices(world: World) -> list[int]:
    return [member.index for member in world.membership.members]


def train_on(world: World, seconds: float) -> None:
    """Let a generation be protected in each second."""
    until = world.now + seconds
    while world.now < until:
        world.train(world.step + 1)
        world.settle(1.0, step_s=0.5)


def test_a_lost_node_leaves_with_one_whose_group_can_rebuild_it() -> None:
    world = pipelines()
    assert [*world.membership.groups] == [(0, 2), (1, 3)]
    world.kill_node("n1")
    world.settle(LOST_S)
    assert (world.membership.epoch, indices(world)) == (2, [0, 3])
    assert world.messages("Recovering") == [
        "member 1 lost with node n1 (no heartbeat for 5.0 s); 2 of 4 members go on, members [2] "
        "are idle in epoch 2"
    ]
    assert [*world.membership.groups] == [(0, 3)]
    assert (world.phase(), world.state.counted) == ("Running", 1)


def test_an_idle_member_waits_for_a_whole_copy_and_joins_with_it() -> None:
    world = pipelines()
    world.kill_daemon("n1")
    world.agents = {key: agent for key, agent in world.agents.items() if key[1] != "n1"}
    world.settle(LOST_S)
    assert (2, "n2") in world.agents
    train_on(world, 300.0)
    assert indices(world) == [0, 3]
    assert world.condition("FullStrength") == (
        *(False, "MembersMissing"),
        "2 of 4 members since epoch 2, and at least 2 are needed: members [1, 2] are missing; "
        "member 2 is ready on n2; a copy of the model takes 2 nodes: members join when 1 more is "
        "free",
    )
    world.revive_daemon("n1", new_memory=True)
    train_on(world, 20.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 1, 2, 3])
    assert world.messages("Joined") == [
        "n1 joins as member 1, n2 joins as member 2; 4 of 4 members in epoch 3"
    ]


def test_copies_of_four_nodes_leave_with_members_of_four_groups() -> None:
    world = pipelines(16, 12, pp=4, redundancy={"type": "RAIM5"})
    groups = world.membership.groups
    assert len(groups) == 4
    world.kill_node("n5")
    world.settle(LOST_S)
    left = set(range(16)).difference(indices(world))
    assert len(left) == 4 and "n5" not in world.nodes_of_members()
    assert all(len(left.intersection(group)) == 1 for group in groups)


def test_a_job_waits_while_no_group_can_spare_an_idle_member() -> None:
    world = pipelines(6, 2)
    world.kill_node("n1")
    world.settle(LOST_S)
    assert indices(world) == [0, 2, 3, 4]
    world.kill_node("n5")  # where member 5 is idle
    world.kill_node("n0")
    world.settle(LOST_S)
    assert world.membership.epoch == 2  # the groups of all others have lost a member
    assert (
        "a copy of the model takes 2 nodes, and parity groups cannot rebuild what those that would "
        "leave as well hold" in world.decision.reason
    )


def test_several_lost_nodes_are_of_the_copies_that_leave() -> None:
    world = pipelines(8, 2, redundancy={"type": "RAIM5", "raim5": {"groupSize": 2}})
    assert world.membership.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    world.kill_node("n0")
    world.kill_node("n1")
    world.settle(LOST_S)
    assert indices(world) == [2, 3, 4, 5, 6, 7]
    assert "idle" not in world.messages("Recovering")[0]


def test_a_spare_for_one_of_two_lost_nodes_waits_for_a_copy() -> None:
    world = pipelines(6, 2, spares=1)
    world.kill_node("n0")
    world.kill_node("n1")
    world.settle(LOST_S)
    assert indices(world) == [2, 3, 4, 5]
    assert world.messages("Recovering")[0].endswith(
        "; 4 of 6 members go on, members [0] are idle in epoch 2"
    )


def test_members_wait_for_an_agent_that_starts_where_they_are() -> None:
    world = pipelines()
    world.exit_agent(1, 1)
    world.settle(2.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 2, 3])


def test_a_ready_member_does_not_join_a_recovery_without_its_copy() -> None:
    world = pipelines()
    world.kill_node("n1")
    world.settle(LOST_S + 2.0)
    world.train(20)
    world.settle(2.0)
    world.lose_rank(0)
    world.settle(2.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 3])


def test_an_idle_member_takes_the_place_of_the_next_lost_one() -> None:
    world = pipelines()
    world.kill_node("n1")
    world.settle(LOST_S + 2.0)
    world.train(20)
    world.settle(2.0)
    world.kill_node("n3")
    world.settle(LOST_S)
    assert (world.membership.epoch, indices(world)) == (3, [0, 2])


def test_a_node_with_a_notice_leaves_with_its_copy() -> None:
    world = pipelines()
    world.notices["n1"] = "spot"
    world.settle(5.0)
    assert world.membership.epoch == 1
    world.train(20)
    world.look()
    assert (world.membership.epoch, indices(world)) == (2, [0, 3])


def test_a_node_with_a_notice_is_idle_first() -> None:
    world = pipelines(6, 2)
    world.notices["n0"] = "spot"
    world.kill_node("n1")
    world.settle(LOST_S)
    assert indices(world) == [2, 3, 4, 5]


def test_a_suspended_job_is_resumed_in_whole_copies() -> None:
    world = pipelines()
    world.train(20)
    world.settle(2.0)
    job, world.job = world.job, replace(world.job, spec=replace(world.job.spec, suspend=True))
    world.settle(1.0)
    world.kill_node("n1")
    world.job = job
    world.settle(LOST_S)
    assert (world.membership.epoch, indices(world)) == (2, [0, 3])
    assert world.messages("Reshaped") == []
    assert world.messages("Resumed") == [
        "no longer suspended; 2 of 4 members go on, members [2] are idle; epoch 2 begins"
    ]


def test_members_whose_ranks_get_other_numbers_start_again() -> None:
    world = pipelines(6, 2)
    world.kill_node("n1")
    world.settle(LOST_S + 2.0)
    world.train(20)
    world.settle(2.0)
    world.kill_node("n2")
    world.settle(LOST_S)
    assert indices(world) == [0, 3, 4, 5]
    assert world.membership.restarting == {3, 4, 5}


def test_nobody_is_said_to_stay_in_a_world_of_another_size() -> None:
    world = pipelines()
    world.following = set(range(4))
    world.kill_node("n1")
    world.settle(LOST_S)
    assert "stay" not in world.messages("Recovering")[0]


def test_members_join_in_whole_copies_when_min_nodes_was_raised() -> None:
    world = pipelines(6, 2)
    world.kill_node("n1")
    world.settle(LOST_S + 2.0)
    world.train(20)
    world.settle(2.0)
    world.job = replace(world.job, spec=replace(world.job.spec, min_nodes=6))
    world.lose_rank(0)
    world.settle(2.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 2, 3, 4])
