"""What the reconciler does about each kind of failure, on virtual time."""

from __future__ import annotations

from virtual_world import World, make_job, running

from holdfast_operator.reconciler.observe.views import StartAgent


def test_a_job_waits_until_there_are_enough_daemons() -> None:
    world = World(make_job(spares=0))
    world.kill_daemon("n3")
    world.daemons["n3"].heartbeat_at = float("-inf")
    world.settle(60.0)
    assert world.actions == []
    status, reason, message = world.condition("Scheduled")
    assert (status, reason) == (False, "WaitingForNodes")
    assert message == "3 of 4 nodes have a daemon (waiting for n3)"


def test_members_are_placed_by_name_and_spares_remain() -> None:
    world = World(make_job())
    world.look()
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert world.membership.groups == ((0, 1, 2, 3),)
    assert list(world.kinds()) == ["PublishMembership", *["StartAgent"] * 4]
    assert world.membership.epoch == 1


def test_a_missing_spare_holds_the_first_placement_up_for_a_while_only() -> None:
    world = World(make_job())
    world.kill_daemon("n1")
    world.settle(5.0)
    assert world.actions == []
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n2", "n3", "n4"]


def test_without_redundancy_every_member_is_a_group_of_its_own() -> None:
    world = World(make_job(2, redundancy="None"))
    world.look()
    assert world.membership.groups == ((0,), (1,))


def test_a_healthy_job_is_left_alone() -> None:
    world = running()
    world.settle(30.0)
    assert world.actions == [] and world.events == []
    assert world.condition("Running")[0]
    assert not world.condition("Recovering")[0]
    assert world.condition("Protected") == (
        True,
        "ParityInPlace",
        "generation 1.10 survives the loss of one node of each parity group",
    )


def test_a_lost_rank_is_restarted_in_place_at_the_first_look() -> None:
    world = running()
    world.lose_rank(3)
    world.look()
    assert list(world.kinds()) == ["PublishMembership"]
    assert world.membership.epoch == 2
    assert world.messages("Recovering") == ["rank 3 lost; restart in place in epoch 2"]
    world.look()
    assert world.messages("Running") == [
        "4 ranks train in epoch 2 from generation 1.10 (step 10), all from local memory"
    ]


def test_evidence_from_an_ended_epoch_is_void() -> None:
    world = running()
    world.lose_rank(3)
    daemon, old = world.daemons["n3"], world.membership
    world.look()
    daemon.membership, daemon.lost = old, {3}  # its next heartbeat is late
    world.settle(1.0)
    assert world.membership.epoch == 2


def test_a_waiting_agent_gets_a_new_epoch() -> None:
    world = running()
    world.daemons["n1"].waiting = True
    world.settle()
    assert world.membership.epoch == 2
    assert world.messages("Recovering") == [
        "the agent of member 1 waits for a new epoch; restart in place in epoch 2"
    ]


def test_an_agent_that_failed_is_started_again_in_a_new_epoch() -> None:
    world = running()
    world.exit_agent(2, 1)
    world.settle()
    assert list(world.kinds()) == ["StopAgent", "PublishMembership", "StartAgent"]
    assert world.membership.epoch == 2
    assert world.messages("Recovering") == [
        "the agent of member 2 exited with code 1; restart in place in epoch 2"
    ]


def test_agents_that_have_finished_work_again_when_another_failed() -> None:
    world = running()
    world.exit_agent(0, 0)
    world.exit_agent(1, 7)
    world.settle()
    started = [action for action in world.actions if isinstance(action, StartAgent)]
    assert sorted(action.member for action in started) == [0, 1]


def test_a_trainer_that_cannot_start_is_tried_again_ever_more_slowly() -> None:
    world = running(make_job(maxRestarts=4))
    world.lose_rank(0)
    began = world.now
    while world.state.outcome is None:
        world.look()
        world.now += 0.25
        for agent in list(world.agents):
            world.exit_agent(agent[0], 1)
    assert [membership.epoch for membership in world.published] == [1, 2, 3, 4, 5]
    assert 10.0 <= world.now - began <= 15.0


