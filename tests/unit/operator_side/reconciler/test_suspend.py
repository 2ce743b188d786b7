"""Holding a job back and letting it go on, with what changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from virtual_world import World, make_job, running

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.shape import Shape
from holdfast_operator.reconciler.observe.views import Suspension


def suspended(job: MoETrainingJob | None = None) -> World:
    world = running(job)
    spec = structs.replace(world.job.spec, suspend=True)
    world.job = structs.replace(world.job, spec=spec)
    world.settle(5.0)
    assert world.agents == {} and world.phase() == "Suspended"
    return world


def reshaped(**options: Any) -> World:
    """A job that ran on four nodes, and is resumed as another."""
    world = suspended()
    world.job = make_job(**options)
    return world


def test_a_suspended_job_neither_runs_nor_recovers() -> None:
    world = suspended()
    assert world.condition("Running")[:2] == (False, "Suspended")
    assert not world.condition("Recovering")[0]


def test_a_job_that_begins_suspended_is_not_placed_and_later_has_one_epoch() -> None:
    world = World(make_job(suspend=True))
    world.settle(30.0)
    assert world.actions == [] and world.phase() == "Suspended"
    world.job = make_job()
    world.settle(2.0)
    assert [membership.epoch for membership in world.published] == [1]
    assert world.phase() == "Running"


def test_a_resumed_job_goes_on_from_memory_and_nothing_is_counted() -> None:
    world = suspended()
    world.job = make_job()
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.phase() == "Running"
    assert (world.state.recoveries, world.state.counted) == (0, 0)
    assert world.messages("Resumed") == ["no longer suspended; epoch 2 begins"]
    assert "from generation 1.10" in world.messages("Running")[-1]


def test_agents_that_are_still_ending_are_waited_for_on_resume() -> None:
    world = running()
    world.lingering = True
    world.job = make_job(suspend=True)
    world.settle(1.0)
    assert world.condition("Suspended") == (
        False,
        "Stopping",
        "agents of members [0, 1, 2, 3] are being stopped",
    )
    world.job = make_job()
    world.settle(1.0)
    assert world.membership.epoch == 2
    world.reap()
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.phase() == "Running"


def test_a_queue_suspends_a_job_in_its_own_words_and_counts_nothing() -> None:
    world = World(make_job(spec={"preRunningDeadlineSeconds": 10}))
    world.suspension = Suspension(reason="Queued", message="waits in queue a")
    world.settle(30.0)
    assert world.actions == [] and world.phase() == "Suspended"
    assert world.condition("Suspended") == (True, "Queued", "waits in queue a")
    world.suspension = None
    world.settle(1.0)
    assert world.phase() == "Running"
    world.train(10)
    world.suspension = Suspension(reason="Evicted", message="evicted")
    world.settle(1.0)
    assert world.agents == {}
    assert world.condition("Suspended")[2] == "evicted; snapshots are kept in memory"
    assert world.messages("Suspended")[-1] == "evicted: agents are stopped, snapshots are kept"
    world.suspension = None
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.phase() == "Running"
    assert (world.state.recoveries, world.state.counted) == (0, 0)


def test_a_suspension_survives_a_restart_of_the_control_loop() -> None:
    world = suspended()
    world.restart()
    world.settle(5.0)
    assert len(world.messages("Suspended")) == 1
    world.restart()
    world.job = make_job()  # resumed between two looks
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.state.recoveries == 0


def test_a_node_that_was_lost_in_suspension_is_replaced_on_resume_and_does_not_count() -> None:
    world = suspended()
    world.kill_node("n1")
    world.settle(10.0)
    world.job = make_job()
    world.settle(1.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]
    assert (world.membership.epoch, world.state.recoveries) == (2, 0)
    assert world.messages("Resumed") == ["no longer suspended; spare n4 takes over; epoch 2 begins"]


def test_a_resumed_job_waits_for_a_daemon_that_is_away() -> None:
    world = suspended()
    world.kill_daemon("n1")
    world.settle(3.0)
    world.job = make_job()
    world.settle(1.0)
    assert world.decision.reason == "waiting for the daemon on n1"
    world.revive_daemon("n1")
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.nodes_of_members() == ["n0", "n1", "n2", "n3"]


def test_a_changed_number_of_nodes_frees_the_snapshots_and_begins_anew_in_a_higher_epoch() -> None:
    world = reshaped(nodes=3)
    saved, world.protected = world.state.saved, None  # what is freed is no longer protected
    world.settle(2.0)
    assert saved == Generation(1, 10)
    assert world.dropped and world.state.outcome is None
    assert world.nodes_of_members() == ["n0", "n1", "n2"]
    assert world.membership.epoch == 2 and world.membership.groups == ((0, 1, 2),)
    assert world.messages("Reshaped") == [
        "the job was 4 nodes of 1, dp 4 tp 1 pp 1 ep 1, RAIM5, and is 3 nodes of 1, dp 3 tp 1 pp 1 "
        "ep 1, RAIM5: generation 1.10 and all other snapshots of the earlier layout cannot be "
        "restored and are freed; training starts over"
    ]
    assert world.messages("Running")[-1] == "3 ranks train in epoch 2 from the beginning"


def resized(before: int, after: int, **options: Any) -> World:
    """A job that may shrink, which ran on `before` nodes and is resumed on `after`."""
    world = suspended(make_job(before, spec={"minNodes": 2}, **options))
    world.job = make_job(after, spec={"minNodes": 2}, **options)
    return world


def test_a_job_that_may_shrink_goes_on_with_fewer_nodes_from_memory() -> None:
    world = resized(4, 3)
    world.settle(2.0)
    assert not world.dropped and world.messages("Reshaped") == []
    assert world.nodes_of_members() == ["n0", "n1", "n2"]
    assert world.membership.epoch == 2 and world.membership.groups == ((0, 1, 2),)
    assert world.messages("Resumed") == [
        "no longer suspended; 3 of 4 members go on; epoch 2 begins"
    ]
    assert "from generation 1.10" in world.messages("Running")[-1]
    assert (world.state.recoveries, world.state.counted) == (0, 0)
    assert world.state.shape == Shape.of(world.job)


def test_a_job_that_may_shrink_goes_on_with_more_nodes_from_memory() -> None:
    world = resized(3, 4)
    world.settle(2.0)
    assert not world.dropped and world.messages("Reshaped") == []
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert "from generation 1.10" in world.messages("Running")[-1]


def test_members_beyond_the_nodes_stay_while_the_others_could_not_rebuild_what_they_hold() -> None:
    world = resized(4, 2)
    world.settle(5.0)
    assert not world.dropped and world.membership.epoch == 1 and world.agents == {}
    assert world.decision.reason == (
        "members [2] are beyond spec.nodes = 2 and hold what the others could not rebuild: resume "
        "with 3 nodes, and with fewer once a generation is protected there"
    )
    world.job = make_job(3, spec={"minNodes": 2})
    world.settle(2.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2"]


def test_a_lost_node_of_a_member_beyond_the_nodes_needs_no_spare() -> None:
    world = resized(4, 3, spares=0)
    world.kill_node("n3")
    world.settle(15.0)
    assert not world.dropped and world.nodes_of_members() == ["n0", "n1", "n2"]
    assert world.state.recoveries == 0


def test_as_many_members_stay_as_the_job_needs_at_least() -> None:
    groups = {"redundancy": {"type": "RAIM5", "raim5": {"groupSize": 3}}}
    world = suspended(make_job(6, spec={"minNodes": 5, **groups}, spares=0))
    world.kill_node("n0")
    world.job = make_job(5, spec={"minNodes": 5, **groups}, spares=0)
    world.settle(15.0)
    assert world.membership.epoch == 1
    assert "members [0] have no node" in world.decision.reason


@pytest.mark.parametrize("options", [{"redundancy": "Replication"}, {"spec": {"minNodes": None}}])
def test_other_changes_beside_the_number_of_nodes_begin_anew(options: dict[str, Any]) -> None:
    world = resized(4, 3)
    world.job = make_job(3, **{"spec": {"minNodes": 2}, **options})
    world.protected = None
    world.settle(2.0)
    assert world.dropped and len(world.messages("Reshaped")) == 1


def test_a_changed_parallelism_of_the_same_world_is_another_layout_too() -> None:
    world = reshaped(spec={"parallelism": {"dp": 2, "tp": 2}})
    world.protected = None
    world.settle(2.0)
    assert world.dropped and world.membership.epoch == 2
    assert "is 4 nodes of 1, dp 2 tp 2" in world.messages("Reshaped")[0]


def test_a_changed_shape_is_seen_after_a_restart_of_the_control_loop() -> None:
    world = suspended()
    world.restart()
    world.job = make_job(spec={"parallelism": {"dp": 2, "tp": 2}})
    world.protected = None
    world.settle(2.0)
    assert world.dropped and len(world.messages("Reshaped")) == 1


@pytest.mark.parametrize(("tp", "is_reshaped"), [(1, False), (2, True)])
def test_a_shape_that_an_earlier_version_stored_in_words_still_counts(
    tp: int, is_reshaped: bool
) -> None:
    world = suspended()
    document = world.stored()
    del document["jobShape"]
    world.restart(document | {"shape": "4 nodes of 1, dp 4 tp 1 pp 1 ep 1, RAIM5"})
    world.job = make_job(spec={"parallelism": {"dp": 4 // tp, "tp": tp}})
    if is_reshaped:
        world.protected = None
    world.settle(2.0)
    assert world.dropped == is_reshaped and len(world.messages("Reshaped")) == is_reshaped
    assert world.membership.epoch == 2


def test_a_shape_that_was_changed_back_before_the_job_goes_on_costs_nothing() -> None:
    world = suspended()
    world.job = make_job(nodes=3, suspend=True)
    world.settle(2.0)
    world.job = make_job()
    world.settle(2.0)
    assert not world.dropped and world.membership.epoch == 2


def test_members_of_the_new_shape_wait_until_the_old_snapshots_are_freed() -> None:
    world = reshaped(nodes=3)
    world.protected = None
    old = {name: daemon.membership for name, daemon in world.daemons.items()}
    world.look()
    for name, membership in old.items():
        world.daemons[name].membership = membership  # heartbeats from before
    world.look()
    assert world.state.membership is None
    assert world.decision.reason.startswith("snapshots of an earlier layout are being freed on n0")
    world.settle(2.0)
    assert world.membership.epoch == 2 and len(world.membership.members) == 3


def test_a_daemon_that_returns_with_the_old_shape_changes_nothing() -> None:
    world = suspended()
    world.kill_daemon("n3")
    world.settle(10.0)
    world.job = make_job(nodes=3)
    world.protected = None
    world.settle(15.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2"]
    epoch = world.membership.epoch
    world.daemons["n3"].alive = True  # with membership of epoch 1, of four members
    world.restart()
    world.settle(5.0)
    assert world.membership.epoch == epoch and world.state.outcome is None


def test_a_shape_that_changes_without_suspension_is_not_followed() -> None:
    world = running()
    world.job = make_job(nodes=3)
    world.settle(10.0)
    assert world.actions == [] and len(world.membership.members) == 4


def test_a_suspended_job_whose_rank_was_lost_while_it_stopped_is_not_failed_on_resume() -> None:
    world = running(make_job(maxRestarts=0))
    world.job = make_job(suspend=True, maxRestarts=0)
    world.look()
    for rank in range(4):
        world.lose_rank(rank)
    world.settle(5.0)
    world.job = make_job(maxRestarts=0)
    world.settle(2.0)
    assert world.state.outcome is not Outcome.FAILED and world.phase() == "Running"
