"""A silent node whose loss its parity group could not bear is waited for longer."""

from __future__ import annotations

from dataclasses import replace

from virtual_world import World, make_job, running

from holdfast_core.snapshots.generations import Generation
from holdfast_operator.reconciler.observe.evidence import DIAL_S, PATIENCE_S
from holdfast_operator.reconciler.observe.lookups import detection_s

DETECTED_S = 6.0
"""A little more than five missed heartbeats."""


def test_two_silent_nodes_of_a_group_are_waited_for_since_they_may_come_back() -> None:
    world = running(make_job(spares=2))
    world.kill_daemon("n0")
    world.kill_daemon("n1")
    world.settle(PATIENCE_S)
    assert world.actions == []
    world.revive_daemon("n1")
    world.settle(1.0)
    assert world.nodes_of_members() == ["n4", "n1", "n2", "n3"]


def test_two_silent_nodes_of_a_group_that_bears_two_losses_are_replaced_at_once() -> None:
    for spec in (
        {"redundancy": {"type": "RAIM6"}},
        {"redundancy": {"type": "Replication", "replication": {"replicas": 2}}},
    ):
        world = running(make_job(spares=2, spec=spec))
        assert world.membership.groups == ((0, 1, 2, 3),)
        world.kill_daemon("n0")
        world.kill_daemon("n1")
        world.settle(DETECTED_S)
        assert world.nodes_of_members() == ["n4", "n5", "n2", "n3"]


WAITS = [{"when": "NoReplacement", "action": "Fail", "afterSeconds": 1000}]


def test_silence_alone_gives_up_nothing_that_cannot_be_replaced() -> None:
    world = running(make_job(spares=2, rules=WAITS))
    world.kill_daemon("n0")
    world.kill_daemon("n1")
    world.settle(PATIENCE_S + DETECTED_S + 600.0)
    assert world.membership.epoch == 1 and world.state.outcome is None
    assert "nothing else holds what their memory may hold" in world.decision.reason
    assert world.phase() != "Running"
    world.kill_node("n1")  # now it is known
    world.settle(1.0)
    assert world.membership.epoch == 1  # the other one may still be there
    world.revive_daemon("n0")
    world.settle(1.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]


def test_a_rule_that_the_user_wrote_ends_the_wait_for_silent_memory() -> None:
    world = running(make_job(spares=2, rules=WAITS))
    world.kill_daemon("n0")
    world.kill_daemon("n1")
    world.settle(PATIENCE_S + DETECTED_S + 1010.0)
    assert world.state.outcome_word == "NoReplacement"


def test_a_copy_in_storage_is_gone_back_to_when_patience_ends() -> None:
    job = make_job(spares=2, spec={"persistence": {"uri": "file:///tier"}})
    world = running(job)
    world.state = replace(world.state, stored=Generation(1, 5), stored_in="file:///tier")
    world.kill_daemon("n0")
    world.kill_daemon("n1")
    world.settle(PATIENCE_S + DETECTED_S)
    assert world.nodes_of_members() == ["n4", "n5", "n2", "n3"]


def test_a_suspended_job_does_not_leave_silent_memory_behind_when_it_resumes() -> None:
    world = running(make_job(redundancy="None", rules=WAITS, suspend=False))
    world.job = make_job(redundancy="None", rules=WAITS, suspend=True)
    world.settle(2.0)
    world.kill_daemon("n0")
    world.job = make_job(redundancy="None", rules=WAITS)
    world.settle(PATIENCE_S + DETECTED_S + 100.0)
    assert world.membership.epoch == 1 and world.state.outcome is None
    world.revive_daemon("n0")
    world.settle(2.0)
    assert world.membership.epoch == 2 and world.phase() == "Running"


def test_what_became_safe_without_a_control_loop_counts_once_a_daemon_reports_it() -> None:
    """The status remembers no generation, and the silent daemon holds a part of one."""
    world = running(make_job(redundancy="None", rules=WAITS))
    world.forget()
    world.daemons["n1"].alive = False
    world.settle(PATIENCE_S + DETECTED_S + 60.0)
    assert world.state.saved is None and world.membership.epoch == 1


