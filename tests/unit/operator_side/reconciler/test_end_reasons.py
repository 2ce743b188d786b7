"""Ends whose reasons are known late, and memory that is short again and again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from virtual_world import World, make_job, running

from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import AgentState
from holdfast_operator.reconciler.report.recoveries import Recoveries

RULE_ON_KILLS = [
    {"when": "ExitCode", "values": [137], "action": "RestartInPlace"},
    {"when": "Any", "action": "RestartInPlace"},
]


def oom(world: World, step: int = 44, rank: int = 1, code: int = 137) -> None:
    """Train to `step`, have the kernel kill the rank's worker, and the job begin its next epoch."""
    world.step = step
    world.settle(1.0)
    world.oom_epochs[rank] = world.membership.epoch
    world.exit_rank(rank, code)
    world.settle(8.0)


def oom_told_late(world: World, step: int = 44, rank: int = 1) -> None:
    """Likewise, but the launcher reports it when the next epoch has begun."""
    world.step = step
    world.settle(1.0)
    before = world.membership.epoch
    world.lose_rank(rank)
    world.look()
    assert world.membership.epoch == before + 1
    world.oom_epochs[rank] = before
    world.settle(8.0)


def oom_of_container(world: World, step: int = 44, member: int = 1) -> None:
    """Train to `step`, and have the kernel kill a whole container; the reason comes when the next
    epoch has begun."""
    world.step = step
    world.settle(1.0)
    world.lose_rank(world.membership.ranks_of(member).start)
    world.look()
    world.exit_agent(member, 137, "OOMKilled")
    world.settle(8.0)


@pytest.mark.parametrize("end", [oom, oom_told_late, oom_of_container])
def test_three_ends_for_lack_of_memory_at_one_step_fail_the_job_with_advice(end: Any) -> None:
    world = running(make_job())
    for _ in range(2):
        end(world)
        assert world.state.outcome is None and world.phase() == "Running"
    end(world)
    assert world.state.outcome is Outcome.FAILED
    assert world.state.outcome_word == "OutOfMemory"
    assert "(OOMKilled, code 137) after step 44, 3 times at the same step; raise" in (
        world.state.outcome_reason
    )
    assert len(world.messages("OutOfMemory")) == 2
    assert world.state.recoveries == 2 + (end is not oom)


def test_both_kinds_of_ends_are_counted_together_and_others_between_change_nothing() -> None:
    world = running(make_job())
    oom(world)
    world.exit_rank(2, 9)
    world.settle(8.0)
    oom_of_container(world)
    assert world.state.outcome is None
    oom(world, rank=3, code=1)  # a process beside it was killed
    assert world.state.outcome_word == "OutOfMemory"


@pytest.mark.parametrize("steps", [(44, 100, 150, 200), (44, 47, 50, 53), (44, 90, 45, 91)])
def test_memory_that_is_lost_while_training_gets_on_is_a_fault_like_any_other(
    steps: tuple[int, ...],
) -> None:
    world = running(make_job())
    for step in steps:
        oom(world, step)
    assert world.state.outcome is None and world.phase() == "Running"
    assert world.state.counted == len(steps)


def test_steps_that_are_reported_late_are_the_same_step() -> None:
    world = running(make_job())
    for step in (44, 46, 42):
        oom(world, step)
    assert world.state.outcome_word == "OutOfMemory"


def test_a_rule_that_names_the_code_restarts_as_it_says() -> None:
    world = running(make_job(rules=RULE_ON_KILLS))
    for _ in range(4):
        oom(world)
    assert world.state.outcome is None


def test_a_restarted_control_loop_goes_on_counting() -> None:
    world = running(make_job())
    for _ in range(2):
        oom(world)
        world.restart()
        world.settle(8.0)
    oom(world)
    assert world.state.outcome_word == "OutOfMemory"


def test_an_end_that_is_explained_late_is_told_once_and_is_in_the_history() -> None:
    world = running(make_job())
    history = Recoveries()
    history.follow(world.observed(), world.look(), 0.0)
    world.lose_rank(1)
    history.follow(world.observed(), world.look(), 1.0)
    assert [each.cause for each in history.all] == ["rank 1 lost; restart in place in epoch 2"]
    world.exit_agent(1, 137, "OOMKilled")
    decision = world.look()
    history.follow(world.observed(), decision, 2.0)
    told = "the agent of member 1 on n1 was killed for lack of memory (OOMKilled, code 137)"
    assert world.messages("AgentEnded") == [told]
    assert history.all[-1].cause == f"{told}; rank 1 lost; restart in place in epoch 2"
    world.settle(8.0)
    assert world.messages("AgentEnded") == [told] and world.phase() == "Running"


def test_a_rank_whose_end_is_explained_late_is_told_once_and_is_in_the_history() -> None:
    world = running(make_job())
    history = Recoveries()
    history.follow(world.observed(), world.look(), 0.0)
    world.lose_rank(1)
    history.follow(world.observed(), world.look(), 1.0)
    world.oom_epochs[1] = 1
    history.follow(world.observed(), world.look(), 2.0)
    told = "rank 1 was killed for lack of memory (OOMKilled, code 137)"
    assert history.all[-1].cause == f"{told}; rank 1 lost; restart in place in epoch 2"
    world.settle(8.0)
    assert world.messages("AgentEnded") == [told]
    oom(world)  # in time: nothing is late
    assert world.messages("AgentEnded") == [told]


def test_an_init_container_that_fails_again_and_again_is_an_error_of_the_job() -> None:
    world = World(make_job())
    world.sessionless = set(range(4))
    world.settle(1.0)
    for _ in range(3):
        world.exit_agent(2, 3, "InitContainerFailed", "init container fetch exited with code 3")
        key = (2, world.membership.member(2).node)
        world.agents[key] = replace(world.agents[key], last_lines="cannot fetch dataset")
        world.settle(8.0)
    assert world.state.outcome_word == "FailsBeforeFirstStep"
    assert world.state.outcome_reason.startswith(
        "the agent of member 2 was not started: init container fetch exited with code 3, 3 times"
    )


def test_a_pod_that_the_cluster_ended_was_taken_away_and_does_not_count() -> None:
    world = running(make_job())
    world.exit_agent(1, 137, "Evicted", "low on memory")
    key = (1, world.membership.member(1).node)
    world.agents[key] = replace(world.agents[key], disruption="Evicted: low on memory")
    assert world.agents[key].state is AgentState.EXITED
    world.settle(1.0)
    assert world.messages("Recovering")[0].startswith(
        "the agent of member 1 on n1 was taken away: Evicted: low on memory; "
    )
    assert world.state.counted == 0
