"""When a daemon checks its node, and what it reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from holdfast_core.idle_checks import FailedCheck
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.observing.idle_checks import IDLE_S, IdleChecks
from holdfast_host.processes import JITTER
from holdfast_host.results import Outcome, Result

PERIOD_S = 1800.0
PASSED, FAILED, NOTICED, NOT_CHECKED = Outcome


class Round:
    """A round that is over when a test says so."""

    def __init__(self, on_results: Callable[[], None]) -> None:
        self._on_results = on_results
        self.found: list[Result] | None = None
        self.stopped = False
        self.kept = False
        """Whether the kernel keeps its process."""

    def is_over(self) -> bool:
        return self.found is not None

    def has_ended(self) -> bool:
        return not self.kept

    def results(self) -> list[Result]:
        assert self.found is not None
        self._on_results()
        return self.found

    def stop(self) -> None:
        self.stopped = True


class Idle:
    """A node without a job, unless a test says otherwise, and a clock."""

    def __init__(self) -> None:
        self.now, self.idle = 1000.0, True
        self.comes_beside_results = False
        self.rounds: list[Round] = []
        self.metrics = DaemonMetrics()
        self.checks = IdleChecks(
            PERIOD_S,
            is_idle=lambda: self.idle,
            start=self.start,
            metrics=self.metrics,
            clock=lambda: self.now,
        )

    def start(self) -> Round:
        self.rounds.append(Round(self.on_results))
        return self.rounds[-1]

    def on_results(self) -> None:
        self.idle = not self.comes_beside_results

    def turn(self) -> None:
        asyncio.run(self.checks.turn())

    def until_round(self) -> float:
        """Seconds until the next round begins."""
        began, count = self.now, len(self.rounds)
        while len(self.rounds) == count:
            self.now += 1.0
            self.turn()
        return self.now - began

    def find(self, **outcomes: Outcome) -> None:
        """Have a round find something."""
        self.until_round()
        self.rounds[-1].found = [
            Result(check.replace("_", " "), outcome, f"{check} {outcome}")
            for check, outcome in outcomes.items()
        ]
        self.turn()

    def confirmed(self) -> set[str]:
        return {each.check for each in self.checks.report() or () if each.confirmed}

    def failed(self) -> dict[str, float] | None:
        found: tuple[FailedCheck, ...] | None = self.checks.report()
        return None if found is None else {each.check: each.failing_s for each in found}


def test_rounds_begin_at_times_of_their_own_and_not_at_once() -> None:
    idle = Idle()
    pauses = [idle.until_round()]
    assert IDLE_S <= pauses[0] <= PERIOD_S + 1
    for _ in range(4):
        idle.rounds[-1].found = []
        idle.turn()
        pauses.append(idle.until_round())
        assert (1 - JITTER) * PERIOD_S <= pauses[-1] <= (1 + JITTER) * PERIOD_S + 1
    assert len(set(pauses)) > 2


def test_nothing_is_reported_before_a_check_has_proved_something() -> None:
    idle = Idle()
    assert idle.failed() is None
    idle.until_round()
    assert idle.failed() is None, "a round runs"
    idle.rounds[-1].found = [Result("disk", NOT_CHECKED, "no right")]
    idle.turn()
    assert idle.failed() is None
    idle.find(disk=NOT_CHECKED, clock=NOTICED)
    assert idle.failed() is None, "a clock that nothing synchronises speaks for no disk"
    idle.find(disk=PASSED, clock=NOTICED)
    assert idle.failed() == {}


def test_a_failed_check_stands_until_it_passes() -> None:
    idle = Idle()
    idle.find(memory=PASSED, disk=FAILED)
    began = idle.now
    assert idle.failed() == {"disk": 0.0}
    idle.find(memory=FAILED, disk=NOT_CHECKED)
    assert idle.failed() == {"disk": idle.now - began, "memory": 0.0}
    assert idle.confirmed() == set(), "in one round each"
    idle.find(memory=NOTICED, disk=FAILED)
    assert idle.failed() == {"disk": idle.now - began}
    assert idle.confirmed() == {"disk"}
    (found,) = idle.checks.report() or ()
    assert found.text == "disk failed"
    idle.find(disk=PASSED)
    assert idle.failed() == {}


def test_a_round_that_says_nothing_leaves_all_as_it_was() -> None:
    idle = Idle()
    idle.find(disk=FAILED)
    began = idle.now
    idle.find(all=NOT_CHECKED)
    assert idle.failed() == {"disk": idle.now - began}


def test_what_goes_on_failing_after_a_job_has_failed_since_before_it() -> None:
    idle = Idle()
    idle.find(memory=FAILED, disk=FAILED)
    began = idle.now
    idle.idle = False
    idle.turn()
    idle.now += 7200.0
    idle.idle = True
    idle.find(memory=PASSED, disk=FAILED)
    assert idle.failed() == {"disk": idle.now - began} and idle.confirmed() == {"disk"}


def test_a_job_that_comes_ends_the_round_and_what_was_known() -> None:
    idle = Idle()
    idle.find(disk=FAILED)
    idle.until_round()
    idle.idle = False
    assert idle.failed() is None, "at once"
    idle.turn()
    assert idle.rounds[-1].stopped
    for _ in range(5000):
        idle.now += 1.0
        idle.turn()
    assert len(idle.rounds) == 2 and idle.failed() is None
    idle.idle = True
    assert idle.failed() is None, "that was before the job"
    assert idle.until_round() >= IDLE_S


def test_a_job_that_comes_while_results_are_read_is_blamed_on_nobody() -> None:
    idle = Idle()
    idle.until_round()
    idle.rounds[-1].found = [Result("disk", FAILED, "it is broken")]
    idle.comes_beside_results = True
    idle.turn()
    idle.idle = True
    assert idle.failed() is None


@pytest.mark.parametrize("job_comes", [False, True])
def test_no_round_begins_beside_a_process_that_the_kernel_keeps(job_comes: bool) -> None:
    idle = Idle()
    idle.until_round()
    idle.rounds[-1].kept = True
    if job_comes:
        idle.idle = False
    else:
        idle.rounds[-1].found = []
    idle.turn()
    idle.idle = True
    for _ in range(5000):
        idle.now += 1.0
        idle.turn()
    assert len(idle.rounds) == 1
    idle.rounds[-1].kept = False
    assert idle.until_round() == 1.0


def test_outcomes_are_counted_and_what_did_not_pass_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    idle = Idle()
    idle.find(memory=PASSED, disk=FAILED, clock=NOTICED, shared_memory=NOT_CHECKED)
    for outcome in ("passed", "failed", "noticed", "not_checked"):
        name, labels = "holdfast_idle_checks_total", {"outcome": outcome}
        assert idle.metrics.registry.get_sample_value(name, labels) == 1.0
    said = ["node_check_failed", "node_check_noticed", "node_not_checked"]
    assert caplog.messages == said
