"""What one task brings to the saver's thread is not lost if its save fails: the next save captures
the tensors that the model has then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_saved

from holdfast._agree.replica_check import ReplicaCheck
from holdfast._capture.strategy import CaptureStrategy
from holdfast._capture.windows import WindowCapture
from holdfast._copying.engine import CopyEngine
from holdfast._daemon.link import Link
from holdfast._save.casts import Casts
from holdfast._save.pipeline import SavePipeline
from holdfast._save.saver import Saver
from holdfast._session import protected
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import Full, Repeats, SparseWindows

pytestmark = pytest.mark.usefixtures("deterministic")

Same = Callable[[dict[str, Any], dict[str, Any]], None]
WAIT_S = 20

KINDS: dict[str, dict[str, Any]] = {
    "casts": {"policy": Full(), "store_compute_weights": False},
    "window": {"policy": SparseWindows(window=1, repeats=Repeats.OPTIMIZER)},
}


def replace_tensors(trainer: Any) -> None:
    """Give parameters and optimizer state other memory, as offloading and loading do."""
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.clone()


def train(trainer: Any, session: Any, step: int, before: Any = None) -> Any:
    trainer.train()
    if before is not None:
        before(trainer)
    return session.save(step)


def assert_restores_last(
    make_trainer: Any, open_session: Any, directory: Path, kind: str, trainer: Any, same: Same
) -> None:
    other = make_trainer("float32 masters", seed=99, dtype=torch.bfloat16)
    session = open_session(other, FakeDaemon(directory, epoch=2), **KINDS[kind])
    assert session.restore() is not None
    same(other.state(), trainer.state())


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_training_abandoned_does_not_leave_the_old_tensors_captured(
    kind: str, make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    trainer, daemon = make_trainer("float32 masters", dtype=torch.bfloat16), FakeDaemon(tmp_path)
    session = open_session(trainer, daemon, start_wait_s=0.05, **KINDS[kind])
    for step in (1, 2):
        train(trainer, session, step).committed.result(WAIT_S)
    commit = daemon.hold("commit")
    train(trainer, session, 3).staged.result(WAIT_S)
    abandoned = train(trainer, session, 4, replace_tensors)
    trainer.train()  # waits no longer than `start_wait_s`
    assert "training went on" in str(abandoned.committed.exception(WAIT_S))
    commit.set()
    wait_saved(session)
    for step in (6, 7):
        handle = train(trainer, session, step)
        handle.committed.exception(WAIT_S)
    assert handle.committed.result(WAIT_S) == 7
    session.close()
    assert_restores_last(make_trainer, open_session, tmp_path, kind, trainer, same)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Have the next call of a method raise after its work. Returns the list that notes it."""
    real, failed = getattr(owner, name), list[str]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if failed:
            return found
        failed.append(name)
        raise RuntimeError(f"{name} fails")

    monkeypatch.setattr(owner, name, failing)
    return failed


ANYWHERE = [
    (protected, "InPlaceCheck", "window"),
    (Saver, "submit", "casts"),
    (Casts, "find", "window"),
    (SavePipeline, "_agree", "casts"),
    (CaptureStrategy, "shape", "casts"),
    (Link, "open", "window"),
    (ReplicaCheck, "expect_repeated", "casts"),
    (WindowCapture, "on_opened", "window"),
    (Casts, "on_session_opened", "casts"),
    (SavePipeline, "_grant", "window"),
    (CopyEngine, "capture", "casts"),
]


@pytest.mark.parametrize(("owner", "name", "kind"), ANYWHERE, ids=[one[1] for one in ANYWHERE])
def test_wherever_a_save_fails_the_next_one_captures_the_tensors_of_the_model(
    owner: Any,
    name: str,
    kind: str,
    make_trainer: Any,
    open_session: Any,
    tmp_path: Path,
    same: Same,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, daemon = make_trainer("float32 masters", dtype=torch.bfloat16), FakeDaemon(tmp_path)
    session = open_session(trainer, daemon, start_wait_s=WAIT_S, **KINDS[kind])
    for step in (1, 2):
        train(trainer, session, step).committed.result(WAIT_S)
    trainer.scheduler.grown = "x" * 2**20  # so that another session is opened
    failed = fail_once(monkeypatch, owner, name)
    for step in (3, 4, 5):
        handle = train(trainer, session, step, replace_tensors if step == 3 else None)
        handle.staged.exception(WAIT_S)
        handle.committed.exception(WAIT_S)
    assert handle.committed.result(WAIT_S) == 5
    assert failed == [name]
    session.close()
    assert_restores_last(make_trainer, open_session, tmp_path, kind, trainer, same)
