"""Failure rules on exit codes of workers and agents, on virtual time."""

from __future__ import annotations

import pytest
from virtual_world import World, make_job, running

from holdfast_operator.reconciler.failures.failure_rules import is_permanent
from holdfast_operator.reconciler.membership.recovering import EXIT_CODE_S
from holdfast_operator.reconciler.observe.counters import Outcome

ANY = {"when": "Any", "action": "RestartInPlace"}
FAIL_ON_3 = {"when": "ExitCode", "values": [3], "action": "Fail"}
WITHOUT_ANY = [{"when": "NodeLost", "action": "ReplaceNode"}]


@pytest.mark.parametrize(
    ("code", "permanent"),
    [
        (None, False),
        (0, False),
        (1, True),
        (42, False),
        (69, False),
        (75, False),
        (79, False),
        (80, False),
        (81, True),
        (127, True),
        (128, False),
        (137, False),
    ],
)
def test_codes_below_128_are_permanent_except_those_that_ask_for_a_restart(
    code: int | None, permanent: bool
) -> None:
    assert is_permanent(code) is permanent


@pytest.mark.parametrize("code", [1, 42, 137])
def test_by_default_every_code_is_restarted_in_place_and_counts(code: int) -> None:
    world = running()
    world.exit_rank(2, code)
    world.look()
    assert world.membership.epoch == 2
    assert world.state.counted == 1
    how = "was killed by SIGKILL (code 137)" if code == 137 else f"exited with code {code}"
    assert world.messages("Recovering") == [f"rank 2 {how}; restart in place in epoch 2"]


def test_required_protection_that_is_refused_fails_the_job_in_words() -> None:
    world = running()
    world.exit_rank(2, 81)
    world.settle()
    assert world.state.outcome is Outcome.FAILED and world.membership.epoch == 1
    assert (
        "rank 2 ended because it requires protection and its saves are refused (code 81)"
        in world.state.outcome_reason
    )


def test_a_rule_on_its_code_lets_a_job_that_requires_protection_try_again() -> None:
    again = {"when": "ExitCode", "values": [81], "action": "RestartInPlace"}
    world = running(make_job(rules=[again, ANY]))
    world.exit_rank(2, 81)
    world.look()
    assert (world.membership.epoch, world.state.counted) == (2, 1)


def test_without_a_rule_that_matches_a_permanent_code_fails_the_job() -> None:
    world = running(make_job(rules=WITHOUT_ANY))
    world.exit_rank(2, 3)
    world.settle()
    assert world.state.outcome is Outcome.FAILED
    assert world.condition("Failed")[:2] == (True, "FailureRule")
    assert "rank 2 exited with code 3; failure rule on ExitCode: Fail applies" in (
        world.state.outcome_reason
    )


def test_without_a_rule_that_matches_a_signal_is_restarted_in_place() -> None:
    world = running(make_job(rules=WITHOUT_ANY))
    world.exit_rank(2, 137)
    world.settle(1.0)
    assert world.state.outcome is None and world.membership.epoch == 2


def test_a_rule_on_a_code_of_a_worker_decides() -> None:
    world = running(make_job(rules=[FAIL_ON_3, ANY]))
    world.exit_rank(1, 3)
    world.settle()
    assert world.state.outcome is Outcome.FAILED


def test_a_code_is_waited_for_when_a_rule_asks_for_it() -> None:
    world = running(make_job(rules=[FAIL_ON_3, ANY]))
    world.lose_rank(1)
    world.look()
    assert world.actions == []
    assert "waiting for the exit code" in world.decision.reason
    world.now += EXIT_CODE_S / 2
    world.exit_rank(1, 3)
    world.look()
    assert world.state.outcome is Outcome.FAILED


def test_a_code_that_does_not_come_is_not_waited_for_long() -> None:
    world = running(make_job(rules=[FAIL_ON_3, ANY]))
    world.lose_rank(1)
    began = world.now
    while world.membership.epoch == 1:
        world.look()
        world.now += 0.1
    assert world.now - began < EXIT_CODE_S + 0.25
    world.settle(1.0)
    world.lose_rank(1)  # and the wait begins anew with each recovery
    world.look()
    assert world.membership.epoch == 2


def test_no_code_is_waited_for_when_all_are_treated_alike() -> None:
    world = running()
    world.lose_rank(1)
    world.look()
    assert world.membership.epoch == 2


def test_no_code_is_waited_for_from_an_agent_that_waits_already() -> None:
    world = running(make_job(rules=[FAIL_ON_3, ANY]))
    world.lose_rank(1)
    world.daemons["n1"].waiting = True
    world.look()
    assert world.membership.epoch == 2


def test_a_traceback_beside_a_killed_rank_is_its_consequence() -> None:
    rules = [{"when": "ExitCode", "values": [1], "action": "Fail"}, ANY]
    world = running(make_job(rules=rules))
    world.exit_rank(0, 137)
    world.exit_rank(1, 1)
    world.look()
    assert world.state.outcome is None
    assert world.messages("Recovering") == [
        "rank 0 was killed by SIGKILL (code 137); restart in place in epoch 2"
    ]


@pytest.mark.parametrize(("code", "fails"), [(1, False), (134, False), (3, True)])
def test_ranks_that_die_of_a_lost_node_meet_no_rule_of_their_own(code: int, fails: bool) -> None:
    rules = [
        {"when": "ExitCode", "values": [1, 3, 134], "action": "Fail"},
        {"when": "NodeLost", "action": "ReplaceNode", "countTowardsMax": False},
        ANY,
    ]
    world = running(make_job(rules=rules))
    world.kill_node("n0")
    world.look()
    world.exit_rank(1, code)
    world.settle(6.0)
    assert (world.state.outcome is Outcome.FAILED) is fails
    if not fails:
        assert (world.membership.epoch, world.state.counted, world.state.recoveries) == (2, 0, 1)


def test_a_traceback_that_nothing_else_explains_meets_its_rule() -> None:
    rules = [{"when": "ExitCode", "values": [1], "action": "Fail"}, ANY]
    world = running(make_job(rules=rules))
    world.exit_rank(0, 1)
    world.lose_rank(3)
    world.look()
    world.now += EXIT_CODE_S
    world.look()
    assert world.state.outcome is Outcome.FAILED


def test_a_worker_that_never_had_a_session_is_seen_by_its_code() -> None:
    world = World(make_job(maxRestarts=0, rules=[ANY]))
    world.look()
    world.daemons["n2"].exits[2] = 1
    world.settle(2.0)
    assert world.state.outcome is Outcome.FAILED
    assert world.state.outcome_reason.startswith("rank 2 exited with code 1; 0 restarts")
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"


def test_an_agent_that_ends_after_its_ranks_is_started_again_in_the_epoch_that_they_began() -> None:
    world = running()
    world.lose_rank(2)
    world.look()
    assert world.membership.epoch == 2
    world.exit_agent(1, 137)
    world.settle(5.0)
    assert world.membership.epoch == 2
    assert (world.state.counted, world.state.recoveries) == (1, 1)
    assert world.phase() == "Running"


def test_an_agent_that_fails_again_before_training_ran_counts() -> None:
    world = running()
    world.lose_rank(2)
    world.look()
    world.exit_agent(1, 137)
    world.look()
    world.look()
    world.exit_agent(1, 1)
    world.settle(5.0)
    assert world.membership.epoch == 3
    assert world.state.counted == 2
