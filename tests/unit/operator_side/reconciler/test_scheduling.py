"""Jobs that cannot be placed, and agents that find no room: a condition, and no loop."""

from __future__ import annotations

from virtual_world import World, make_job

from holdfast_core.job.parsing import parse_job
from holdfast_operator.reconciler.observe.evidence import UNSCHEDULABLE_S
from holdfast_operator.reconciler.observe.views import AgentState, AgentView
from holdfast_operator.reconciler.report.conditions import phase, refused


def test_a_refused_job_waits() -> None:
    (condition,) = refused("Invalid", "spec.nodes: 0: at least 1")
    assert (condition.type, condition.status, condition.reason) == ("Scheduled", False, "Invalid")
    assert phase((condition,)) == "Waiting"


def test_what_is_missing_is_named() -> None:
    world = World(make_job(spares=0), nodes=5)
    world.kill_daemon("n0")
    world.daemons["n0"].heartbeat_at = float("-inf")
    world.cordoned |= {"n1", "n2"}
    world.settle(60.0)
    assert world.actions == []
    assert world.condition("Scheduled") == (
        False,
        "WaitingForNodes",
        "2 of 4 nodes have a daemon (waiting for n0; not schedulable: n1, n2)",
    )
    assert world.phase() == "Waiting"


def test_an_agent_without_room_shows_the_reason_of_the_scheduler() -> None:
    world = World(make_job(spares=0))
    world.full.add("n2")
    world.settle(300.0)
    assert world.condition("Scheduled") == (
        False,
        "Unschedulable",
        "members [2] wait for room; member 2 on n2: 0/5 nodes are available",
    )
    assert [membership.epoch for membership in world.published] == [1]
    assert world.phase() == "Waiting"


def test_a_short_wait_of_an_agent_is_not_shown() -> None:
    world = World(make_job(spares=0))
    world.full.add("n2")
    world.settle(2.0)
    assert world.condition("Scheduled")[0] and world.phase() == "Starting"


def test_why_an_agent_does_not_start_is_shown() -> None:
    world = World(make_job(spares=0))
    world.look()
    world.agents[2, "n2"] = AgentView(
        member=2,
        node="n2",
        state=AgentState.STARTING,
        reason="ImagePullBackOff",
        message="not found",
    )
    world.settle(60.0)
    assert world.condition("Scheduled")[0] and world.phase() == "Starting"
    assert world.condition("Running")[2] == (
        "3 of 4 ranks are at work in epoch 1; the agent of member 2 on n2 waits: "
        "ImagePullBackOff: not found"
    )


def test_a_member_without_room_tries_the_spares_each_once_and_stays() -> None:
    world = World(make_job(spares=2))
    world.full |= {"n2", "n4", "n5"}
    world.settle(10 * UNSCHEDULABLE_S)
    assert [m.member(2).node for m in world.published] == ["n2", "n4", "n5"]
    assert (world.state.counted, world.membership.epoch) == (0, 3)
    assert world.condition("Scheduled")[1] == "Unschedulable"


def test_a_member_without_room_trains_on_a_spare() -> None:
    world = World(make_job())
    world.full.add("n2")
    world.settle(UNSCHEDULABLE_S + 5.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.phase() == "Running" and world.state.unfit == frozenset()


def test_long_lists_of_nodes_are_cut() -> None:
    world = World(make_job(nodes=40, spares=0))
    world.settle(1.0)
    message = world.condition("Scheduled")[2]
    assert message == "40 members on n0, n1, n10, n11, n12, n13, n14, n15 and 32 more"
    assert len(world.messages("Scheduled")[0]) < 200


def test_phases_follow_the_life_of_a_job() -> None:
    world = World(make_job(spares=0))
    world.kill_daemon("n3")
    world.look()
    assert world.phase() == "Waiting"
    world.revive_daemon("n3")
    world.look()
    assert world.phase() == "Starting"
    world.settle(1.0)
    assert world.phase() == "Running"
    world.train(5)
    world.lose_rank(0)
    world.kill_daemon("n1")
    world.settle(10.0)
    assert world.phase() == "Waiting"
    world.revive_daemon("n1")
    world.look()
    assert world.phase() == "Recovering"
    world.settle(2.0)
    assert world.phase() == "Running"
    world.finish()
    world.settle(1.0)
    assert world.phase() == "Complete"


def test_a_job_without_any_node_waits() -> None:
    job = parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "alone"},
            "spec": {
                "nodes": 1,
                "parallelism": {"dp": 1},
                "redundancy": {"type": "None"},
                "trainer": {
                    "template": {"spec": {"containers": [{"name": "t", "command": ["x"]}]}}
                },
            },
        }
    )
    world = World(job, nodes=0)
    world.settle(1.0)
    assert world.condition("Scheduled")[2] == "0 of 1 nodes have a daemon"
