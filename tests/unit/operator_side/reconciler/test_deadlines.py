"""Deadlines, and how long an ended job is kept, on virtual time."""

from __future__ import annotations

from virtual_world import World, make_job, running

from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import DeleteJob


def test_a_job_that_takes_too_long_fails() -> None:
    world = running(make_job(spec={"activeDeadlineSeconds": 100}))
    world.settle(90.0)
    assert world.state.outcome is None
    world.settle(10.0)
    assert world.state.outcome is Outcome.FAILED
    assert world.condition("Failed")[1] == "DeadlineExceeded"
    assert "spec.activeDeadlineSeconds = 100 s" in world.state.outcome_reason
    assert world.agents == {} and not world.dropped


def test_a_job_that_is_complete_at_its_deadline_is_complete() -> None:
    world = running(make_job(spec={"activeDeadlineSeconds": 100}))
    world.settle(90.0)
    world.finish()
    world.now += 60.0
    world.settle()
    assert world.state.outcome is Outcome.COMPLETE


def test_time_in_suspension_does_not_count_and_a_resumed_job_has_all_its_time() -> None:
    spec = {"activeDeadlineSeconds": 100, "preRunningDeadlineSeconds": 20}
    world = running(make_job(spec=spec))
    world.settle(90.0)
    world.job = make_job(suspend=True, spec=spec)
    world.settle(500.0)
    world.job = make_job(spec=spec)
    world.settle(90.0)
    assert world.state.outcome is None and world.phase() == "Running"
    world.settle(15.0)
    assert world.condition("Failed")[1] == "DeadlineExceeded"


def test_a_job_that_does_not_run_in_time_fails() -> None:
    world = World(make_job(spares=0, spec={"preRunningDeadlineSeconds": 30}))
    world.kill_daemon("n3")
    world.settle(29.0)
    assert world.state.outcome is None
    world.settle(2.0)
    assert world.condition("Failed")[1] == "PreRunningDeadlineExceeded"


def test_a_job_that_once_ran_is_not_held_to_the_deadline_for_running() -> None:
    world = running(make_job(spares=0, spec={"preRunningDeadlineSeconds": 30}))
    world.kill_daemon("n3")
    world.settle(60.0)
    assert world.state.outcome is None


def test_deadlines_survive_a_restart_of_the_control_loop() -> None:
    spec = {"activeDeadlineSeconds": 100, "preRunningDeadlineSeconds": 30}
    world = running(make_job(spec=spec))
    world.settle(60.0)
    world.restart()
    world.settle(20.0)
    assert world.state.outcome is None
    world.settle(30.0)
    assert world.condition("Failed")[1] == "DeadlineExceeded"


def test_an_ended_job_is_deleted_when_its_time_is_over_and_not_before() -> None:
    world = running(make_job(spec={"ttlSecondsAfterFinished": 60}))
    world.finish()
    world.settle(50.0)
    assert DeleteJob() not in world.actions
    world.restart()
    world.look()
    assert DeleteJob() not in world.actions
    world.now += 20.0
    world.look()
    assert DeleteJob() in world.actions


def test_an_ended_job_without_a_limit_is_kept() -> None:
    world = running()
    world.finish()
    world.settle(1.0)
    world.now += 1e9
    world.look()
    assert DeleteJob() not in world.actions


def test_an_ended_job_does_not_begin_again_after_a_restart_of_the_control_loop() -> None:
    world = running(make_job(maxRestarts=0))
    world.lose_rank(0)
    world.settle(1.0)
    assert world.state.outcome is Outcome.FAILED
    world.restart()
    world.actions.clear()
    world.settle(30.0)
    assert world.actions == [] and world.phase() == "Failed"
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"
