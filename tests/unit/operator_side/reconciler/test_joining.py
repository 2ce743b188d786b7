"""Members join when their agents are ready, so that training never waits for one; virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from virtual_world import STEP_S, World, make_job, running

from holdfast_operator.reconciler.membership.growing import GATHER_S
from holdfast_operator.reconciler.membership.joining import PAUSE_S
from holdfast_operator.reconciler.observe.views import AgentState, StartAgent, StopAgent

LOST_S = 6.0
LEAST = {"minNodes": 2}
ANY = {"when": "Any", "action": "RestartInPlace"}


def elastic(*, spares: int = 1, standbys: int = 0, **more: Any) -> World:
    """A job of four that trains in epoch 1, may go on with two, and has spares."""
    world = running(make_job(spares=spares, **{"spec": LEAST, **more}))
    world.standbys_wanted = standbys
    world.settle(2.0)
    world.actions.clear()
    return world


def indices(world: World) -> list[int]:
    return [member.index for member in world.membership.members]


def save(world: World) -> None:
    """Let a generation be protected, and the control loop see it."""
    world.train(world.step + 1)
    world.look()
    world.now += STEP_S
    world.settle()


def warm_up(world: World, *nodes: str) -> None:
    """Let agents on these nodes get as far as waiting for a world."""
    world.cold.difference_update(nodes)
    world.settle(1.0)


# --- leaving -----------------------------------------------------------------------------------


def test_a_lost_node_whose_spare_is_not_ready_is_gone_on_without_and_joins_warm() -> None:
    world = elastic()
    world.cold.add("n4")
    world.kill_node("n2")
    world.settle(LOST_S)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])
    assert world.phase() == "Running" and world.agents[2, "n4"].state is AgentState.RUNNING
    assert world.messages("Recovering") == [
        "member 2 lost with node n2 (no heartbeat for 5.0 s); 3 of 4 members go on, "
        "member 2 gets ready on n4 in epoch 2"
    ]
    for _ in range(5):
        save(world)
    assert world.membership.epoch == 2
    assert "member 2 gets ready on n4" in world.condition("FullStrength")[2]
    warm_up(world, "n4")
    assert world.membership.epoch == 2  # nothing new has been protected
    save(world)
    assert (world.membership.epoch, world.nodes_of_members()) == (3, ["n0", "n1", "n4", "n3"])
    assert world.actions.count(StartAgent(member=2, node="n4")) == 1
    assert world.messages("Joined") == ["n4 joins as member 2; 4 of 4 members in epoch 3"]
    assert (world.state.recoveries, world.state.counted) == (1, 1)
    assert world.state.joining == () and world.state.replaced == frozenset()


def test_a_spare_with_an_agent_that_waits_takes_the_place_at_once() -> None:
    world = elastic(standbys=1)
    world.kill_node("n2")
    world.settle(LOST_S)
    assert (world.membership.epoch, world.nodes_of_members()) == (2, ["n0", "n1", "n4", "n3"])


def test_a_standby_agent_that_is_still_starting_becomes_that_of_the_missing_member() -> None:
    world = elastic()
    world.cold.add("n4")
    world.standbys_wanted = 1
    world.settle(2.0)
    world.kill_node("n2")
    world.settle(LOST_S)
    assert indices(world) == [0, 1, 3] and world.standbys == {}
    assert (2, "n4") in world.agents and "StopStandby" not in list(world.kinds())


@pytest.mark.parametrize("how", ["vanished", "stopping", "exited"])
def test_a_deleted_pod_is_gone_on_without_and_starts_again_where_it_was(how: str) -> None:
    world = elastic()
    world.cold.add("n1")
    if how == "vanished":
        world.vanish(1)
    elif how == "stopping":
        world.evict(1, why="")
    else:
        world.exit_agent(1, 137)
    world.settle(1.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 2, 3])
    assert world.phase() == "Running"
    world.reap()
    world.settle(1.0)
    assert (1, "n1") in world.agents and dict(world.state.joining) == {1: "n1"}
    warm_up(world, "n1")
    save(world)
    assert (world.membership.epoch, world.nodes_of_members()) == (3, ["n0", "n1", "n2", "n3"])
    assert world.state.recoveries == 1


def test_a_lost_rank_restarts_in_place_under_its_agent() -> None:
    world = elastic()
    world.lose_rank(2)
    world.settle(1.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 2, 3])


def test_two_agents_that_vanish_together_leave_together() -> None:
    world = running(make_job(5, spares=0, redundancy="RAIM6", spec={"minNodes": 3}))
    world.vanish(1)
    world.vanish(3)
    world.settle(2.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 2, 4])


def test_a_member_whose_memory_the_others_cannot_rebuild_stays() -> None:
    world = elastic(spares=0)
    world.vanish(1)
    world.vanish(3)
    world.settle(1.0)
    assert (world.membership.epoch, indices(world)) == (2, [0, 2, 3])
    assert (3, "n3") in world.agents


def test_at_the_minimum_the_job_waits_as_one_without_a_minimum_does() -> None:
    world = elastic(spec={"minNodes": 4})
    world.cold.add("n4")
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.state.joining == ()


def test_a_rule_that_gives_a_node_time_gives_the_replacement_time_as_well() -> None:
    rules = [{"when": "NoReplacement", "action": "Shrink", "afterSeconds": 60}, ANY]
    world = elastic(rules=rules)
    world.cold.add("n4")
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]


def test_a_job_that_has_never_run_waits_for_its_agents() -> None:
    world = World(make_job(spares=0, spec=LEAST))
    world.look()
    world.vanish(1)
    world.settle(3.0)
    assert indices(world) == [0, 1, 2, 3]


def test_an_agent_that_is_found_dead_while_the_epoch_forms_is_not_waited_for_nor_counted() -> None:
    world = elastic(spares=0)
    world.lose_rank(1)
    world.look()
    assert world.membership.epoch == 2
    world.exit_agent(1, 137)
    world.settle(3.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 2, 3])
    assert "training waits for the agent of member 1" in world.messages("Recovering")[1]
    assert (world.state.recoveries, world.state.counted) == (2, 1)


def test_a_member_with_a_notice_leaves_when_a_generation_is_protected_and_a_spare_warms_up() -> (
    None
):
    world = elastic()
    world.cold.add("n4")
    world.notices["n2"] = "spot"
    world.settle(3.0)
    assert world.membership.epoch == 1
    save(world)
    assert (world.membership.epoch, indices(world)) == (2, [0, 1, 3])
    assert world.state.saved is not None and world.state.saved.step == 11
    warm_up(world, "n4")
    save(world)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.state.counted == 0


# --- joining -----------------------------------------------------------------------------------


def test_replacements_that_are_ready_wait_a_moment_for_others() -> None:
    world = running(make_job(5, spares=2, redundancy="RAIM6", spec={"minNodes": 3}))
    world.cold |= {"n5", "n6"}
    world.kill_node("n1")
    world.kill_node("n2")
    world.settle(LOST_S)
    assert indices(world) == [0, 3, 4]
    warm_up(world, "n5")
    save(world)
    assert world.membership.epoch == 2
    world.settle(GATHER_S)
    save(world)
    assert (world.membership.epoch, indices(world)) == (3, [0, 1, 3, 4])
    warm_up(world, "n6")
    save(world)
    assert (world.membership.epoch, indices(world)) == (4, [0, 1, 2, 3, 4])


def test_who_is_ready_comes_along_with_a_recovery() -> None:
    world = elastic(joinWaitSeconds=1000)
    world.cold.add("n4")
    world.kill_node("n2")
    world.settle(LOST_S)
    save(world)
    warm_up(world, "n4")
    world.lose_rank(0)
    world.settle(1.0)
    assert (world.membership.epoch, indices(world)) == (3, [0, 1, 2, 3])
    assert "n4 joins as member 2" in world.messages("Recovering")[1]


def test_who_is_on_the_way_is_waited_for_when_too_few_are_left() -> None:
    world = elastic(spec={"minNodes": 3})
    world.cold.add("n4")
    world.kill_node("n2")
    world.settle(LOST_S)
    save(world)
    world.kill_node("n0")
    world.settle(LOST_S + 1.0)
    assert (world.membership.epoch, indices(world)) == (3, [1, 2, 3])


def test_an_agent_that_dies_before_its_member_joins_disturbs_nobody_and_pauses_grow() -> None:
    world = elastic(spares=1)
    world.kill_node("n2")
    world.settle(LOST_S)
    begun = []
    for _ in range(int(16 * PAUSE_S)):
        world.cold.add("n4")
        if (2, "n4") in world.agents:
            begun.append(world.now)
            world.agents[2, "n4"] = replace(
                world.agents[2, "n4"], state=AgentState.EXITED, exit_code=1
            )
        world.look()
        world.reap()
        world.now += 1.0
    assert (world.membership.epoch, world.state.recoveries) == (2, 1)
    pauses = [later - before for before, later in pairwise(begun)]
    assert pauses == pytest.approx([PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S], abs=3.0)
    assert len(world.messages("JoinerExited")) == len(begun)
    assert "n4 is tried again in" in world.condition("FullStrength")[2]


def test_a_node_where_members_join_and_die_costs_ever_fewer_recoveries() -> None:
    world = elastic(spares=0, joinWaitSeconds=0)
    while world.now < 1000.0 + 3600.0:
        save(world)
        if world.membership.has(2) and world.phase() == "Running":
            world.exit_agent(2, 137)
        world.look()
        world.now += 2.0
    assert world.state.outcome is None
    assert 5 <= len(world.messages("Joined")) <= 7
    assert world.state.counted == len(world.messages("Joined")) + 1


def test_a_replacement_whose_spare_dies_starts_on_another() -> None:
    world = elastic(spares=2)
    world.cold |= {"n4", "n5"}
    world.kill_node("n2")
    world.settle(LOST_S)
    assert (2, "n4") in world.agents
    world.kill_node("n4")
    world.settle(LOST_S)
    assert (2, "n5") in world.agents and world.membership.epoch == 2
    warm_up(world, "n5")
    save(world)
    assert world.nodes_of_members() == ["n0", "n1", "n5", "n3"]


def test_without_a_node_left_the_next_one_is_new_and_waits() -> None:
    world = elastic(spares=1)
    world.cold.add("n4")
    world.kill_node("n2")
    world.settle(LOST_S)
    assert world.state.replaced == {2}
    world.kill_node("n4")
    world.settle(LOST_S)
    assert (world.state.replaced, world.state.joining) == (frozenset(), ())
    world.revive_daemon("n2", new_memory=True)
    world.gone.clear()
    world.settle(2.0)
    save(world)
    assert world.membership.epoch == 2
    assert "joinWaitSeconds = 120 s" in world.condition("FullStrength")[2]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_control_loop_that_starts_again_keeps_the_agents_that_get_ready(forgets: bool) -> None:
    world = elastic()
    world.cold.add("n4")
    world.kill_node("n2")
    world.settle(LOST_S)
    world.actions.clear()
    world.forget() if forgets else world.restart()
    world.settle(20.0)
    assert not any(isinstance(action, StartAgent | StopAgent) for action in world.actions)
    assert world.agents[2, "n4"].state is AgentState.RUNNING
    assert world.state.replaced == (frozenset() if forgets else {2})
    warm_up(world, "n4")
    save(world)
    assert world.membership.epoch == (2 if forgets else 3)


def test_agents_that_get_ready_are_stopped_with_the_job() -> None:
    world = elastic()
    world.kill_node("n2")
    world.cold.add("n4")
    world.settle(LOST_S)
    world.job = make_job(spares=1, spec=LEAST, suspend=True)
    world.settle(1.0)
    assert world.agents == {} and world.state.joining == ()


def test_a_job_without_a_minimum_never_has_such_agents() -> None:
    world = running(make_job(spares=1))
    world.cold.add("n4")
    world.kill_node("n2")
    world.vanish(1)
    world.settle(LOST_S)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.state.joining == () and len(world.agents) == 4
