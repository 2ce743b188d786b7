"""A job that goes on with the members that are left, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_world import World, make_job, running

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import PAST_WORLDS_MAX
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import PATIENCE_S, UNSCHEDULABLE_S
from holdfast_operator.reconciler.observe.views import FenceNode, StartAgent

LOST_S = 6.0
ANY = {"when": "Any", "action": "RestartInPlace"}


def elastic(least: int = 2, *, nodes: int = 4, spares: int = 0, **more: Any) -> World:
    """A job of `nodes` members that trains in epoch 1 and may go on with `least`."""
    return running(make_job(nodes, spares=spares, spec={"minNodes": least}, **more))


def indices(world: World) -> list[int]:
    return [member.index for member in world.membership.members]


def test_without_a_spare_the_members_that_are_left_go_on_at_once() -> None:
    world = elastic()
    world.kill_node("n2")
    world.settle(LOST_S)
    membership = world.membership
    assert (membership.epoch, membership.since, indices(world)) == (2, 2, [0, 1, 3])
    assert membership.groups == ((0, 1, 3),) and membership.restarting == frozenset()
    assert membership.past == (
        MemberWorld(since=0, members=(0, 1, 2, 3), nproc_per_node=1, groups=((0, 1, 2, 3),)),
    )
    assert world.messages("Recovering") == [
        "member 2 lost with node n2 (no heartbeat for 5.0 s); 3 of 4 members go on in epoch 2"
    ]
    assert world.messages("NoReplacement") == []
    assert FenceNode(node="n2") in world.actions
    assert not any(isinstance(action, StartAgent) for action in world.actions)
    assert (world.phase(), world.state.counted) == ("Running", 1)
    assert world.messages("Running") == [
        "3 ranks train in epoch 2 from generation 1.10 (step 10), all from local memory"
    ]


def test_workers_that_follow_stay_when_a_member_leaves() -> None:
    world = elastic()
    world.following = set(range(4))
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.messages("Recovering")[0].endswith(
        "; 3 of 4 members go on, their workers stay in epoch 2"
    )


def test_a_spare_that_is_ready_replaces_the_lost_node_instead() -> None:
    world = elastic(spares=1)
    world.standbys_wanted = 1
    world.settle(2.0)
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert (world.membership.since, world.membership.past) == (0, ())


def test_spares_are_used_up_before_the_job_shrinks() -> None:
    world = elastic(spares=1)
    world.standbys_wanted = 1
    world.settle(2.0)
    world.kill_node("n1")
    world.kill_node("n2")
    world.settle(LOST_S + PATIENCE_S)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])
    assert world.nodes_of_members() == ["n0", "n4", "n3"]
    assert world.messages("Recovering")[0].endswith(
        "; spare n4 takes over, 3 of 4 members go on in epoch 2"
    )


def test_one_node_brings_a_job_back_to_its_minimum() -> None:
    world = World(make_job(spares=1, spec={"minNodes": 3}))
    world.kill_daemon("n4")
    world.settle(15.0)
    world.train(10)
    world.settle(1.0)
    world.kill_node("n1")
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.membership.epoch == 1
    world.revive_daemon("n4")
    world.settle(2.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])


def test_a_further_loss_while_the_epoch_is_forming_shrinks_again() -> None:
    world = elastic()
    world.kill_node("n2")
    while world.membership.epoch == 1:
        world.look()
        world.now += 0.25
    world.kill_node("n0")
    world.settle(LOST_S)
    membership = world.membership
    assert (membership.epoch, membership.since, indices(world)) == (3, 3, [1, 3])
    assert membership.leader == 1 and membership.groups == ((1, 3),)
    assert [past.members for past in membership.past] == [(0, 1, 2, 3), (0, 1, 3)]


def test_worlds_older_than_what_is_protected_are_forgotten() -> None:
    world = elastic()
    world.kill_node("n2")
    world.settle(LOST_S)
    world.train(20)
    world.settle(2.0)
    world.kill_node("n0")
    world.settle(LOST_S)
    assert [past.members for past in world.membership.past] == [(0, 1, 3)]


@pytest.mark.parametrize("suspends", [False, True])
def test_what_is_protected_is_known_however_often_the_world_changes(suspends: bool) -> None:
    """Nothing newer becomes protected: for example, the smaller worlds lack memory for it."""
    world = elastic(18, nodes=36)
    world.protects, safe, first = False, world.state.saved, world.membership.world
    for group in first.groups:
        world.kill_node(f"n{group[0]}")
        world.settle(LOST_S)
    if suspends:
        world.revive_daemon("n0", new_memory=True)
        running_job = world.job
        world.job = make_job(36, spares=0, spec={"minNodes": 18}, suspend=True)
        world.settle(5.0)
        world.job = running_job
        world.settle(5.0)
    membership = world.membership
    assert membership.epoch == len(first.groups) + 1 + suspends > PAST_WORLDS_MAX + 1
    assert world.state.saved == safe is not None
    known = membership.world_of(safe)
    assert known is not None and known.members == first.members and known.groups == first.groups
    assert membership.world_of(Generation(2, 99)) is None


def test_all_members_of_a_parity_group_lost_leave_no_line() -> None:
    world = elastic(redundancy="RAIM5")
    world.kill_node("n1")
    world.kill_node("n2")
    world.line = Line(generation=None, reason="1.10 lacks ranks [1, 2]")
    world.settle(LOST_S)
    assert world.state.outcome is Outcome.FAILED
    assert world.state.outcome_word == "NoRecoveryLine"


@pytest.mark.parametrize(
    ("rules", "waits_s"),
    [
        ([ANY], 0.0),
        ([{"when": "NoReplacement", "action": "Fail", "afterSeconds": 60}, ANY], 0.0),
        ([{"when": "NoReplacement", "action": "Shrink", "afterSeconds": 60}, ANY], 60.0),
        (
            [
                {"when": "NodeLost", "action": "Shrink"},
                {"when": "NoReplacement", "action": "Shrink", "afterSeconds": 60},
                ANY,
            ],
            0.0,
        ),
    ],
)
def test_a_rule_makes_the_job_wait_for_a_node_before_it_shrinks(
    rules: list[dict[str, object]], waits_s: float
) -> None:
    world = elastic(rules=rules)
    world.kill_node("n2")
    world.settle(LOST_S)
    if waits_s:
        assert world.membership.epoch == 1
        reason = world.decision.reason
        assert reason.endswith(" s 3 of 4 members go on without them"), reason
        world.settle(waits_s)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])
    assert world.state.no_replacement_since is None


def test_a_rule_to_fail_comes_before() -> None:
    world = elastic(rules=[{"when": "NodeLost", "action": "Fail"}, ANY])
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.state.outcome is Outcome.FAILED
    assert world.state.outcome_reason.endswith("failure rule on NodeLost: Fail applies")


def test_shrink_where_no_node_is_lost_is_a_restart_in_place() -> None:
    world = elastic(rules=[{"when": "ExitCode", "values": [3], "action": "Shrink"}, ANY])
    world.exit_rank(2, 3)
    world.settle(1.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 2, 3])


def test_a_member_that_the_cluster_evicts_leaves() -> None:
    world = elastic()
    world.cordoned.add("n1")
    world.evict(1)
    world.settle(1.0)
    world.reap()
    world.settle(1.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 2, 3])
    assert (1, "n1") not in world.agents


def test_a_member_whose_memory_is_needed_does_not_leave() -> None:
    world = elastic()
    world.kill_node("n2")
    world.settle(LOST_S)
    world.cordoned.add("n1")
    world.evict(1)
    world.settle(10.0)
    assert indices(world) == [0, 1, 3]
    assert "their parity groups are incomplete" in world.decision.reason
    world.settle(600.0)
    assert world.state.outcome is None
    assert indices(world) == [0, 1, 3]


def test_a_silent_node_is_given_time_while_nothing_of_the_new_members_is_protected() -> None:
    world = elastic()
    world.kill_node("n2")
    world.settle(LOST_S)
    world.kill_daemon("n1")
    world.settle(LOST_S + 2.0)
    assert indices(world) == [0, 1, 3]
    world.revive_daemon("n1")
    world.settle(2.0)
    world.train(20)
    world.settle(2.0)
    world.kill_daemon("n1")
    world.settle(LOST_S + 2.0)
    assert indices(world) == [0, 3]


def test_a_member_without_room_leaves_once_training_has_run() -> None:
    world = elastic()
    world.exit_agent(1, 42)
    world.full.add("n1")
    world.settle(5.0)
    assert indices(world) == [0, 2, 3]


def test_a_job_that_never_ran_waits_for_room() -> None:
    world = World(make_job(spares=0, spec={"minNodes": 2}))
    world.full.add("n1")
    world.settle(UNSCHEDULABLE_S + 5.0)
    assert indices(world) == [0, 1, 2, 3]


def test_a_member_with_a_notice_leaves_when_a_generation_was_just_protected() -> None:
    world = elastic()
    world.notices["n2"] = "spot"
    world.settle(5.0)
    assert world.membership.epoch == 1
    world.train(20)
    world.look()
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])
    assert world.state.saved == Generation(1, 20)
    assert "will be taken away: spot; 3 of 4 members go on" in world.messages("Recovering")[0]


def test_a_notice_and_a_crash_at_once_shrink_the_job_twice() -> None:
    world = elastic()
    world.notices["n2"] = "spot"
    world.kill_node("n0")
    world.settle(LOST_S)
    assert (world.membership.epoch, indices(world)) == (2, [1, 2, 3])
    world.train(20)
    world.settle(2.0)
    assert (world.membership.epoch, indices(world)) == (3, [1, 3])
    world.kill_node("n2")  # as announced
    world.settle(LOST_S)
    assert world.membership.epoch == 3


def test_no_more_members_with_notices_leave_than_the_minimum_allows() -> None:
    world = running(make_job(4, spares=0, redundancy="RAIM6", spec={"minNodes": 3}))
    world.notices |= {"n2": "spot", "n3": "spot"}
    world.train(20)
    world.settle(2.0)
    assert indices(world) == [0, 1, 3]
    world.train(30)
    world.settle(2.0)
    assert indices(world) == [0, 1, 3]


def test_a_suspended_job_is_resumed_with_the_members_that_are_left() -> None:
    world = elastic()
    job, world.job = world.job, make_job(spares=0, spec={"minNodes": 2}, suspend=True)
    world.settle(1.0)
    world.kill_node("n2")
    world.job = job
    world.settle(LOST_S)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])
    assert world.messages("Resumed") == [
        "no longer suspended; 3 of 4 members go on; epoch 2 begins"
    ]
    assert world.messages("Reshaped") == [] and world.state.counted == 0


@pytest.mark.parametrize("forgets", [True, False])
def test_a_shrunk_job_is_not_another_shape(forgets: bool) -> None:
    world = elastic()
    world.kill_node("n2")
    world.settle(LOST_S)
    job, world.job = world.job, make_job(spares=0, spec={"minNodes": 2}, suspend=True)
    world.settle(1.0)
    if forgets:
        world.forget()
        world.settle(1.0)
    world.job = job
    world.settle(2.0)
    assert world.messages("Reshaped") == []
    assert (world.membership.epoch, world.membership.since, indices(world)) == (3, 2, [0, 1, 3])


def test_a_control_loop_that_starts_again_knows_the_worlds_from_the_daemons() -> None:
    world = elastic()
    world.kill_node("n2")
    world.settle(LOST_S)
    membership = world.membership
    world.restart()
    world.settle(5.0)
    assert world.membership == membership


def test_the_condition_tells_who_is_missing() -> None:
    world = elastic()
    assert world.condition("FullStrength") == (
        *(True, "AllMembers"),
        "all 4 members are there; the job goes on with 2 or more",
    )
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.condition("FullStrength") == (
        *(False, "MembersMissing"),
        "3 of 4 members since epoch 2, and at least 2 are needed: members [2] are missing; no node "
        "is free for them: repair a node, or add one",
    )
    assert world.condition("Scheduled")[2] == "3 of 4 members on n0, n1, n3"
    assert world.condition("Protected")[:2] == (False, "NothingProtected")
    world.train(20)
    world.settle(1.0)
    assert world.condition("Protected")[:2] == (True, "ParityInPlace")


def test_a_job_without_a_minimum_has_no_such_condition() -> None:
    found = [condition.type.value for condition in running().decision.conditions]
    assert "FullStrength" not in found
