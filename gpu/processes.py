"""Run a command within a time limit and leave nothing of it behind, whatever it does.

A step may hang in the driver, crash, or fork daemons into sessions of their own. What survives a
step keeps device memory and processor time from the next one, so all descendants are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DUMP_S = 5.0
"""Time for Python's fault handler to print the stacks after SIGABRT."""
DEATH_S = 10.0
"""Time for the kernel to end what was killed; a process stuck in a driver is then left alone."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float
    in_time: bool


def adopt_orphans() -> None:
    """Make descendants whose parents die children of this process, where they can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    output: Path,
    limit_s: float,
) -> Ended:
    """Run `command`, append what it prints to `output`, and kill whatever it leaves behind."""
    begin = time.monotonic()
    with output.open("ab") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    in_time = True
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        in_time = False
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DUMP_S)
    finally:
        _kill_descendants()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEATH_S)
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return Ended(code=code, seconds=time.monotonic() - begin, in_time=in_time)


def _kill_descendants() -> None:
    """Kill them until none is left that the kernel can end."""
    deadline = time.monotonic() + DEATH_S
    while (found := _descendants()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
    found: set[int] = set()
    newest = {os.getpid()}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest} - found
        found |= newest
    return found
