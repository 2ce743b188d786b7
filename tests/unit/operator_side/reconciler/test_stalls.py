"""Starts that do not get on, and ends that do not come, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_world import World, make_job, running

from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import ControlState


def starting(ready: set[int], **detection: Any) -> World:
    """A job whose agents run, and of whose ranks only `ready` have sessions."""
    world = World(make_job(detection=detection))
    world.sessionless = set(range(4)) - ready
    world.settle(1.0)
    return world


def ending(**detection: Any) -> World:
    """A job whose ranks have closed all sessions, while all agents run on."""
    world = running(make_job(detection=detection))
    world.sessionless = set(range(4))
    world.settle(1.0)
    return world


def test_a_rank_that_blocks_before_its_session_is_named_and_its_member_restarts() -> None:
    world = starting({0, 1, 3}, startSeconds=100)
    world.settle(5.0)
    assert world.events[1:] == []
    world.settle(10.0)
    (message,) = world.messages("SlowStart")
    assert message == (
        "training waits for the sessions of rank 2, and nothing has changed for 10 s "
        "(a hang after 100 s)"
    )
    world.settle(70.0)
    assert world.membership.epoch == 1
    status, reason, text = world.condition("Running")
    assert (status, reason) == (False, "NotAllRanksReady")
    assert text.startswith("3 of 4 ranks are at work in epoch 1; training waits for the sessions")
    world.settle(20.0)
    assert world.membership.epoch == 2 and world.membership.restarting == {2}
    assert world.messages("Recovering")[0].startswith(
        "training waits for the sessions of rank 2, and nothing has changed for 100.2 s; "
    )
    assert len(world.messages("SlowStart")) == 1


def test_a_start_in_which_no_rank_gets_a_session_is_a_hang_too() -> None:
    world = starting(set())
    world.settle(590.0)
    assert world.membership.epoch == 1
    world.settle(20.0)
    assert world.membership.epoch == 2
    assert "the sessions of all ranks" in world.messages("Recovering")[0]


def test_every_session_that_opens_begins_the_wait_anew() -> None:
    world = starting(set(), startSeconds=100)
    for rank in range(3):
        world.settle(90.0)
        world.sessionless.discard(rank)
    world.settle(90.0)
    assert world.membership.epoch == 1
    world.settle(20.0)
    assert world.membership.epoch == 2


def test_a_start_waits_for_launchers_that_do_not_run_yet_without_a_limit() -> None:
    world = World(make_job(spares=0, detection={"startSeconds": 100}))
    world.sessionless = set(range(4))
    world.full = {"n0", "n1", "n2", "n3", "n4"}
    world.settle(500.0)
    assert world.membership.epoch == 1 and world.messages("SlowStart") == []


def test_a_first_step_that_does_not_come_is_given_the_time_of_a_start() -> None:
    world = running(make_job(detection={"startSeconds": 50}), step=0)
    world.idle_s = 49.0
    world.settle()
    assert world.actions == []
    world.idle_s = 51.0
    world.settle()
    assert world.membership.epoch == 2


def test_a_recovery_that_does_not_get_on_is_followed_by_another() -> None:
    world = running(make_job(detection={"startSeconds": 100}))
    world.lose_rank(1)
    world.look()
    world.sessionless = {1}
    world.settle(90.0)
    assert world.membership.epoch == 2
    world.settle(20.0)
    assert world.membership.epoch == 3


def test_processes_that_never_end_are_shown_and_then_a_hang() -> None:
    world = ending(exitSeconds=100)
    world.exit_agent(0, 0)
    world.settle(5.0)
    status, reason, text = world.condition("Running")
    assert (status, reason) == (True, "AllSessionsClosed")
    assert text.startswith("all ranks have closed their sessions, and the processes of members ")
    assert "[1, 2, 3]" in text and world.phase() == "Running"
    world.settle(85.0)
    assert world.membership.epoch == 1 and len(world.messages("SlowEnd")) == 1
    world.settle(20.0)
    world.sessionless = set()
    world.settle(1.0)
    assert world.membership.epoch == 2 and world.condition("Running")[1] == "AllRanksReady"
    assert "have not ended for 100.2 s" in world.messages("Recovering")[0]


def test_every_process_that_ends_begins_the_wait_anew() -> None:
    world = ending(exitSeconds=100)
    for member in range(3):
        world.settle(90.0)
        world.exit_agent(member, 0)
    world.settle(90.0)
    world.exit_agent(3, 0)
    world.settle(1.0)
    assert world.membership.epoch == 1 and world.state.outcome is Outcome.COMPLETE


def test_a_rule_on_hangs_decides_about_processes_that_never_end() -> None:
    world = running(
        make_job(detection={"exitSeconds": 100}, rules=[{"when": "Hang", "action": "Fail"}])
    )
    world.sessionless = set(range(4))
    world.settle(110.0)
    assert world.state.outcome is Outcome.FAILED
    assert "[0, 1, 2, 3] have not ended" in world.state.outcome_reason


def test_a_control_loop_that_starts_again_tells_an_end_from_a_start() -> None:
    world = ending()
    world.settle(500.0)
    world.state = ControlState()
    world.settle(700.0)
    assert world.membership.epoch == 1
    assert world.messages("SlowStart") == []


@pytest.mark.parametrize("work", ["rebuilding", "loading"])
def test_what_daemons_rebuild_or_load_has_limits_of_its_own(work: str) -> None:
    world = starting({0, 1, 2}, startSeconds=100)
    world.busy = {"n3": work}
    world.settle(500.0)
    assert world.membership.epoch == 1
    world.busy = {}
    world.settle(110.0)
    assert world.membership.epoch == 2


ALWAYS = float("inf")
"""Time of the last work of a rank that works all the time."""


def test_ranks_that_work_without_sessions_are_shown_and_not_restarted() -> None:
    world = starting(set(), startSeconds=100)
    world.worked_at = dict.fromkeys(range(4), ALWAYS)
    world.settle(60.0)
    status, reason, text = world.condition("Running")
    assert (status, reason) == (False, "NotAllRanksReady")
    assert "ranks 0, 1, 2, 3 work without protection, loading, or training without" in text
    assert world.condition("Protected")[2].endswith(
        "; ranks 0, 1, 2, 3 work without a session, and it is not known whether to load or train"
    )
    assert world.messages("WorksUnprotected") == [] == world.messages("SlowStart")
    world.settle(2000.0)
    assert world.membership.epoch == 1
    (message,) = world.messages("WorksUnprotected")
    assert message.startswith("training waits for the sessions of all ranks for 100 s; ranks 0, ")
    assert message.endswith("loading, or training without holdfast.init and session.save")
    for member in range(4):
        world.exit_agent(member, 0)
    world.settle(1.0)
    assert world.state.outcome is Outcome.COMPLETE


def test_one_rank_that_works_keeps_a_start_alive_and_the_limit_counts_from_its_last_work() -> None:
    world = starting(set(), startSeconds=100)
    world.worked_at = {3: ALWAYS}
    world.settle(500.0)
    assert world.membership.epoch == 1
    world.worked_at = {3: world.now}
    world.settle(90.0)
    assert world.membership.epoch == 1
    world.settle(20.0)
    assert world.membership.epoch == 2
    assert "and nothing has changed for 100.2 s" in world.messages("Recovering")[0]


def test_ranks_that_spin_in_a_collective_do_not_hide_the_one_that_they_wait_for() -> None:
    world = starting({0, 1, 3}, startSeconds=100)
    world.worked_at = dict.fromkeys((0, 1, 3), ALWAYS)
    world.settle(110.0)
    assert world.membership.epoch == 2 and world.membership.restarting == {2}


def test_what_works_on_after_its_last_save_is_not_ended() -> None:
    world = ending(exitSeconds=100)
    world.worked_at = {1: ALWAYS}
    world.settle(1000.0)
    assert world.membership.epoch == 1 and world.messages("SlowEnd") == []
    status, reason, text = world.condition("Running")
    assert (status, reason) == (True, "AllSessionsClosed")
    assert "rank 1 works without protection, after its last save" in text
    assert len(world.messages("WorksUnprotected")) == 1
    world.worked_at = {1: world.now}
    world.settle(110.0)
    assert world.membership.epoch == 2


def test_ranks_whose_saves_are_refused_train_and_hang_as_those_with_sessions_do() -> None:
    world = starting(set(), startSeconds=100, hangSeconds=50)
    world.unprotected, world.step = set(range(4)), 7
    world.settle(1.0)
    status, reason, text = world.condition("Running")
    assert (status, reason, world.phase()) == (True, "TrainsUnprotected", "Running")
    assert text.startswith("4 ranks train in epoch 1, step 7; ranks 0, 1, 2, 3 train without")
    assert world.condition("Protected")[:2] == (False, "TrainsUnprotected")
    world.settle(1000.0)
    assert world.membership.epoch == 1
    world.idle_s = 51.0
    world.settle()
    assert world.membership.epoch == 2
    assert "no progress of any rank for 51.0 s" in world.messages("Recovering")[0]
