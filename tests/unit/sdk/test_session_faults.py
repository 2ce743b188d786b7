from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    InvalidJobError,
    LayoutMismatchError,
    MemoryBudgetError,
    ProtectionRequiredError,
    RankInUseError,
    SaveFailedError,
    StaleEpochError,
    StepOrderError,
    StorageError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout

Same = Callable[[dict[str, Any], dict[str, Any]], None]
WAIT_S = 20


def error_of(handle: holdfast.SaveHandle) -> HoldfastError:
    wait([handle.committed], WAIT_S)
    assert handle.error is not None
    return handle.error


def test_a_step_that_is_not_newer_is_refused_in_the_handle(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    session.save(5).committed.result(WAIT_S)
    for step in (5, 4):
        error = error_of(session.save(step))
        assert isinstance(error, StepOrderError)
        assert "after step 5" in str(error)
    assert session.counters.failed == 2
    session.save(6).committed.result(WAIT_S)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("hello", UnreachableError("no daemon")),
        ("open", MemoryBudgetError("too big", needed_bytes=9, available_bytes=1)),
        ("open", RankInUseError("taken")),
        ("claim", StorageError("no memory")),
        ("grant", UnknownSessionError("who?")),
        ("grant", UnreachableError("gone")),
        ("commit", StorageError("full")),
        ("commit", UnreachableError("gone")),
    ],
)
def test_whatever_fails_ends_in_the_handle_and_the_next_save_succeeds(
    method: str, error: HoldfastError, trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    daemon.fail(method, error)
    trainer.train()
    assert error_of(session.save(1)) is error
    assert error.__traceback__ is None, "a handle that is kept would keep the frames of its save"
    trainer.train()
    session.save(2).protected.result(WAIT_S)
    assert session.problem is None
    session.close()  # the daemon's word may come before the saver has counted its commit
    assert (session.counters.failed, session.counters.committed) == (1, 1)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("open", MemoryBudgetError("too big", needed_bytes=9, available_bytes=1)),
        ("claim", StorageError("no memory")),
    ],
)
def test_a_rank_whose_saves_are_refused_reports_its_steps_until_it_has_a_session_or_ends(
    method: str, error: HoldfastError, trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    settings = {"report_interval_s": 0.0, "reopen_backoff_s": 0.0, "reopen_backoff_max_s": 0.0}
    session = open_session(trainer, daemon, **settings)
    daemon.fail(method, error, times=6)  # `prepare` tries to open a session, too
    for step in (1, 2, 3):
        trainer.train()
        error_of(session.save(step))
        session.prepare()
        report = daemon.unprotected[-1]
        assert report is not None
        assert (report.step, report.failure) == (step, str(error)) and report.failed
    trainer.train()
    session.save(4).committed.result(WAIT_S)
    count = len(daemon.unprotected)
    session.close()
    assert len(daemon.unprotected) == count and daemon.reports[-1].step == 4


def test_a_rank_that_no_session_could_hold_reports_its_steps_and_its_end(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, report_interval_s=0.0)
    session._saver.pipeline.problem = InvalidJobError("block 3 is in no optimizer")
    for step in (1, 2):
        trainer.train()
        error_of(session.save(step))
        session.prepare()
    report = daemon.unprotected[-1]
    assert report is not None and report.failure_code == InvalidJobError.code
    session.close()
    assert daemon.unprotected[-1] is None
    assert "open" not in daemon.calls


def test_a_rank_of_an_ended_epoch_reports_no_step(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, report_interval_s=0.0)
    session._saver.pipeline.problem = StaleEpochError("epoch 1 has ended")
    trainer.train()
    error_of(session.save(1))
    session.prepare()
    session.close()
    assert daemon.unprotected == [] and "trained" not in daemon.calls


class Unsaveable:
    """An object whose state cannot be collected, so that every save fails on the training thread:
    the saver's thread never gets a task."""

    def state_dict(self) -> dict[str, Any]:
        raise TypeError("a lock has no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_saves_that_fail_before_the_savers_thread_sees_them_are_reported(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, report_interval_s=0.0)
    session._stateful["lock"] = Unsaveable()
    for step in (1, 2):
        trainer.train()
        error = error_of(session.save(step))
        assert isinstance(error, SaveFailedError) and "a lock has no state" in str(error)
        until = time.monotonic() + WAIT_S
        while not any(each and each.step == step for each in daemon.unprotected):
            assert time.monotonic() < until, "the refused save is not reported"
            time.sleep(0.01)
    report = daemon.unprotected[-1]
    assert report is not None and report.failure_code == SaveFailedError.code
    assert "open" not in daemon.calls


def test_required_protection_raises_what_refuses_a_save_and_nothing_that_passes(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, require_protection=True, reopen_backoff_s=0.0)
    daemon.fail("commit", StorageError("full"))
    trainer.train()
    error_of(session.save(1))
    trainer.train()
    session.save(2).committed.result(WAIT_S)
    session._stateful["lock"] = Unsaveable()
    with pytest.raises(ProtectionRequiredError, match="a lock has no state") as raised:
        session.save(3)
    assert isinstance(raised.value.__cause__, SaveFailedError)


def test_required_protection_raises_a_refusal_of_the_daemon_before_the_next_step(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, require_protection=True)
    daemon.fail("open", MemoryBudgetError("too big", needed_bytes=9, available_bytes=1))
    trainer.train()
    error_of(session.save(1))
    with pytest.raises(ProtectionRequiredError, match="too big"):
        trainer.train()


def test_required_protection_refuses_a_process_without_a_daemon(trainer: Any) -> None:
    with pytest.raises(ProtectionRequiredError, match="HOLDFAST_SOCKET"):
        holdfast.init(
            model=trainer.model,
            optimizer=trainer.optimizer,
            settings=holdfast.Settings(require_protection=True),
        )


def test_each_cause_is_logged_once(
    trainer: Any, open_session: Any, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    session = open_session(trainer, daemon)
    daemon.fail("commit", StorageError("the tmpfs is full"), times=3)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in range(1, 4):
            error_of(session.save(step))
            session.prepare()
    assert sum("the tmpfs is full" in record.message for record in caplog.records) == 1
    assert session.counters.failed == 3


def test_a_restarted_daemon_is_opened_again(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    daemon.restart()
    committed = 1
    for step in range(2, 30):
        trainer.train()
        handle = session.save(step)
        wait([handle.committed], WAIT_S)
        if handle.error is None:
            committed = step
            break
    assert committed > 1
    assert daemon.calls.count("open") == 2
    assert session.problem is None


def test_a_daemon_that_is_gone_stops_nothing(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, reopen_backoff_s=100.0)
    daemon.reachable = False
    for step in range(1, 4):
        trainer.train()
        wait([session.save(step).committed], WAIT_S)
        session.prepare()
    assert session.counters.committed == 0
    assert session.counters.skipped + session.counters.failed >= 3
    assert daemon.calls.count("hello") == 1  # the rest waited for the pause to end


def test_a_corrupt_piece_is_refused_with_rank_piece_and_units(
    trainer: Any, open_session: Any, daemon: FakeDaemon, tmp_path: Path
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    session.close()
    held = daemon.sealed()[Generation(1, 1)]
    home, manifest = held.home, held.manifest
    layout = decode_layout((home / "layout.json").read_bytes())
    for byte in (layout.entries[0].offset, manifest.extras_offset + 3):
        daemon.corrupt(Generation(1, 1), byte)
        with pytest.raises(CorruptError, match=r"rank 0, generation 1\.1: piece 0 .*embedding"):
            open_session(trainer, FakeDaemon(tmp_path, epoch=2)).restore()
        daemon.corrupt(Generation(1, 1), byte)


def test_a_snapshot_of_another_model_is_refused_by_name(
    trainer: Any, open_session: Any, daemon: FakeDaemon, tmp_path: Path, make_trainer: Any
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    session.close()
    wider, longer, shorter = make_trainer(), make_trainer(), make_trainer()
    wider.model.head.bias = torch.nn.Parameter(torch.zeros(17))
    longer.model.more = torch.nn.Linear(2, 2, bias=False)
    del shorter.model.head
    for other, name in ((wider, "head.bias"), (longer, "more.weight"), (shorter, "head.")):
        with pytest.raises(LayoutMismatchError, match=name):
            open_session(other, FakeDaemon(tmp_path, epoch=2)).restore()


def test_a_second_session_for_a_rank_is_refused_while_the_first_lives(
    trainer: Any, open_session: Any, daemon: FakeDaemon, tmp_path: Path, make_trainer: Any
) -> None:
    session = open_session(trainer, daemon)
    session.save(1).committed.result(WAIT_S)
    intruder = open_session(make_trainer(), FakeDaemon(tmp_path))
    assert isinstance(error_of(intruder.save(2)), RankInUseError)
    session.close()
    intruder.save(3).committed.result(WAIT_S)


def test_a_session_of_an_ended_epoch_is_fenced(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    session.save(1).committed.result(WAIT_S)
    daemon.epoch = 2
    assert isinstance(error_of(session.save(2)), StaleEpochError)
    calls = len(daemon.calls)
    assert isinstance(error_of(session.save(3)), StaleEpochError)
    session.prepare()
    assert "grant" not in daemon.calls[calls:]
    assert isinstance(session.problem, StaleEpochError)


def test_a_state_that_cannot_be_encoded_fails_its_save_by_path(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    trainer.scheduler.base_lrs = [object()]
    error = error_of(session.save(1))
    assert isinstance(error, holdfast.UnsupportedValueError)
    assert "['stateful']['scheduler']['base_lrs'][0]" in str(error)
    trainer.scheduler.base_lrs = [0.1]
    session.save(2).committed.result(WAIT_S)
