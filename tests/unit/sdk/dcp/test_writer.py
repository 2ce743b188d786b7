"""`dcp.async_save` into the memory tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import holdfast
from holdfast.dcp import HoldfastWriter
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, SnapshotSkippedError, StorageError
from holdfast_core.snapshots.generations import Generation

WAIT_S = 20.0

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(trainer: Any, step: int) -> dict[str, Any]:
    """As trainers put it together that follow torch's tutorials."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    scheduler = trainer.scheduler.state_dict()
    return {"step": step, "model": model, "optim": optimizer, "scheduler": scheduler}


def done(saved: Any) -> Any:
    """The result of what `async_save` returns."""
    return saved.result(WAIT_S)


def test_async_save_takes_a_snapshot_that_a_new_process_restores(
    daemon: FakeDaemon,
    trainer: Any,
    make_trainer: Any,
    open_session: Any,
    same: Callable[[Any, Any], None],
) -> None:
    writer = HoldfastWriter(open_session(trainer, daemon))
    for step in (1, 2):
        trainer.train()
        done(async_save(state_of(trainer, step), checkpoint_id=f"{step}", storage_writer=writer))
    assert Generation(1, 2) in daemon.sealed()
    daemon.restart()
    daemon.epoch += 1
    other = make_trainer(seed=7)
    assert open_session(other, daemon).restore() == 2
    same(other.state(), trainer.state())


def test_the_state_is_that_of_the_call_though_training_goes_on(
    daemon: FakeDaemon, trainer: Any, make_trainer: Any, open_session: Any
) -> None:
    writer = HoldfastWriter(open_session(trainer, daemon))
    trainer.train()
    before = trainer.state()
    gate = daemon.hold("grant")
    saved = async_save(state_of(trainer, 1), storage_writer=writer)
    gate.set()
    trainer.train()  # the session's hook waits until the bytes are staged
    done(saved)
    daemon.restart()
    daemon.epoch += 1
    other = make_trainer(seed=7)
    open_session(other, daemon).restore()
    assert torch.equal(other.state()["head.weight"], before["head.weight"])
    assert not torch.equal(trainer.state()["head.weight"], before["head.weight"])


def test_a_skipped_snapshot_fails_its_handle_and_nothing_else(
    daemon: FakeDaemon, trainer: Any, open_session: Any
) -> None:
    session = open_session(trainer, daemon)
    writer = HoldfastWriter(session)
    trainer.train()
    daemon.fail("commit", StorageError("the daemon's memory is full"))
    done(async_save(state_of(trainer, 1), storage_writer=writer))
    assert writer.handle is not None
    assert isinstance(writer.handle.error, StorageError)
    daemon.fail("commit", StorageError("the daemon's memory is full"))
    strict = HoldfastWriter(session, strict=True)
    trainer.train()
    with pytest.raises(CheckpointException, match="memory is full"):
        done(async_save(state_of(trainer, 2), storage_writer=strict))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"step": None}, 'no number "step"'),
        ({"ema": {"w": torch.zeros(3)}}, "'ema' has state that the session does not capture"),
        ({"sampler": {"position": 3}}, "'sampler' has state that the session does not capture"),
    ],
)
def test_a_state_dict_with_more_than_the_session_captures_is_refused(
    daemon: FakeDaemon, trainer: Any, open_session: Any, more: dict[str, Any], message: str
) -> None:
    writer = HoldfastWriter(open_session(trainer, daemon))
    trainer.train()
    with pytest.raises(InvalidJobError, match=message):
        async_save({**state_of(trainer, 1), **more}, storage_writer=writer)


def test_without_a_daemon_training_goes_on_and_the_handle_has_the_reason(trainer: Any) -> None:
    session = holdfast.init(model=trainer.model, optimizer=trainer.optimizer)
    writer = HoldfastWriter(session)
    trainer.train()
    done(async_save(state_of(trainer, 1), storage_writer=writer))
    assert writer.handle is not None
    assert isinstance(writer.handle.error, SnapshotSkippedError)


def test_a_save_that_waits_is_refused(daemon: FakeDaemon, trainer: Any, open_session: Any) -> None:
    writer = HoldfastWriter(open_session(trainer, daemon))
    with pytest.raises(CheckpointException, match=r"works with dcp\.async_save only"):
        save({"step": 1}, storage_writer=writer)
