"""A slot that is granted is committed or given back, whatever fails in between."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import holdfast
from holdfast._copying.placed import Placed
from holdfast._daemon.client import AbortRequest, CommitRequest, Grant, GrantRequest
from holdfast._save.nans import units_with_nan
from holdfast.testing import FakeDaemon
from holdfast_core.errors import HoldfastError, ProtocolError, StorageError, UnreachableError
from holdfast_core.job.snapshots import Full, PartialExperts, SparseWindows
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole

WAIT_S = 20
SOURCES = str(Path(holdfast.__file__).parent)
Call = tuple[CodeType, int, str]
"""A call of the SDK: where, by line, and what."""
NOT_FAILING = ("release", "__exit__", "_work", "_take", "_nothing")
"""Calls after which a lock would stay locked for ever, if they failed; the frame of all saves,
which a window's grant outlives; and a call that does nothing, which helpers may make in place of
this thread."""
POLICIES = {
    "full": Full(),
    "partial experts": PartialExperts(experts_per_layer=1),
    "window": SparseWindows(window=2),
}


class FailingDaemon(FakeDaemon):
    """Daemon that notes which calls the saver's thread makes between grant and commit, and lets one
    of them fail."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.seen: dict[Call, None] = {}
        self.failing: Call | None = None
        self.failed = False

    def grant(self, request: GrantRequest) -> Grant:
        granted = super().grant(request)
        sys.setprofile(self._on_call)  # of this thread only
        return granted

    def commit(self, request: CommitRequest) -> None:
        sys.setprofile(None)
        super().commit(request)

    def abort(self, request: AbortRequest) -> None:
        sys.setprofile(None)
        super().abort(request)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(SOURCES):
            return
        name = frame.f_code.co_name if event == "call" else argument.__name__
        if name in NOT_FAILING or frame.f_code.co_filename.endswith("testing.py"):
            return
        call = (frame.f_code, frame.f_lineno, name)
        self.seen.setdefault(call)
        if call == self.failing:
            self.failing, self.failed = None, True
            raise MemoryError(f"injected at {frame.f_code.co_name}:{frame.f_lineno}")


def settings_of(policy: str) -> dict[str, Any]:
    return {
        "policy": POLICIES[policy],
        "nan_check_every": 1,
        "start_wait_s": WAIT_S,
        "report_interval_s": 1000.0,  # reports come when time has passed, not in each save
    }


def save(trainer: Any, session: Any, step: int) -> HoldfastError | None:
    """Train a step and save it; return why that failed, once it is over."""
    trainer.train()
    handle = session.save(step)
    assert session._saver._current.ended.wait(WAIT_S), "the save does not end"
    error: HoldfastError | None = handle.error
    return error


def granted_calls(trainer: Any, session: Any, daemon: FailingDaemon) -> list[Call]:
    """Calls between grant and commit of the saves that a session makes later than its first."""
    assert save(trainer, session, 1) is None
    daemon.seen.clear()
    for step in range(2, 6):
        assert save(trainer, session, step) is None
    return list(daemon.seen)


@pytest.mark.parametrize(
    ("policy", "folder"),
    [
        ("full", "_save/"),
        *(pytest.param(policy, "", marks=pytest.mark.slow) for policy in POLICIES),
    ],
)
@pytest.mark.usefixtures("deterministic")
def test_a_failure_of_any_call_between_grant_and_commit_leaves_no_slot_granted(
    policy: str, folder: str, trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    daemon = FailingDaemon(tmp_path)
    session = open_session(trainer, daemon, **settings_of(policy))
    calls, step = granted_calls(trainer, session, daemon), 6
    calls = [call for call in calls if folder in call[0].co_filename]
    assert len(calls) > 20, "the calls of a save are not seen"
    for call in calls:
        daemon.failing, daemon.failed = call, False
        for _ in range(4):
            save(trainer, session, step)
            step += 1
            if daemon.failed:
                break
        assert daemon.failing is None, f"{call} was not made again"
        unfinished = session._saver.pipeline.snapshot
        assert daemon.granted_step is None or unfinished is not None, (
            f"{call} leaves a slot granted"
        )
    before = len(daemon.manifests)
    for _ in range(4):
        save(trainer, session, step)
        step += 1
    assert len(daemon.manifests) > before


@pytest.mark.parametrize(
    "failure",
    [UnreachableError("gone"), ProtocolError("failed"), StorageError("full"), MemoryError("none")],
    ids=repr,
)
@pytest.mark.parametrize("method", ["grant", "commit", "abort"])
def test_saves_go_on_when_grants_commits_and_aborts_fail(
    method: str, failure: Any, trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    assert save(trainer, session, 1) is None
    for step in range(2, 8):
        daemon.fail(method, failure)
        if method == "abort":
            daemon.fail("commit", StorageError("full"))
        save(trainer, session, step)
    assert save(trainer, session, 9) is None
    assert daemon.granted_step is None


def test_a_session_whose_answer_was_lost_is_closed_so_that_its_rank_is_not_taken_for_lost(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    assert save(trainer, session, 1) is None
    daemon.fail("grant", UnreachableError("DEADLINE_EXCEEDED"))
    assert save(trainer, session, 2) is not None
    assert save(trainer, session, 3) is None
    assert daemon.calls.count("close_session") == 1
    assert daemon.calls.count("open") == 2


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


NO_NAN = ("float4_e2m1fn_x2",)
"""Floats that cannot be a NaN."""


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_a_nan_of_any_dtype_is_found_and_no_dtype_fails(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for byte in (0x00, 0x80, 0xFF):
        payload = bytearray([byte]) * 4096
        entry = Entry(
            unit="embed",
            tensor="w",
            role=TensorRole.COMPUTE,
            dtype=name,
            shape=(64 // dtype.itemsize,),
            start=0,
            nbytes=64,
            offset=0,
        )
        layout = Layout(
            rank=0,
            world_size=1,
            topology="dp1",
            entries=(entry,),
            extras_offset=64,
            extras_capacity=16,
            piece_bytes=16,
        )
        placed = Placed(arena=memoryview(payload), address=0, layout=layout, slot=0)
        is_float = (dtype.is_floating_point or dtype.is_complex) and name not in NO_NAN
        nan = 0x80 if name.endswith("fnuz") else 0xFF
        assert units_with_nan(placed) == (("embed",) if is_float and byte == nan else ())
