"""The steps of a process that does not save, as torch's optimizers tell them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from holdfast._daemon.client import TrainedRequest
from holdfast._daemon.unsaved import STEPS_SEEN, UnsavedSteps
from holdfast.testing import FakeDaemon
from holdfast_core.errors import (
    HoldfastError,
    InvalidJobError,
    ProtectionRequiredError,
    StaleEpochError,
    UnreachableError,
    UnsavedError,
)

WAIT_S = 30.0


class Process:
    """A process whose optimizers are counted."""

    def __init__(self, daemon: FakeDaemon, *, required: bool = False) -> None:
        self.steps = UnsavedSteps()
        self.steps.begin(lambda: daemon, required=required)
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def make_session(self, refusal: InvalidJobError | None = None) -> None:
        """Call `holdfast.init`, and go on if it refuses to make a session."""
        with suppress(InvalidJobError), self.steps.making_session():
            if refusal is not None:
                raise refusal

    def train(self, steps: int = STEPS_SEEN) -> None:
        for _ in range(steps):
            self.steps.on_step(self.optimizer)


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, "the condition does not come true"
        time.sleep(0.01)


def report_of(daemon: FakeDaemon) -> TrainedRequest:
    eventually(lambda: bool(daemon.unprotected))
    report = daemon.unprotected[-1]
    assert report is not None and report.failure_code == UnsavedError.code
    return report


def test_a_process_without_a_session_reports_its_steps_and_what_to_call(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    process = Process(daemon)
    process.train(STEPS_SEEN - 1)
    assert daemon.calls == []
    process.train(1)
    report = report_of(daemon)
    assert report.step == STEPS_SEEN and "holdfast.init was not called" in report.failure
    process.train(4)
    eventually(lambda: report_of(daemon).step == STEPS_SEEN + 4)
    process.steps.on_save()


def test_a_session_that_restored_and_does_not_save_counts_on_from_its_step(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    process = Process(daemon)
    process.make_session()
    process.steps.on_restored(100)
    process.train()
    report = report_of(daemon)
    assert report.step == 100 + STEPS_SEEN and "session.save was not called" in report.failure
    process.steps.on_save()


def test_a_refusal_of_init_that_the_script_has_caught_is_reported(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    process = Process(daemon)
    process.make_session(InvalidJobError("dp x tp is 8, and 4 ranks train"))
    process.train()
    assert report_of(daemon).failure.endswith("dp x tp is 8, and 4 ranks train")
    process.steps.on_save()


def test_several_optimizers_that_step_together_count_as_one(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    process = Process(daemon)
    others = [torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(4)]
    for one in others:
        process.steps.on_step(one)
    process.train(STEPS_SEEN - 1)
    assert daemon.calls == []


def test_the_first_save_ends_it(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    process = Process(daemon, required=True)
    process.make_session()
    process.steps.on_save()
    process.train(10)
    assert daemon.calls == []


@pytest.mark.parametrize(
    "error", [UnreachableError("away"), StaleEpochError("has ended")], ids=repr
)
def test_only_the_end_of_its_epoch_silences_it(error: HoldfastError, tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon.fail("hello", error)
    process = Process(daemon)
    process.train()
    eventually(lambda: bool(daemon.calls))
    if isinstance(error, UnreachableError):
        assert report_of(daemon).step == STEPS_SEEN
    else:
        assert process.steps._thread is not None
        process.steps._thread.join(WAIT_S)
        assert daemon.unprotected == []
    process.steps.on_save()


@pytest.mark.parametrize("caught", [None, InvalidJobError("the topology is of 8 ranks")])
def test_required_protection_ends_training_without_a_session(
    caught: InvalidJobError | None, tmp_path: Path
) -> None:
    process = Process(FakeDaemon(tmp_path), required=True)
    if caught is not None:
        process.make_session(caught)
    process.train(STEPS_SEEN - 1)
    reason = "of 8 ranks" if caught else "holdfast.init was not called"
    with pytest.raises(ProtectionRequiredError, match=reason) as raised:
        process.train(1)
    assert raised.value.__cause__ is caught


def test_a_session_that_has_yet_to_save_is_not_ended(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    process = Process(daemon, required=True)
    process.make_session()
    process.train(100)
    assert report_of(daemon).step <= 100
    process.steps.on_save()
