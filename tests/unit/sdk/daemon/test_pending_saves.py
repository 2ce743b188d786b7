"""The daemon's reports on a save reach its handle, and none is kept without one."""

from __future__ import annotations

import gc

import pytest

from holdfast._daemon.client import DaemonEvent, Stage
from holdfast._daemon.handles import SaveHandle
from holdfast._daemon.pending_saves import PendingSaves
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.snapshots.generations import Generation


def event(stage: Stage, step: int) -> DaemonEvent:
    return DaemonEvent(stage=stage, generation=Generation(1, step))


def waiting(*steps: int) -> tuple[PendingSaves, list[SaveHandle]]:
    pending, handles = PendingSaves(lambda generation: None), [SaveHandle(step) for step in steps]
    for handle in handles:
        pending.add(Generation(1, handle.step), handle)
    return pending, handles


def test_a_set_in_storage_persists_every_save_up_to_it() -> None:
    pending, (first, second, third) = waiting(1, 2, 3)
    pending.apply(event(Stage.PERSISTED, 2))
    assert (first.persisted.result(0), second.persisted.result(0)) == (1, 2)
    assert not third.persisted.done()
    assert not first.protected.done()


def test_a_save_that_is_protected_can_be_persisted_later() -> None:
    pending, (handle,) = waiting(1)
    pending.apply(event(Stage.PROTECTED, 1))
    assert handle.protected.result(0) == 1 and not handle.persisted.done()
    pending.apply(event(Stage.PERSISTED, 1))
    assert handle.persisted.result(0) == 1


def test_a_save_that_cannot_be_protected_can_be_persisted() -> None:
    pending, (handle,) = waiting(1)
    pending.apply(event(Stage.UNPROTECTABLE, 1))
    assert isinstance(handle.protected.exception(0), SnapshotSkippedError)
    assert not handle.persisted.done()
    pending.apply(event(Stage.PERSISTED, 1))
    assert handle.persisted.result(0) == 1


def test_closing_a_session_fails_handles_that_wait_for_storage() -> None:
    pending, (handle,) = waiting(1)
    pending.apply(event(Stage.PROTECTED, 1))
    pending.close()
    with pytest.raises(SnapshotSkippedError, match="before this was persisted"):
        handle.persisted.result(0)
    assert handle.error is None


def test_an_unused_handle_is_not_kept_for_storage() -> None:
    pending, handles = waiting(1)
    pending.apply(event(Stage.PROTECTED, 1))
    handles.clear()
    gc.collect()
    assert not pending._unstored
