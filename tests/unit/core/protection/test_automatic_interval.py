"""The interval that follows from what saves cost, and when it begins on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast_core.errors import ProtocolError
from holdfast_core.protection.automatic_interval import (
    LEAD_CALLS,
    MEASURED,
    MEASURED_MAX,
    WARMING_UP,
    Costs,
    IntervalDecision,
    IntervalSchedule,
    decide_interval,
)
from holdfast_core.protection.intervals import total_overhead_s

DAY_S = 86400.0
FIRST = WARMING_UP + MEASURED
"""Calls up to the first statement."""


def costs(
    *,
    step_s: float = 1.0,
    blocked_s: float = 0.1,
    copy_s: float = 0.0,
    protect_s: float = 0.0,
    slots: int = 3,
    call: int = 9,
) -> Costs:
    return Costs(
        call=call,
        step=call + 1,
        step_s=step_s,
        blocked_s=blocked_s,
        copy_s=copy_s,
        protect_s=protect_s,
        slots=slots,
    )


def decided(*costs: Costs, a_day: float = 4.0, current: int = 1) -> int:
    return decide_interval(costs, recoveries_per_day=a_day, current=current).steps


def test_the_interval_is_that_of_reft_equation_9() -> None:
    assert decided(costs(step_s=0.5, blocked_s=0.2)) == round(sqrt(2 * 0.2 / (4 / DAY_S)) / 0.5)


@pytest.mark.parametrize("blocked_s", [0.001, 0.1, 30.0])
@pytest.mark.parametrize("a_day", [0.1, 50.0])
def test_no_other_interval_loses_less_time(blocked_s: float, a_day: float) -> None:
    def lost(steps: float) -> float:
        return total_overhead_s(
            save_overhead_s=blocked_s,
            interval_s=steps * 0.1,
            total_s=DAY_S,
            failure_rate_per_s=a_day / DAY_S,
            restart_s=60.0,
        )

    best = decided(costs(step_s=0.1, blocked_s=blocked_s), a_day=a_day)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_snapshots_that_cost_nothing_are_taken_as_often_as_protection_can_follow() -> None:
    assert decided(costs(blocked_s=0.0)) == 1
    assert decided(costs(blocked_s=0.0, protect_s=2.5)) == 3


def test_with_two_slots_a_snapshot_is_protected_before_the_next_is_copied() -> None:
    hidden = costs(blocked_s=0.0, copy_s=1.7, protect_s=2.5)
    assert decided(hidden) == 3
    assert decided(replace(hidden, slots=2)) == 5  # 4.2 s
    assert decided(hidden, replace(hidden, slots=2)) == 5  # they do not all have the same
    assert decided(costs(blocked_s=0.0, copy_s=2.5, protect_s=1.7)) == 3


def test_an_interval_that_is_a_little_too_short_for_the_slots_is_not_kept() -> None:
    two = costs(blocked_s=0.0, copy_s=17.0, protect_s=25.0, slots=2)
    assert [decided(two, current=steps) for steps in (38, 41, 42, 46)] == [42, 42, 42, 46]


def test_the_slowest_rank_decides_what_a_snapshot_costs_and_how_long_a_step_is() -> None:
    slow = costs(step_s=0.5, blocked_s=0.2, protect_s=1.0)  # its step is not the others' wait
    waiting = costs(step_s=0.7, blocked_s=0.0, protect_s=0.2)
    assert decided(slow, waiting) == decided(waiting, slow) == decided(slow)


def test_an_interval_that_is_nearly_right_is_kept() -> None:
    best = decided(costs())
    assert decided(costs(), current=round(best * 1.15)) == round(best * 1.15)
    assert decided(costs(), current=round(best * 1.3)) == best


def test_before_all_ranks_have_measured_the_interval_stays() -> None:
    assert decided(costs(), costs(step_s=0.0, blocked_s=0.0), current=7) == 7


def test_the_reason_has_what_was_measured() -> None:
    found = decide_interval([costs()], recoveries_per_day=4.0, current=1)
    assert found.reason == (
        "a step takes 1 s, a snapshot delays it by 0.1 s, is copied within 0 s and protected 0 s "
        "later, ranks have 3 slots, and 4 recoveries a day are expected: 66 (REFT eq. 9)"
    )


def test_statements_about_different_calls_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not all from one; make the same calls"):
        decided(costs(), costs(call=8))


# --- when it begins -------------------------------------------------------------------------------


@dataclass
class Run:
    """One rank that calls `save` at every `stride`-th step, and what it took."""

    stride: int = 1
    schedule: IntervalSchedule = field(default_factory=IntervalSchedule)
    step: int = 0
    taken: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    undecided: list[int] = field(default_factory=list)
    statements: list[tuple[int, int]] = field(default_factory=list)

    def call(self, times: int = 1) -> None:
        for _ in range(times):
            self.step += self.stride
            called = self.schedule.called(self.step)
            self.missed += called.missed
            if called.due:
                self.taken.append(self.step)
            if called.undecided:
                self.undecided.append(self.step)
            if called.states is not None:
                self.statements.append(called.states)

    def receive(self, steps: int) -> None:
        self.schedule.decided(IntervalDecision(steps=steps, reason=""))


def test_at_first_every_call_is_taken_and_measured() -> None:
    run = Run()
    run.call(FIRST)
    assert run.taken == list(range(1, FIRST + 1))
    assert run.statements == [(FIRST - 1, FIRST)]


def test_an_interval_begins_so_many_calls_after_the_statement() -> None:
    run = Run()
    run.call(FIRST)
    run.receive(10)
    run.call(LEAD_CALLS + 30)
    before = list(range(1, FIRST + LEAD_CALLS))
    assert run.taken == before + [n for n in range(before[-1] + 1, run.step + 1) if n % 10 == 0]
    assert not run.undecided


def test_a_rank_without_the_decision_takes_nothing_and_counts_it_afterwards() -> None:
    prompt, late = Run(), Run()
    for run in (prompt, late):
        run.call(FIRST)
    prompt.receive(4)
    for run in (prompt, late):
        run.call(LEAD_CALLS + 10)
    assert late.undecided == list(range(FIRST + LEAD_CALLS, FIRST + LEAD_CALLS + 11))
    late.receive(4)
    for run in (prompt, late):
        run.call(20)
    assert set(late.taken) < set(prompt.taken)
    assert sorted(late.taken + late.missed) == prompt.taken
    assert late.statements == prompt.statements
    assert len(late.undecided) == 11


def test_loops_that_call_less_often_take_the_calls_that_pass_a_multiple() -> None:
    run = Run(stride=3)
    run.call(FIRST)
    run.receive(10)
    run.call(LEAD_CALLS + 20)
    later = [n for n in run.taken if n > 3 * (FIRST + LEAD_CALLS)]
    assert later == [n for n in range(45, run.step + 1, 3) if n // 10 > (n - 3) // 10]


def test_ranks_state_less_and_less_often_while_the_interval_is_right() -> None:
    run, calls = Run(), []
    for _ in range(12):
        before = len(run.statements)
        while len(run.statements) == before:
            run.call()
        calls.append(run.statements[-1][0])
        run.receive(1)
    apart = [b - a - LEAD_CALLS + 1 for a, b in pairwise(calls)]
    assert apart[:3] == [2 * MEASURED, 4 * MEASURED, 8 * MEASURED]
    assert apart[-1] == MEASURED_MAX


def test_where_ranks_cannot_agree_every_call_is_taken_again() -> None:
    run = Run()
    run.call(FIRST)
    run.receive(10)
    while len(run.statements) < 2:
        run.call()
    run.call(LEAD_CALLS + 3)
    run.schedule.failed()
    run.call(5000)
    assert run.taken[-5000:] == list(range(run.step - 4999, run.step + 1))
    assert len(run.statements) == 2


Measured = tuple[float, float, float]
_MEASURED = st.tuples(
    st.floats(0.01, 10), st.floats(0, 5), st.floats(0, 20)
)  # step, blocked, protect


@given(
    measured=st.lists(_MEASURED, min_size=2, max_size=4),
    delays=st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=4), min_size=3, max_size=3),
    stride=st.integers(1, 3),
    a_day=st.floats(0.01, 1000),
)
def test_all_ranks_take_the_same_saves_whatever_they_measure_and_whenever_they_decide(
    measured: Sequence[Measured], delays: Sequence[Sequence[int]], stride: int, a_day: float
) -> None:
    """Ranks run beside each other, call by call, as training holds them together; each receives
    each agreement some calls after the last rank has stated."""
    ranks = [Run(stride=stride) for _ in measured]
    received = [0] * len(ranks)
    decisions: list[tuple[int, IntervalDecision]] = []
    """With the tick at which the last rank has stated."""
    for tick in range(400):
        for rank, run in enumerate(ranks):
            while received[rank] < len(decisions):
                at, decision = decisions[received[rank]]
                wait = delays[received[rank] % len(delays)][rank % 2]
                if tick < at + wait:
                    break
                run.schedule.decided(decision)
                received[rank] += 1
            run.call()
        n = len(decisions)
        if all(len(run.statements) > n for run in ranks):
            statements = [
                replace(costs(step_s=a, blocked_s=b, protect_s=c), call=call, step=step)
                for (call, step), (a, b, c) in zip(
                    (run.statements[n] for run in ranks), measured, strict=True
                )
            ]
            current = ranks[0].schedule.steps
            decisions.append(
                (tick, decide_interval(statements, recoveries_per_day=a_day, current=current))
            )
    agreed = max((sorted(run.taken + run.missed) for run in ranks), key=len)
    for run in ranks:
        known = sorted(run.taken + run.missed)
        assert known == agreed[: len(known)]
        undecided = run.undecided[-1:] == [run.step]
        assert known == agreed or undecided
    assert len(decisions) >= 1