def test_agents_that_fail_together_while_an_epoch_forms_share_the_next_one() -> None:
    world = running()
    world.lose_rank(0)
    world.look()
    for _ in ("with the last epoch", "in this one"):
        assert world.membership.epoch == 2
        for member in range(4):
            world.exit_agent(member, 1)
            world.look()
            world.now += 0.1
        world.look()
    world.settle(2.0)
    assert world.membership.epoch == 3 and world.condition("Running")[0]


def test_a_hang_is_found_and_its_ranks_are_named() -> None:
    world = running(make_job(detection={"hangSeconds": 30}))
    world.idle_s = 29.0
    world.settle()
    assert world.actions == []
    world.idle_s = 31.0
    world.settle()
    assert world.membership.epoch == 2
    assert world.messages("Recovering")[0].startswith("no progress of any rank for 31.0 s; ranks 0")


def test_ranks_that_have_not_begun_are_given_time() -> None:
    world = running(make_job(detection={"hangSeconds": 30}), step=0)
    world.idle_s = 500.0
    world.settle()
    assert world.actions == []
    world.idle_s = 601.0
    world.settle()
    assert world.membership.epoch == 2


def test_a_lost_node_is_replaced_by_the_spare() -> None:
    world = running()
    world.kill_node("n2")
    world.settle(4.0)
    assert world.actions == []
    assert world.condition("Degraded")[:2] == (True, "DaemonSilent")
    world.settle(2.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert list(world.kinds()) == ["FenceNode", "PublishMembership", "StartAgent"]
    assert world.messages("Recovering") == [
        "member 2 lost with node n2 (no heartbeat for 5.0 s); spare n4 takes over in epoch 2"
    ]
    assert world.membership.groups == ((0, 1, 2, 3),)


def test_a_daemon_that_comes_back_with_its_memory_changes_addresses_only() -> None:
    world = running()
    world.kill_daemon("n1")
    world.settle(3.0)
    world.revive_daemon("n1")
    world.settle(1.0)
    assert (world.membership.epoch, world.membership.revision) == (1, 1)
    assert world.membership.member(1).peer_address == "n1:11"
    assert world.messages("DaemonBack") == ["the daemon on n1 is back with its memory"]


def test_a_daemon_seen_starting_on_a_living_node_is_waited_for() -> None:
    world = running()
    world.kill_daemon("n1")
    world.returning.add("n1")
    world.settle(25.0)
    assert world.membership.epoch == 1
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]


def test_replace_seconds_wait_for_a_silent_node_but_not_for_one_that_is_gone() -> None:
    detection = {"replaceSeconds": 20}
    world = running(make_job(detection=detection))
    world.kill_daemon("n1")
    world.settle(24.0)
    assert world.membership.epoch == 1
    world.settle(2.0)
    assert world.membership.epoch == 2
    world = running(make_job(detection=detection))
    world.kill_node("n1")
    world.settle(6.0)
    assert world.membership.epoch == 2


def test_a_node_that_lost_its_memory_begins_a_new_epoch_where_it_is() -> None:
    world = running()
    world.kill_daemon("n1")
    world.settle(1.0)
    world.revive_daemon("n1", new_memory=True)
    world.settle()
    assert world.membership.epoch == 2
    assert world.membership.member(1).memory_id == "memory-1'"
    assert world.messages("Recovering") == [
        "member 1 lost its memory: node n1 came back with another; restart in place in epoch 2"
    ]


def test_nothing_is_begun_while_a_daemon_is_silent_and_all_losses_share_an_epoch() -> None:
    world = running(make_job(spares=2))
    world.kill_node("n0")
    world.settle(3.0)
    world.kill_node("n3")
    world.lose_rank(1)
    world.settle(4.0)
    assert world.actions == []
    world.settle(2.0)
    assert [membership.epoch for membership in world.published] == [1, 2]
    assert world.nodes_of_members() == ["n4", "n1", "n2", "n5"]


def test_a_fenced_node_that_returns_is_a_spare() -> None:
    world = running()
    world.kill_daemon("n2")
    world.settle(6.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    world.revive_daemon("n2")
    world.settle(1.0)
    world.kill_node("n0")
    world.settle(6.0)
    assert world.nodes_of_members() == ["n2", "n1", "n4", "n3"]