def test_nodes_that_are_known_to_be_gone_are_not_waited_for() -> None:
    world = running(make_job(spares=2))
    world.kill_node("n0")
    world.kill_node("n1")
    world.settle(DETECTED_S)
    assert world.nodes_of_members() == ["n4", "n5", "n2", "n3"]


def test_nodes_of_different_groups_are_replaced_at_once() -> None:
    world = running(make_job(nodes=8, spares=2))
    assert world.membership.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    world.kill_daemon("n0")
    world.kill_daemon("n1")
    world.settle(DETECTED_S)
    assert world.membership.epoch == 2


def test_a_second_loss_before_the_first_is_made_good_is_waited_for() -> None:
    world = running(make_job(spares=2))
    world.protects = False
    world.kill_node("n0")
    world.settle(DETECTED_S)
    assert world.state.renewed == {0}
    world.kill_daemon("n1")
    world.settle(DETECTED_S + 10.0)
    assert world.membership.epoch == 2
    world.protects = True  # n4 is filled and protected
    world.settle(1.0)
    assert world.state.renewed == frozenset() and world.membership.epoch == 3


def test_a_second_loss_after_the_first_was_made_good_is_replaced_at_once() -> None:
    world = running(make_job(spares=2))
    world.kill_node("n0")
    world.settle(DETECTED_S)
    world.kill_daemon("n1")
    world.settle(DETECTED_S)
    assert world.membership.epoch == 3


def test_the_weakness_of_a_group_survives_a_restart_of_the_control_loop() -> None:
    world = running(make_job(spares=2))
    world.protects = False
    world.kill_node("n0")
    world.settle(DETECTED_S)
    world.restart()
    assert world.state.renewed == {0}


def test_with_nothing_to_lose_silent_nodes_are_not_waited_for() -> None:
    world = World(make_job(spares=2))
    world.settle(1.0)
    world.kill_daemon("n0")
    world.kill_daemon("n1")
    world.settle(DETECTED_S)
    assert world.membership.epoch == 2


def test_without_redundancy_every_silent_node_is_waited_for_that_may_live() -> None:
    world = running(make_job(redundancy="None"))
    world.kill_daemon("n0")
    world.settle(DETECTED_S + 10.0)
    assert world.membership.epoch == 1
    world.revive_daemon("n0")
    world.settle(1.0)
    assert world.membership.epoch == 1 and world.phase() == "Running"


def test_a_daemon_that_has_not_connected_to_a_new_control_loop_gets_time_to_dial() -> None:
    world = running()
    silent = world.membership.members[1].node
    world.forget()
    world.daemons[silent].alive = False
    world.settle(detection_s(world.job) + DIAL_S - 1.0)
    assert world.membership.epoch == 1
    world.settle(2.0)
    assert world.membership.epoch == 2


def test_each_daemon_that_connects_gives_those_that_have_not_yet_time_to_dial() -> None:
    """What has held one of them up may hold the others up a little longer."""
    world, dials_s = running(), detection_s(running().job) + DIAL_S + 5.0
    world.forget()
    world.dials_at = {"n0": world.now + dials_s, "n1": world.now + dials_s + DIAL_S}
    world.settle(dials_s + DIAL_S + 1.0)
    assert world.membership.epoch == 1
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert world.phase() == "Running"


def test_a_daemon_that_never_connects_is_given_up_once_the_others_have_had_time() -> None:
    world, dials_s = running(), detection_s(running().job) + DIAL_S + 5.0
    world.forget()
    world.dials_at = {"n0": world.now + dials_s, "n1": float("inf")}
    world.settle(dials_s)
    world.kill_daemon("n3")
    world.revive_daemon("n3")  # it connects again, and has been heard before
    world.settle(detection_s(world.job) + DIAL_S - 1.0)
    assert world.membership.epoch == 1
    world.settle(2.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]
