from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_for

import holdfast
from holdfast._activity import ACTIVITY, activity_file, activity_in
from holdfast._copying.engine import CopyEngine
from holdfast.testing import FakeDaemon
from holdfast_core.errors import (
    HoldfastError,
    SnapshotSkippedError,
    StorageError,
)
from holdfast_core.exit_codes import PROCESS_ENDS
from holdfast_core.inspections import SessionActivity
from holdfast_core.snapshots.generations import Generation

Same = Callable[[dict[str, Any], dict[str, Any]], None]
WAIT_S = 20
HUNG_S = 60
"""Longer than training waits for a save."""


def error_of(handle: holdfast.SaveHandle) -> HoldfastError:
    wait([handle.committed], WAIT_S)
    assert handle.error is not None
    return handle.error


def noted_here() -> SessionActivity:
    """What a launcher would read of this process."""
    file = activity_file(os.getpid())
    assert file is not None
    found = activity_in(file.read_bytes())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("optimizer", "stored"),
    [
        ("adamw", True),
        ("sgd with momentum", True),
        ("float32 masters", True),
        ("float32 masters", False),
    ],
)
def test_a_new_process_continues_exactly_where_the_old_one_was(
    optimizer: str, stored: bool, make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    dtype = torch.bfloat16 if optimizer == "float32 masters" else torch.float32
    old = make_trainer(optimizer, dtype=dtype)
    session = open_session(old, FakeDaemon(tmp_path), store_compute_weights=stored)
    assert session.restore() is None
    for step in range(1, 4):
        old.train()
        session.save(step).protected.result(WAIT_S)
    session.close()
    at_save = old.state()
    old.train(3)

    new = make_trainer(optimizer, seed=99, dtype=dtype)
    resumed = open_session(new, FakeDaemon(tmp_path, epoch=2))
    assert resumed.restore() == 3
    assert resumed.epoch == 2
    same(new.state(), at_save)
    new.train(3)
    same(new.state(), old.state())


def test_restored_tensors_never_alias_the_arena(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    old = make_trainer()
    session = open_session(old, FakeDaemon(tmp_path))
    old.train()
    session.save(1).committed.result(WAIT_S)
    session.close()
    new = make_trainer(seed=5)
    daemon = FakeDaemon(tmp_path, epoch=2)
    resumed = open_session(new, daemon)
    resumed.restore()
    before = new.state()
    daemon.corrupt(Generation(1, 1), 100)
    same(new.state(), before)


def test_a_save_is_the_state_of_its_step_although_training_goes_on(
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
    tmp_path: Path,
    make_trainer: Any,
    same: Same,
) -> None:
    session = open_session(trainer, daemon, start_wait_s=WAIT_S)
    trainer.train()
    states = {}
    gate = daemon.hold("grant")
    for step in range(2, 5):
        trainer.train()
        states[step] = trainer.state()
        handle = session.save(step)
        threading.Timer(0.02, gate.set).start()
        trainer.train()  # forward and backward overlap; the hook holds the optimizer back
        handle.committed.result(WAIT_S)
        gate.clear()
    gate.set()
    session.close()
    for generation in daemon.sealed():
        other = make_trainer(seed=7)
        reader = open_session(other, FakeDaemon(tmp_path, epoch=2, line=generation))
        assert reader.restore() == generation.step
        same(other.state(), states[generation.step])
        reader.close()


def test_the_optimizer_waits_while_the_save_before_is_hashed(
    trainer: Any, open_session: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a device copies by itself, tensors may change before all of them are hashed."""
    waited, capture = threading.Event(), CopyEngine.capture

    class Hashed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.set()
            return super().wait(timeout)

    def slow(*arguments: Any) -> Any:
        digests = capture(*arguments)
        waited.wait(HUNG_S)
        return digests

    monkeypatch.setattr(CopyEngine, "capture", slow)
    session = open_session(trainer, daemon, start_wait_s=WAIT_S)
    session.prepare()
    first = session.save(1)
    first.staged.result(WAIT_S)
    assert not first.committed.done()
    session._saver._current.hashed = Hashed()
    second = session.save(2)
    trainer.train()
    assert second.committed.result(WAIT_S) == 2


def test_saves_reuse_three_slots_and_keep_the_newest_protected_one(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    for step in range(1, 8):
        trainer.train()
        session.save(step).protected.result(WAIT_S)
    assert Generation(1, 7) in daemon.sealed()
    assert len(daemon.sealed()) <= 3
    assert session.counters.committed == 7


def test_the_optimizer_waits_for_the_copy_but_not_for_the_daemon(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, start_wait_s=0.01)
    trainer.train()
    session.prepare()
    gate = daemon.hold("grant")
    ACTIVITY.keep()
    handle, waits = session.save(1), "waits for a slot of the daemon"
    wait_for("the worker to ask for a slot", lambda: noted_here().saving == waits)
    trainer.train()
    assert "grant a slot" in str(error_of(handle))
    noted = noted_here()
    assert (noted.step, noted.training, noted.saving) == (1, "", waits)
    assert "in progress" in str(error_of(session.save(2)))
    gate.set()
    session.prepare()  # returns once the worker is free
    trainer.train()
    while isinstance(session.save(session.counters.step + 1).error, SnapshotSkippedError):
        session.wait_staged()
    assert session.counters.skipped >= 2
    assert session.counters.failed == 0
    session.close()
    assert noted_here().saving == ""


def test_a_state_that_grows_gets_a_new_arena_and_loses_nothing(
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
    tmp_path: Path,
    make_trainer: Any,
    same: Same,
) -> None:
    session = open_session(trainer, daemon)
    session.save(1).protected.result(WAIT_S)  # before the optimizer has any state
    before = trainer.state()
    trainer.train()
    session.save(2).protected.result(WAIT_S)
    after = trainer.state()
    session.close()
    assert len({held.home for held in daemon.sealed().values()}) == 2
    for generation, state in ((Generation(1, 2), after), (Generation(1, 1), before)):
        other = make_trainer(seed=3)
        other.train()  # has optimizer state that the older snapshot must drop again
        reader = open_session(other, FakeDaemon(tmp_path, epoch=2, line=generation))
        assert reader.restore() == generation.step
        same(other.state(), state)
        reader.close()


def test_a_tensor_that_moved_is_followed_without_a_new_arena(
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
    tmp_path: Path,
    make_trainer: Any,
    same: Same,
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    with torch.no_grad():
        weight = trainer.model.head.weight
        weight.data = weight.data.clone() + 1
    session.save(2).committed.result(WAIT_S)
    session.close()
    assert daemon.calls.count("open") == 1
    other = make_trainer(seed=3)
    reader = open_session(other, FakeDaemon(tmp_path, epoch=2))
    assert reader.restore() == 2
    same(other.state(), trainer.state())


def test_tensors_that_are_not_contiguous_come_back(
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
    tmp_path: Path,
    make_trainer: Any,
    same: Same,
) -> None:
    def transpose(t: Any) -> None:
        weight = t.model.layers[0].gate.weight
        weight.data = weight.data.t().contiguous().t()
        assert not weight.is_contiguous()

    transpose(trainer)
    session = open_session(trainer, daemon)
    trainer.train(2)
    session.save(2).committed.result(WAIT_S)
    session.close()
    other = make_trainer(seed=3)
    transpose(other)
    assert open_session(other, FakeDaemon(tmp_path, epoch=2)).restore() == 2
    same(other.state(), trainer.state())


def test_a_unit_with_nan_is_captured_faithfully_and_named(
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
    tmp_path: Path,
    make_trainer: Any,
    same: Same,
) -> None:
    trainer.train()
    with torch.no_grad():
        trainer.model.layers[1].experts.w[2, 0, 0] = float("nan")
    session = open_session(trainer, daemon, nan_check_every=2)
    for step in (1, 2, 3):
        session.save(step).committed.result(WAIT_S)
    session.close()
    named = [manifest.nan_units for manifest in daemon.manifests]
    assert named == [(), ("layer1/expert2",), ()]
    other = make_trainer(seed=3)
    assert open_session(other, FakeDaemon(tmp_path, epoch=2)).restore() == 3
    same(other.state(), trainer.state())


def test_events_of_the_daemon_reach_the_handles(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    daemon = FakeDaemon(tmp_path, protects=False)
    session = open_session(trainer, daemon)
    first, second = session.save(1), None
    first.committed.result(WAIT_S)
    second = session.save(2)
    second.committed.result(WAIT_S)
    assert not first.protected.done()
    daemon.announce("dead", Generation(1, 1))
    daemon.announce("protected", Generation(1, 2))
    assert second.protected.result(WAIT_S) == 2
    assert isinstance(first.protected.exception(WAIT_S), SnapshotSkippedError)
    third = session.save(3)
    third.committed.result(WAIT_S)
    daemon.announce("unprotectable", Generation(1, 3))
    assert "no redundancy" in str(third.protected.exception(WAIT_S))
    daemon.announce("epoch_ended", epoch=4)
    fourth = session.save(4)
    wait([fourth.committed], WAIT_S)
    session.close()
    with pytest.raises(SnapshotSkippedError, match="closed"):
        session.save(5).staged.result(WAIT_S)


def test_what_an_earlier_epoch_saved_after_the_line_takes_no_slot_from_the_next(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    """Nobody can restore it any more. The line stays until something newer is protected."""
    session = open_session(trainer, FakeDaemon(tmp_path))
    for step in (1, 2, 3):
        session.save(step).committed.result(WAIT_S)
    session.close()
    line = Generation(1, 1)
    daemon = FakeDaemon(tmp_path, epoch=2, line=line, protects=False)
    session = open_session(trainer, daemon)
    assert session.restore() == 1
    for step in (2, 3):
        session.save(step).committed.result(WAIT_S)
    assert set(daemon.sealed()) == {line, Generation(2, 2), Generation(2, 3)}
    with pytest.raises(SnapshotSkippedError, match="protection is behind"):
        session.save(4).staged.result(WAIT_S)
    daemon.announce("protected", Generation(2, 2))
    session.save(5).committed.result(WAIT_S)
    assert set(daemon.sealed()) == {Generation(2, step) for step in (2, 3, 5)}
    session.close()


def test_a_snapshot_whose_slot_is_being_granted_is_none(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    """Daemons of other ranks look for the line in the same directory meanwhile."""
    daemon = FakeDaemon(tmp_path)
    session = open_session(trainer, daemon)
    session.save(1).committed.result(WAIT_S)
    session.close()
    (manifest,) = tmp_path.glob("*/slot-0.manifest")
    manifest.with_name("slot-1.manifest").symlink_to("removed-between-listing-and-reading")
    assert set(daemon.sealed()) == {Generation(1, 1)}


HANGS = """
import sys, threading, torch, holdfast
from pathlib import Path
from holdfast._copying.engine import CopyEngine
from holdfast_core.exit_codes import PROCESS_ENDS
from holdfast.testing import FakeDaemon

model = torch.nn.Linear(2, 2)
daemon = FakeDaemon(Path(sys.argv[1]))
session = holdfast.init(
    model=model, optimizer=torch.optim.SGD(model.parameters()), daemon=daemon
)
session.save(1).committed.result(60)
daemon.announce("epoch_ended", epoch=2, ends_process=True)
threading.Event().wait(60)  # as in a collective with a node that is gone
"""


@pytest.mark.slow
def test_a_process_that_another_launcher_has_started_ends_with_its_epoch(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == PROCESS_ENDS, process.stderr


def test_progress_is_reported(trainer: Any, open_session: Any, daemon: FakeDaemon) -> None:
    session = open_session(trainer, daemon, report_interval_s=0.0)
    daemon.fail("commit", StorageError("full"))
    error_of(session.save(1))
    session.save(2).committed.result(WAIT_S)
    session.prepare()
    assert daemon.reports[-1].step == 2
    assert daemon.reports[-1].failed == 1
    assert any(report.failure == "full" for report in daemon.reports)


def test_without_a_daemon_training_runs_and_nothing_is_protected(
    trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session = holdfast.init(model=trainer.model, optimizer=trainer.optimizer)
    with session:
        assert session.restore() is None
        trainer.train()
        handle = session.save(1)
        session.save(2)
    assert isinstance(handle.staged.exception(0), SnapshotSkippedError)
    assert isinstance(handle.protected.exception(0), SnapshotSkippedError)
    assert [r.message for r in caplog.records if "no daemon protects" in r.message][1:] == []
    assert session.counters.skipped == 2


def test_a_module_may_change_its_buffers_when_its_extra_state_is_taken(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    class Scaled(torch.nn.Module):
        """Notes what it has seen only when its state is taken, as quantized layers do."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def get_extra_state(self) -> str:
            self.get_buffer("scale").mul_(2)
            return "scaled"

        def set_extra_state(self, state: str) -> None: ...

    trainer.model.scaled = Scaled()
    session = open_session(trainer, daemon, start_wait_s=WAIT_S)
    for step in (1, 2, 3):
        trainer.train()
        session.save(step).committed.result(WAIT_S)
