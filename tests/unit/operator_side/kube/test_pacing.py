"""When a job is looked at again, and whether this process has been listening."""

from __future__ import annotations

from dataclasses import replace

from virtual_world import World, make_job

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.control.server import ControlServer
from holdfast_operator.kube.client.pacing import (
    BUSY_S,
    CALM_S,
    ENDED_S,
    FAILED_S,
    NOW_S,
    WAITING_S,
    pause_s,
)
from holdfast_operator.kube.cluster.attention import Attention
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import Decision, StartAgent


def pause(world: World, job: MoETrainingJob | None = None, **changes: object) -> float:
    given = {"late": frozenset[str](), "failed": False, "now": world.now, **changes}
    return pause_s(job or world.job, world.decision, **given)  # type: ignore[arg-type]


def at_work(job: MoETrainingJob | None = None) -> World:
    world = World(job or make_job())
    world.settle(5.0)
    return world


def test_a_job_that_is_well_is_left_alone() -> None:
    assert pause(at_work()) == CALM_S


def test_what_was_done_is_looked_at_at_once() -> None:
    world = World(make_job())
    world.look()
    assert world.decision.actions
    assert pause(world) == NOW_S
    assert pause(world, failed=True) == FAILED_S


def test_pods_that_are_being_created_wake_the_loop_when_they_are_there() -> None:
    world = at_work()
    start = StartAgent(member=0, node="n0")
    world.decision = replace(world.decision, actions=(start,))
    assert pause(world) == CALM_S


def test_a_job_without_nodes_waits_for_one_to_come() -> None:
    world = World(make_job(), nodes=1)
    world.look()
    assert pause(world) == WAITING_S


def test_a_job_that_can_grow_is_watched_for_the_moment_when_little_is_lost() -> None:
    world = at_work()
    world.decision = replace(
        world.decision, state=replace(world.state, joinable_since=world.now - 100.0)
    )
    assert pause(world) == BUSY_S


def test_a_late_daemon_of_the_job_is_watched_closely() -> None:
    world = at_work()
    assert pause(world, late=frozenset({"n0"})) == 0.25
    assert pause(world, late=frozenset({"a node of others"})) == CALM_S


def test_no_deadline_is_slept_through() -> None:
    world = at_work(make_job(spec={"activeDeadlineSeconds": 100}))
    since = world.state.active_since
    assert since is not None
    assert pause(world, now=since + 98.5) == 1.5
    assert pause(world, now=since + 10.0) == CALM_S


def test_an_ended_job_is_looked_at_when_it_is_to_be_deleted() -> None:
    job = make_job(spec={"ttlSecondsAfterFinished": 90})
    world = at_work(job)
    ended = replace(world.state, outcome=Outcome.COMPLETE, ended_at=world.now)
    world.decision = Decision(state=ended, conditions=world.decision.conditions)
    assert pause(world, now=world.now + 70.0) == 20.0
    assert pause(world, make_job(), now=world.now + ENDED_S) == ENDED_S


def test_a_job_that_has_just_ended_is_looked_at_while_its_daemons_may_protect_more() -> None:
    world = at_work(make_job())
    ended = replace(world.state, outcome=Outcome.FAILED, ended_at=world.now)
    world.decision = Decision(state=ended, conditions=world.decision.conditions)
    assert pause(world, now=world.now + 0.1) == CALM_S
    assert pause(world, now=world.now + ENDED_S - 0.1) == CALM_S


def test_a_pause_of_this_process_makes_earlier_silence_prove_nothing() -> None:
    now = [0.0]
    server = ControlServer(heartbeat_s=1.0, clock=lambda: now[0], on_evidence=lambda jobs: None)
    attention = Attention(server, clock=lambda: now[0], wake=lambda jobs: None)
    for now[0] in (1.0, 2.5, 4.0):
        assert attention.listened_since(0.0)
    now[0] = 7.0
    assert not attention.listened_since(4.0)
    assert attention.listened_since(7.0)


def test_a_failed_job_is_looked_at_when_its_memory_is_to_be_freed() -> None:
    world = at_work(make_job(maxRestarts=0, keepFailedSeconds=90))
    world.lose_rank(0)
    world.settle(1.0)
    assert world.state.outcome is Outcome.FAILED and world.state.ended_at is not None
    world.now = world.state.ended_at + 70.0
    world.look()
    assert pause(world) == 20.0
    world.now += 20.0
    world.look()
    world.look()
    assert pause(world) == ENDED_S
