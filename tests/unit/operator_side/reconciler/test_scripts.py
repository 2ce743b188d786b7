"""Scripts that are wrong, on virtual time: their last words, and the end of trying."""

from __future__ import annotations

import pytest
from virtual_world import World, make_job, running

from holdfast_core.exit_codes import BEGINS_ANEW, HOLDFAST_DECIDED, PROCESS_ENDS
from holdfast_operator.reconciler.failures.trainer_failures import ALIKE_MAX, LINES_CHARACTERS_MAX
from holdfast_operator.reconciler.observe.counters import Outcome

LINES = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'numpyy'"


def failing(
    job: World | None = None, *, lines: str = LINES, code: int = 1, times: int = 10
) -> World:
    """A world whose rank 2 ends in each epoch alike, before it has completed a step."""
    world = job or World(make_job())
    for _ in range(times):
        world.settle(6.0)
        if world.state.outcome is not None:
            break
        world.exit_rank(2, code, lines)
        world.settle(6.0)
    return world


def test_a_script_that_fails_alike_three_times_before_its_first_step_fails_the_job() -> None:
    world = failing()
    assert world.state.outcome is Outcome.FAILED
    assert world.condition("Failed")[:2] == (True, "FailsBeforeFirstStep")
    assert world.state.counted == ALIKE_MAX - 1
    reason = world.state.outcome_reason
    assert reason.startswith(
        "rank 2 exited with code 1, 3 times in the same way before the job's first step"
    )
    assert reason.endswith(LINES)
    assert world.messages("Failed") == [reason]


def test_what_varies_in_the_last_line_does_not_make_failures_different() -> None:
    world = World(make_job())
    for epoch in range(ALIKE_MAX):
        failing(world, lines=f"RuntimeError: port {29500 + epoch} at 0x7f{epoch}a", times=1)
    assert world.condition("Failed")[1] == "FailsBeforeFirstStep"


def test_failures_that_differ_are_restarted_until_too_many() -> None:
    world = World(make_job(maxRestarts=5))
    for line in "abcdef":
        assert world.state.outcome is None
        failing(world, lines=f"ValueError: {line}", times=1)
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"
    assert world.state.outcome_reason.endswith("it wrote last:\nValueError: f")


def test_after_a_first_step_the_same_failures_are_faults_to_recover_from() -> None:
    world = failing(running(make_job(maxRestarts=5)))
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"


def test_a_first_step_counts_in_any_epoch() -> None:
    world = failing(times=ALIKE_MAX - 1)
    world.train(1, protect=False)
    world.settle(1.0)
    failing(world, times=1)
    assert world.state.outcome is None


def test_a_kill_between_two_failures_begins_the_count_anew() -> None:
    world = failing(times=ALIKE_MAX - 1)
    failing(world, lines="", code=137, times=1)
    failing(world, times=ALIKE_MAX - 1)
    assert world.state.outcome is None


def test_signals_and_codes_that_ask_for_a_restart_are_not_the_scripts_fault() -> None:
    for code in (42, 75, 137, 139):
        assert failing(code=code, times=ALIKE_MAX + 1).state.outcome is None


def test_an_exit_code_alone_does_not_make_failures_alike() -> None:
    assert failing(lines="", times=ALIKE_MAX + 1).state.outcome is None


def test_a_rule_on_the_code_restarts_all_the_same() -> None:
    rule = {"when": "ExitCode", "values": [1], "action": "RestartInPlace"}
    world = failing(World(make_job(rules=[rule])), times=ALIKE_MAX + 1)
    assert world.state.outcome is None


def test_the_count_survives_a_restart_of_the_control_loop() -> None:
    world = failing(times=ALIKE_MAX - 1)
    world.restart()
    failing(world, times=1)
    assert world.condition("Failed")[1] == "FailsBeforeFirstStep"
    assert world.state.failure is not None and world.state.failure.last_lines == LINES


def test_the_last_lines_are_shown_once_while_failures_are_alike() -> None:
    world = failing(times=2)
    assert world.messages("LastLines") == [f"rank 2 exited with code 1; it wrote last:\n{LINES}"]
    failing(world, lines="ValueError: another", times=1)
    assert len(world.messages("LastLines")) == 2


def test_the_first_failure_that_is_seen_is_the_one_that_is_shown() -> None:
    world = World(make_job())
    world.look()
    world.exit_rank(3, 1, LINES)
    world.look()
    assert world.membership.epoch == 1  # the next one waits a moment
    world.exit_rank(0, 1, "RuntimeError: connection closed by peer")
    world.settle(2.0)
    assert world.membership.epoch == 2
    assert world.state.failure is not None
    assert world.state.failure.text == "rank 3 exited with code 1"


def test_a_rule_that_fails_the_job_shows_the_last_lines() -> None:
    rules = [{"when": "ExitCode", "values": [3], "action": "Fail"}]
    world = running(make_job(rules=rules))
    world.exit_rank(1, 3, LINES)
    world.settle()
    assert world.state.outcome_reason.endswith(f"Fail applies; it wrote last:\n{LINES}")


def test_of_many_lines_an_event_has_the_last_and_the_state_has_all() -> None:
    lines = "\n".join(f"line {n:04} {'x' * 80}" for n in range(20))
    world = failing(lines=lines, times=1)
    (message,) = world.messages("LastLines")
    assert len(message) < LINES_CHARACTERS_MAX + 100 and message.endswith(lines[-80:])
    assert "it wrote last:\nline 00" in message
    assert world.state.failure is not None and world.state.failure.last_lines == lines


def test_codes_with_which_holdfast_ends_ranks_are_never_the_scripts_fault() -> None:
    for code in HOLDFAST_DECIDED:
        world = failing(code=code, times=ALIKE_MAX + 1)
        assert world.state.outcome is None
        assert world.state.failure is None
        assert not world.messages("LastLines")


@pytest.mark.parametrize("code", sorted(HOLDFAST_DECIDED))
def test_an_epoch_that_holdfast_ends_says_nothing_for_or_against_the_script(code: int) -> None:
    world = World(make_job())
    for _ in range(ALIKE_MAX - 1):
        failing(world, times=1)
        failing(world, code=code, lines="holdfast_core.errors.Any: its world ended", times=1)
    failing(world, times=1)
    assert world.condition("Failed")[1] == "FailsBeforeFirstStep"


@pytest.mark.parametrize("code", sorted(HOLDFAST_DECIDED))
@pytest.mark.parametrize("other", [1, 3, 137])
def test_what_else_ended_a_rank_explains_those_that_holdfast_ended(code: int, other: int) -> None:
    world = World(make_job())
    world.settle(6.0)
    world.exit_rank(0, code, "holdfast_core.errors.StaleEpochError: ended")
    world.exit_rank(2, other, LINES)
    world.settle(6.0)
    assert world.state.failure is not None
    assert world.state.failure.exit_code == other


def test_where_training_begins_anew_all_members_restart_at_once_and_it_counts_once() -> None:
    world = World(make_job())
    world.settle(6.0)
    world.exit_rank(2, 137, "")
    world.settle(6.0)
    counted = world.state.counted
    world.exit_rank(0, BEGINS_ANEW, "")
    world.settle(6.0)
    assert world.membership.restarting == set(world.membership.world.members)
    assert world.state.counted == counted


def test_a_rank_that_ends_with_its_world_restarts_alone() -> None:
    world = World(make_job())
    world.settle(6.0)
    world.exit_rank(0, PROCESS_ENDS, "")
    world.settle(6.0)
    assert world.membership.restarting == {0}
    assert world.state.counted == 1
