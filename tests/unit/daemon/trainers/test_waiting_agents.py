"""Which jobs have agents that wait on the node, on a virtual clock."""

from __future__ import annotations

from contextlib import ExitStack

from holdfast_daemon.trainers.waiting_agents import JOBS_MAX, LINGER_S, WaitingAgents


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_agent_waits_during_its_call_and_for_a_moment_after_it() -> None:
    clock = Clock()
    agents = WaitingAgents(clock)
    with agents.waiting("a"):
        clock.now += 60.0
        assert agents.jobs() == {"a"}
    clock.now += 0.9 * LINGER_S
    assert agents.jobs() == {"a"}
    clock.now += 0.2 * LINGER_S
    assert agents.jobs() == set()


def test_an_agent_that_asks_again_goes_on_waiting() -> None:
    clock = Clock()
    agents = WaitingAgents(clock)
    with agents.waiting("a"):
        with agents.waiting("a"), agents.waiting("b"):
            assert agents.jobs() == {"a", "b"}
        clock.now += 2 * LINGER_S
        assert agents.jobs() == {"a"}


def test_no_more_jobs_are_counted_than_fit_into_a_heartbeat() -> None:
    clock = Clock()
    agents = WaitingAgents(clock)
    with ExitStack() as calls:
        for number in range(JOBS_MAX + 5):
            calls.enter_context(agents.waiting(str(number)))
        assert len(agents.jobs()) == JOBS_MAX
    assert len(agents.jobs()) == JOBS_MAX
    clock.now += 2 * LINGER_S
    with agents.waiting("late"):
        assert agents.jobs() == {"late"}
