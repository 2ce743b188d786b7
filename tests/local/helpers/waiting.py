"""Waiting for events in other processes: conditions with a time limit, never a plain sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from holdfast_core.errors import HoldfastError
from holdfast_protos import codec

WAIT_S = 30.0
"""Far above what anything takes here: other tests may keep all cores busy for seconds."""
POLL_S = 0.02
"""Each look asks a daemon for all it knows: oftener would be work for all of them."""

Value = TypeVar("Value")


def wait_for(what: str, condition: Callable[[], Value], timeout_s: float = WAIT_S) -> Value:
    """The first true value of `condition`; polls, because other processes make it true."""
    until = time.monotonic() + timeout_s
    tick = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"waited {timeout_s} s in vain for {what}")
        tick.wait(POLL_S)


def wait_saved(session: Any, timeout_s: float = WAIT_S) -> None:
    """Wait until a session is done with its newest save, which is later than its tensors may
    change: the save is committed or part of a window, and its tokens are counted."""
    newest = session._saver._current
    assert newest is None or newest.ended.wait(timeout_s), "the save does not end"


def state_of(pid: int) -> str:
    """State of a process as the kernel writes it: "T" where it is stopped, "X" where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def error_of(failed: grpc.RpcError) -> HoldfastError:
    """The `HoldfastError` that a daemon answered with."""
    assert isinstance(failed, grpc.Call)
    error = codec.error_from_metadata(failed.trailing_metadata(), failed.details() or "")
    assert error is not None, f"not an error of ours: {failed.code()} {failed.details()}"
    return error
