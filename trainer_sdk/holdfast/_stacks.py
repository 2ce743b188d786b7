"""Stacks on request: a process lets its launcher see where it is, whatever it is doing.

When a job hangs, people need to know where its processes are. A process that hangs cannot answer a
question, but it can be interrupted: `faulthandler` writes the stack from within the handler of a
signal, even if the process is blocked in C, and needs neither the interpreter's lock nor any right.
The launcher creates a directory, and each process writes into a file of its own there.

The signal is a real-time one that nothing else uses. If a script handles it already, its handler
stays, and the process has no stack to show. The launcher sends the signal only while the process
catches it and has its file open (`_launch.inspecting`), because it would end any other process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path

from holdfast._activity import ACTIVITY
from holdfast._flight_recorder import offer_collectives

STACK_SIGNAL = signal.SIGRTMAX - 7


class _Offer:
    """The process that has offered its stack, if it is this one."""

    pid = 0


def offer_stack(directory: Path | None) -> None:
    """Let the launcher that has created `directory` ask for the stack of this process's main
    thread, and for its collectives (`_flight_recorder`), and keep notes of its session for it
    (`_activity`). Call it on the main thread. Does nothing without a directory, or a second time;
    offers no stack where the signal is taken. Never raises."""
    if directory is None or _Offer.pid == os.getpid():
        return
    _Offer.pid = os.getpid()
    with suppress(OSError):
        ACTIVITY.keep()
    with suppress(OSError, RuntimeError):
        offer_collectives(directory)
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return
    with suppress(OSError, ValueError, RuntimeError):
        file = (directory / str(os.getpid())).open("wb", buffering=0)
        file.write(f"{file.fileno()}\n".encode())
        # Other threads run on meanwhile, and their stacks could not be read safely.
        faulthandler.register(STACK_SIGNAL, file, all_threads=False)
