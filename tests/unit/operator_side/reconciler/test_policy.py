"""Failure rules, limits, and how a job ends, on virtual time."""

from __future__ import annotations

import pytest
from virtual_world import World, make_job, running

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_operator.reconciler.observe.counters import Outcome

ANY = {"when": "Any", "action": "RestartInPlace"}


@pytest.mark.parametrize(
    ("rules", "seconds"),
    [
        ([{"when": "NoReplacement", "action": "Fail", "afterSeconds": 60}, ANY], 60.0),
        ([{"when": "NoReplacement", "action": "Fail"}, ANY], 0.0),
    ],
)
def test_without_a_spare_the_job_waits_as_its_rule_demands_and_fails(
    rules: list[dict[str, object]], seconds: float
) -> None:
    world = running(make_job(spares=0, rules=rules))
    world.kill_node("n1")
    world.settle(5.0)
    if seconds:
        assert world.condition("Scheduled")[:2] == (False, "NoReplacement")
        world.settle(seconds - 1.0)
        assert world.state.outcome is None
    world.settle(1.0)
    assert world.state.outcome is Outcome.FAILED
    assert f"; no replacement within {seconds:g} s, and the failure" in world.state.outcome_reason


def test_a_node_that_returns_while_the_job_waits_for_a_replacement_is_taken_back() -> None:
    world = running(make_job(spares=0))
    world.kill_daemon("n1")
    world.settle(60.0)
    world.lose_rank(0)
    world.revive_daemon("n1")
    world.settle(1.0)
    assert world.membership.epoch == 2
    assert world.state.no_replacement_since is None


def test_the_first_rule_that_matches_decides() -> None:
    rules = [
        {"when": "ExitCode", "values": [3], "action": "Fail"},
        {"when": "ExitCode", "values": [4], "action": "ReplaceNode"},
        {"when": "NodeLost", "action": "Fail"},
        ANY,
    ]
    world = running(make_job(rules=rules))
    world.exit_agent(1, 4)
    world.settle()
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]
    assert "FenceNode" not in world.kinds()
    world.exit_agent(0, 3)
    world.settle()
    assert world.state.outcome is Outcome.FAILED
    assert "exited with code 3; failure rule on ExitCode: Fail" in world.state.outcome_reason
    world = running(make_job(rules=rules))
    world.kill_node("n1")
    world.settle(6.0)
    assert world.state.outcome is Outcome.FAILED


def test_too_many_restarts_within_the_window_fail_the_job() -> None:
    world = running(make_job(maxRestarts=2, restartWindowSeconds=100))
    for _ in range(2):
        world.lose_rank(0)
        world.settle(1.0)
    world.lose_rank(0)
    world.settle()
    assert world.state.outcome is Outcome.FAILED
    assert "2 restarts within 100 s are as many as" in world.state.outcome_reason
    assert world.membership.epoch == 3 and world.agents == {}


def test_restarts_outside_the_window_or_that_do_not_count_are_allowed() -> None:
    rules = [
        {"when": "NodeLost", "action": "ReplaceNode", "countTowardsMax": False},
        ANY,
    ]
    job = make_job(maxRestarts=1, restartWindowSeconds=50, rules=rules)
    world = running(job)
    world.lose_rank(0)
    world.settle(60.0)
    world.lose_rank(0)
    world.settle(1.0)
    world.kill_node("n2")
    world.settle(6.0)
    assert world.state.outcome is None
    assert (world.membership.epoch, world.state.recoveries) == (4, 3)


def test_a_job_does_not_start_from_nothing_once_it_was_protected() -> None:
    world = running()
    world.lose_rank(0)
    world.look()
    world.line = Line(generation=None, reason="1.10 lacks ranks [0, 1]")
    world.settle()
    assert world.state.outcome is Outcome.FAILED
    assert "no recovery line: generation 1.10 was the newest" in world.state.outcome_reason


def test_a_job_that_was_never_protected_starts_from_the_beginning() -> None:
    world = World(make_job())
    world.settle(1.0)
    world.train(3, protect=False)
    world.settle()
    world.lose_rank(0)
    world.settle(1.0)
    assert world.state.outcome is None
    assert world.messages("Running")[-1] == "4 ranks train in epoch 2 from the beginning"


def test_without_redundancy_what_was_complete_counts() -> None:
    world = World(make_job(redundancy="None"))
    world.settle(1.0)
    world.train(3, protect=False)
    world.settle()
    assert world.state.saved == Generation(1, 3)
    world.lose_rank(0)
    world.settle(1.0)
    assert world.state.outcome is Outcome.FAILED


def test_a_job_whose_agents_all_exit_well_is_complete_and_frees_its_memory() -> None:
    world = running()
    world.finish()
    world.settle()
    assert world.state.outcome is Outcome.COMPLETE
    assert world.agents == {} and world.dropped
    assert world.condition("Complete")[:2] == (True, "JobComplete")
    assert not world.condition("Running")[0]
    world.actions.clear()
    world.settle(5.0)
    assert world.actions == []


def test_a_daemon_that_was_away_at_the_end_frees_the_job_later() -> None:
    world = running()
    world.kill_daemon("n1")
    world.finish()
    world.look()
    world.daemons["n1"].alive = True
    world.settle()
    assert world.daemons["n1"].membership is None


def test_a_suspended_job_stops_its_agents_and_goes_on_in_a_new_epoch() -> None:
    world = running()
    world.job = make_job(suspend=True)
    world.settle(1.0)
    assert world.agents == {} and not world.dropped
    assert world.condition("Suspended")[0]
    world.job = make_job()
    world.settle(1.0)
    assert world.membership.epoch == 2 and len(world.agents) == 4
    assert world.state.recoveries == 0
