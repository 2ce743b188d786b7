"""Who may start a cluster in which slot, and that a SIGTERM ends it like any other exit."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO

from machine import STATE, ClusterError
from network import SLOTS

PERSONS_SLOT = 0
"""The slot of `make cluster`; tests take the others."""


def take(slot: int | None) -> tuple[int, IO[str]]:
    """Take `slot`, or the first free one for tests; it is held until the file is closed.

    Raises:
        ClusterError: when it is taken, or all are.
    """
    wanted = range(PERSONS_SLOT + 1, SLOTS) if slot is None else [slot]
    STATE.mkdir(parents=True, exist_ok=True)
    for number in wanted:
        file = (STATE / f"{number}.lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
        else:
            return number, file
    raise ClusterError(
        f"another process is starting or using the cluster in slot {slot}"
        if slot is not None
        else f"all {len(wanted)} slots for test clusters are in use"
    )


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that what is inside cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
