"""Agents and nodes that the cluster takes away, and agents that are deleted."""

from __future__ import annotations

import pytest
from virtual_world import World, make_job, running

from holdfast_operator.reconciler.observe.views import AgentState, FenceNode, StartAgent

REASONS = [
    "PreemptionByScheduler",
    "DeletionByTaintManager",
    "EvictionByEvictionAPI",
    "DeletionByPodGC",
    "TerminationByKubelet",
]


@pytest.mark.parametrize("reason", REASONS)
def test_an_evicted_agent_is_replaced_and_does_not_count(reason: str) -> None:
    world = running()
    world.evict(1, reason)
    world.look()
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]
    assert (world.state.recoveries, world.state.counted, world.state.restarts) == (1, 0, ())
    assert world.messages("Recovering") == [
        f"the agent of member 1 on n1 is being removed: {reason}; spare n4 takes over in epoch 2"
    ]
    assert "FenceNode" not in world.kinds()  # the node lives, and its daemon keeps what it has


def test_an_announced_eviction_is_met_before_the_agent_ends() -> None:
    world = running()
    key = (1, "n1")
    agent = world.agents[key]
    world.agents[key] = type(agent)(
        member=1, node="n1", state=AgentState.RUNNING, disruption="PreemptionByScheduler"
    )
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.membership.member(1).node == "n4"
    assert key not in world.agents


def test_ranks_elsewhere_that_die_of_an_eviction_do_not_make_it_count() -> None:
    world = running()
    world.evict(1)
    world.lose_rank(0)
    world.exit_rank(2, 1)
    world.look()
    assert (world.state.recoveries, world.state.counted) == (1, 0)


def test_without_a_spare_an_evicted_agent_starts_again_in_place_once_it_has_ended() -> None:
    world = running(make_job(spares=0))
    world.evict(1, "PreemptionByScheduler")
    world.settle(1.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert world.membership.epoch == 2  # one epoch, although the old agent is still ending
    world.reap()
    world.settle(1.0)
    assert world.agents[1, "n1"].state is AgentState.RUNNING
    assert world.membership.epoch == 2 and world.condition("Running")[0]


def test_a_drained_node_without_a_spare_is_waited_for_and_taken_back() -> None:
    world = running(make_job(spares=0))
    world.cordoned.add("n1")
    world.evict(1)
    world.settle(2.0)
    world.reap()
    world.settle(10.0)
    assert world.actions == []
    assert world.condition("Scheduled")[:2] == (False, "NoReplacement")
    assert world.phase() == "Waiting"
    world.cordoned.clear()
    world.settle(2.0)
    assert world.state.counted == 0
    assert world.membership.epoch == 2 and world.condition("Running")[0]
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]


def test_a_cordoned_node_whose_agent_runs_is_left_alone() -> None:
    world = running()
    world.cordoned.add("n1")
    world.settle(30.0)
    assert world.actions == [] and world.phase() == "Running"


def test_a_cordoned_node_takes_no_member() -> None:
    world = World(make_job())
    world.cordoned.add("n0")
    world.look()
    assert world.nodes_of_members() == ["n1", "n2", "n3", "n4"]


def test_two_drained_nodes_of_a_parity_group_move_one_after_the_other() -> None:
    world = running(make_job(spares=2))
    world.protects = False
    for member in (1, 2):
        world.cordoned.add(f"n{member}")
        world.evict(member)
    world.look()
    world.reap()
    world.settle(20.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]
    assert world.condition("Scheduled")[:2] == (False, "NoReplacement")
    assert "their parity groups are incomplete" in world.decision.reason
    world.protects = True  # n4 is filled, and all parity is there again
    world.settle(2.0)
    assert world.nodes_of_members() == ["n0", "n4", "n5", "n3"]
    assert world.condition("Running")[0]


def test_a_node_with_a_termination_notice_is_left_while_it_lives() -> None:
    world = running()
    world.notices["n2"] = "spot instance is reclaimed in 120 s"
    world.look()
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert (world.state.recoveries, world.state.counted) == (1, 0)
    assert world.messages("Recovering") == [
        "node n2 of member 2 will be taken away: spot instance is reclaimed in 120 s; spare n4 "
        "takes over in epoch 2"
    ]


def test_without_a_spare_a_node_with_a_notice_works_until_it_goes() -> None:
    world = running(make_job(spares=0))
    world.notices["n2"] = "spot instance is reclaimed in 120 s"
    world.settle(30.0)
    assert world.actions == [] and world.phase() == "Running"


def test_a_node_with_a_notice_is_no_spare() -> None:
    world = running()
    world.notices["n4"] = "spot instance is reclaimed in 120 s"
    world.kill_node("n0")
    world.settle(10.0)
    assert world.membership.epoch == 1
    assert world.condition("Scheduled")[:2] == (False, "NoReplacement")


def test_a_rule_may_restart_disruptions_in_place_and_a_notice_is_then_no_reason() -> None:
    rules = [
        {"when": "Disruption", "action": "RestartInPlace"},
        {"when": "Any", "action": "RestartInPlace"},
    ]
    world = running(make_job(rules=rules))
    world.notices["n2"] = "soon"
    world.settle(10.0)
    assert world.membership.epoch == 1
    world.evict(1)
    world.settle(1.0)
    world.reap()
    world.settle(2.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert (world.membership.epoch, world.state.counted) == (2, 1)


def test_a_deleted_agent_is_started_again_in_a_new_epoch_and_counts() -> None:
    world = running()
    world.vanish(3)
    world.lose_rank(3)
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert world.state.counted == 1 and world.condition("Running")[0]


def test_a_deleted_agent_that_took_finished_ranks_with_it_begins_a_new_epoch() -> None:
    world = running()
    world.vanish(3)
    world.settle(1.0)
    assert world.messages("Recovering") == [
        "the agent of member 3 has vanished; restart in place in epoch 2"
    ]
    assert world.membership.epoch == 2 and world.condition("Running")[0]


def test_an_agent_that_vanished_before_it_worked_is_started_in_the_same_epoch() -> None:
    world = World(make_job())
    world.look()
    world.vanish(3)
    world.settle(1.0)
    assert world.membership.epoch == 1 and world.state.recoveries == 0
    assert world.condition("Running")[0]


def test_an_agent_that_is_left_over_on_a_lost_node_is_fenced_until_it_is_gone() -> None:
    world = running()
    world.lingering = True
    world.kill_daemon("n2")
    while world.membership.epoch == 1:
        world.look()
        world.now += 0.25
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    world.actions.clear()
    for _ in range(3):
        world.look()
        world.now += 0.25
    assert world.actions == [FenceNode(node="n2")] * 3
    world.reap()
    world.actions.clear()
    world.settle(1.0)
    assert not any(isinstance(action, FenceNode | StartAgent) for action in world.actions)
