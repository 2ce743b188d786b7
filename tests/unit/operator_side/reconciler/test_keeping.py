"""What a failed job keeps, and how a person has it go on, on virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from virtual_world import World, make_job, running

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.schema import COPY_ANNOTATION, RESUME_ANNOTATION
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_operator.reconciler.failures.keeping import kept_until
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import DeleteJob, PersistNow, Suspension
from holdfast_operator.reconciler.upgrade_plan import requirements_of

HOUR_S = 3600.0


def failed(job: MoETrainingJob | None = None) -> World:
    """A job that has failed after its only restart, with 1.10 protected."""
    world = running(job or make_job(maxRestarts=0))
    world.lose_rank(0)
    world.settle(2.0)
    assert world.state.outcome is Outcome.FAILED and world.agents == {}
    world.actions.clear()
    world.events.clear()
    return world


def ask(world: World, text: str = "now", name: str = RESUME_ANNOTATION) -> None:
    given = {**world.job.metadata.annotations, name: text}
    metadata = structs.replace(world.job.metadata, annotations=given)
    world.job = structs.replace(world.job, metadata=metadata)


def holders(world: World) -> int:
    return sum(daemon.membership is not None for daemon in world.daemons.values())


def test_a_failed_job_keeps_its_memory_for_an_hour_and_then_frees_it() -> None:
    world = failed()
    ended = world.state.ended_at
    assert ended is not None and kept_until(world.job, world.state) == ended + HOUR_S
    world.now = ended + HOUR_S - 10.0
    world.settle(5.0)
    assert world.actions == [] and holders(world) == 4
    assert world.condition("Protected")[0] and world.condition("Failed")[2].endswith(
        "its snapshots stay in memory until .status.keptUntil: `holdfast persist` and `holdfast "
        "resume` find them there"
    )
    world.settle(10.0)
    assert holders(world) == 0 and kept_until(world.job, world.state) is None
    assert world.messages("SnapshotsFreed") == ["the job failed 3600 s ago: its memory is freed"]
    assert "keptUntil" not in world.condition("Failed")[2]
    world.actions.clear()
    world.settle(60.0)
    assert world.actions == [] and world.phase() == "Failed"


@pytest.mark.parametrize(
    ("kept_s", "ttl_s", "frees_s"),
    [(0, None, 0.0), (100, None, 100.0), (100, 50, 50.0), (100, 200, 100.0), (0, 50, 0.0)],
)
def test_the_time_is_a_field_and_a_job_that_is_deleted_keeps_nothing(
    kept_s: int, ttl_s: int | None, frees_s: float
) -> None:
    spec = {} if ttl_s is None else {"ttlSecondsAfterFinished": ttl_s}
    world = failed(make_job(maxRestarts=0, keepFailedSeconds=kept_s, spec=spec))
    ended = world.state.ended_at
    assert ended is not None
    while world.now < ended + frees_s - 1.0:
        assert holders(world) == 4
        world.look()
        world.now += 1.0
    world.now = max(world.now, ended + frees_s)
    world.look()
    assert holders(world) == 0
    if ttl_s is not None:
        world.now = ended + ttl_s
        world.look()
        assert DeleteJob() in world.actions


def test_more_time_takes_effect_at_once_and_brings_nothing_back() -> None:
    world = failed(make_job(maxRestarts=0, keepFailedSeconds=100))
    world.settle(90.0)
    world.job = make_job(maxRestarts=0, keepFailedSeconds=1000)
    world.settle(500.0)
    assert holders(world) == 4
    world.settle(500.0)
    assert holders(world) == 0
    world.job = make_job(maxRestarts=0, keepFailedSeconds=10_000)
    world.settle(5.0)
    assert kept_until(world.job, world.state) is None


def test_a_complete_job_frees_its_memory_at_once() -> None:
    world = running()
    world.finish()
    world.settle(1.0)
    assert holders(world) == 0 and not world.state.kept
    assert kept_until(world.job, world.state) is None


@pytest.mark.parametrize("restarts", [False, True])
def test_a_person_has_a_failed_job_go_on_from_its_line(restarts: bool) -> None:
    world = failed()
    world.settle(600.0)
    if restarts:
        world.restart()
        world.settle(5.0)
        assert world.phase() == "Failed" and holders(world) == 4
    ask(world)
    world.settle(3.0)
    assert (world.membership.epoch, world.phase()) == (2, "Running")
    assert world.state.outcome is None and world.state.ended_at is None
    assert not any(world.condition(kind)[0] for kind in ("Failed", "Complete"))
    assert "from generation 1.10" in world.messages("Running")[-1]
    assert world.messages("Resumed")[0].startswith(
        "a person resumes the job, which had failed: rank 0 lost; 0 restarts within 3600 s"
    )
    assert world.state.restarts == () and not world.state.suspended


def test_a_resumed_job_that_fails_again_has_failed_until_it_is_asked_anew() -> None:
    world = failed()
    ask(world, "first")
    world.settle(3.0)
    world.train(20)
    world.settle(2.0)
    world.lose_rank(1)
    world.settle(60.0)
    assert world.state.outcome is Outcome.FAILED and world.state.kept
    world.restart()
    world.settle(60.0)
    assert world.phase() == "Failed"
    ask(world, "second")
    world.settle(3.0)
    assert world.phase() == "Running"


def test_a_request_from_before_the_failure_is_none() -> None:
    world = running(make_job(maxRestarts=0))
    ask(world, "too early")
    world.settle(2.0)
    world.lose_rank(0)
    world.settle(60.0)
    assert world.phase() == "Failed"
    world.restart()
    world.settle(60.0)
    assert world.phase() == "Failed"


def test_deadlines_begin_anew() -> None:
    spec = {"activeDeadlineSeconds": 100}
    world = running(make_job(spec=spec))
    world.settle(110.0)
    assert world.condition("Failed")[1] == "DeadlineExceeded"
    ask(world)
    world.settle(90.0)
    assert world.phase() == "Running"
    world.settle(20.0)
    assert world.condition("Failed")[1] == "DeadlineExceeded"


@pytest.mark.parametrize("stored", [False, True])
def test_a_job_whose_memory_was_freed_is_not_resumed_and_is_told_why(stored: bool) -> None:
    world = failed(make_job(maxRestarts=0, keepFailedSeconds=10))
    world.state = replace(world.state, stored=Generation(1, 5) if stored else None)
    world.settle(30.0)
    ask(world)
    world.settle(30.0)
    assert world.phase() == "Failed" and world.published == [world.membership]
    what = "its newest copy in durable storage" if stored else "it begins anew"
    (text,) = world.messages("NotResumed")
    assert "no longer in memory" in text and what in text


def test_a_complete_job_is_not_resumed() -> None:
    world = running()
    world.finish()
    world.settle(1.0)
    ask(world)
    world.settle(10.0)
    assert world.phase() == "Complete"
    assert world.messages("NotResumed") == ["the job is complete: there is nothing to resume"]


def test_a_job_that_never_had_its_nodes_tries_again() -> None:
    world = World(make_job(spares=0, spec={"preRunningDeadlineSeconds": 30}))
    world.kill_daemon("n3")
    world.settle(40.0)
    assert world.condition("Failed")[1] == "PreRunningDeadlineExceeded"
    world.revive_daemon("n3")
    ask(world)
    world.settle(3.0)
    assert (world.membership.epoch, world.phase()) == (1, "Running")


def test_nothing_begins_before_a_daemon_that_holds_the_snapshots_has_dialled() -> None:
    world = failed()
    world.restart()
    for daemon in world.daemons.values():
        daemon.alive = False
    world.unconnected = set(world.daemons)
    ask(world)
    world.settle(60.0)
    assert world.phase() == "Failed" and world.state.kept
    for daemon in world.daemons.values():
        daemon.alive = True
    world.settle(3.0)
    assert (world.membership.epoch, world.phase()) == (2, "Running")


def test_a_job_without_a_line_goes_on_when_the_node_that_it_lacked_is_back() -> None:
    world = running()
    world.lose_rank(0)
    world.look()
    world.line = Line(generation=None, reason="1.10 lacks ranks [2, 3]")
    world.settle(5.0)
    assert world.condition("Failed")[1] == "NoRecoveryLine" and holders(world) == 4
    world.line = None
    ask(world)
    world.settle(3.0)
    assert world.phase() == "Running" and "from generation 1.10" in world.messages("Running")[-1]


def test_a_node_that_was_lost_meanwhile_is_replaced() -> None:
    world = failed(make_job(maxRestarts=0, spares=1))
    world.kill_node("n2")
    world.settle(600.0)
    ask(world)
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"] and world.phase() == "Running"


def test_a_script_that_was_wrong_may_fail_alike_again() -> None:
    rules: Any = [{"when": "Any", "action": "RestartInPlace"}]
    world = World(make_job(rules=rules))
    world.settle(1.0)
    for _ in range(3):
        world.exit_rank(1, 1, "ModuleNotFoundError: no module")
        world.settle(8.0)
    assert world.condition("Failed")[1] == "FailsBeforeFirstStep"
    ask(world)
    world.settle(3.0)
    world.exit_rank(1, 1, "ModuleNotFoundError: no module")
    world.settle(8.0)
    assert world.state.outcome is None  # three times anew


def test_a_failed_job_that_is_resumed_while_it_is_suspended_waits_for_its_user() -> None:
    world = failed()
    world.job = make_job(maxRestarts=0, suspend=True)
    world.settle(60.0)
    assert world.phase() == "Failed"
    ask(world)
    world.settle(2 * HOUR_S)
    assert world.phase() == "Suspended" and holders(world) == 4
    world.job = make_job(maxRestarts=0)
    world.settle(3.0)
    assert world.phase() == "Running" and "from generation 1.10" in world.messages("Running")[-1]


def test_a_queue_is_asked_before_a_resumed_job_begins() -> None:
    world = failed()
    ask(world)
    world.look()
    assert world.state.outcome is None and world.agents == {}
    world.suspension = Suspension(reason="Queued", message="waits in Kueue's queue q")
    world.settle(600.0)
    assert world.phase() == "Suspended" and world.agents == {} and holders(world) == 4
    world.suspension = None
    world.settle(3.0)
    assert world.phase() == "Running"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_failed_job_is_persisted_on_request_while_it_keeps_its_memory(restarts: bool) -> None:
    spec = {"persistence": {"uri": "/store"}}
    world = failed(make_job(maxRestarts=0, keepFailedSeconds=100, spec=spec))
    if restarts:
        world.restart()
        world.settle(2.0)
    ask(world, name=COPY_ANNOTATION)
    world.settle(2.0)
    assert world.actions.count(PersistNow()) == 1
    world.settle(150.0)
    ask(world, "again", name=COPY_ANNOTATION)
    world.settle(2.0)
    assert world.actions.count(PersistNow()) == 1


def test_daemons_are_renewed_with_care_for_what_a_failed_job_keeps() -> None:
    world = failed(make_job(maxRestarts=0, keepFailedSeconds=100))
    requirements = requirements_of(world.job, world.state, world.observed(), world.now)
    assert requirements is not None and requirements.hold == "" and len(requirements.groups[0]) == 4
    world.settle(120.0)
    assert requirements_of(world.job, world.state, world.observed(), world.now) is None
