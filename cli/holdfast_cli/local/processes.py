"""Starts, recognises, watches and kills the processes of a local run.

A process is identified by its pid *and* its start time, so that a process that reuses a pid is
never killed. Every process carries a mark in its environment, which its children inherit: so all
processes of a virtual node can be found, whichever process started them. Linux only (pidfd, /proc).
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import StorageError

MARK = "HOLDFAST_LOCAL"
"""Environment variable of every process of a local run: `<run directory>:<node>:<what>`."""

KILLED = -int(signal.SIGKILL)
"""Exit code assumed for a process whose real one is unknown."""

TRACKER_S = 2.0
"""Seconds that a resource tracker gets to clean up, once the processes that it serves are gone."""
_TRACKER = b"from multiprocessing.resource_tracker import main"
"""Part of the command line by which Python starts a resource tracker."""

PROC = Path("/proc")
_STARTTIME_FIELD = 19
"""Index of the start time in /proc/<pid>/stat, counted from the state, the first after the name."""
_FLAGS_FIELD, _PROGRAM_FIELDS = 6, slice(23, 26)
"""Indices of the process's flags, and of the addresses of its code and its stack, which are not "0"
once its program is loaded."""
_KERNEL_THREAD = 0x0020_0000
"""Flag of a process that never has a program."""
_STARTING_S = 5.0
"""Seconds to wait for a process that is being started, to learn its mark."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identity of one process. A later process with the same pid has another identity."""

    pid: int
    started: int
    """Start time in clock ticks after boot."""


def identify(pid: int) -> ProcessId | None:
    """The living process that has `pid` now; None if there is none, or only a zombie."""
    with suppress(OSError, IndexError, ValueError):
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        if fields[0] not in ("Z", "X"):
            return ProcessId(pid, int(fields[_STARTTIME_FIELD]))
    return None


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; returns False if it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):  # after opening: the descriptor stays with its process
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def spawn(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ProcessId:
    """Start a process in its own session, with its output appended to `log`.

    Raises:
        StorageError: when it cannot be started or the log cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        pid = os.posix_spawnp(
            arguments[0],
            list(arguments),
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
        )
    except OSError as error:
        raise StorageError(f"cannot start {arguments[0]} (log: {log}): {error.strerror}") from error
    return identify(pid) or ProcessId(pid, -1)


def marked_processes(mark: str) -> list[ProcessId]:
    """All living processes whose mark is `mark` or continues it after a colon."""
    wanted = f"{MARK}={mark}".encode()
    processes = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            variables = _environment(entry).split(b"\0")
            if any(v == wanted or v.startswith(wanted + b":") for v in variables):
                process = identify(int(entry.name))
                if process is not None:
                    processes.append(process)
    return processes


def _environment(process: Path) -> bytes:
    """Variables of the process with this folder in /proc. While its program is being loaded it
    shows none, although the process that started it may know it already."""
    until, before = time.monotonic() + _STARTING_S, [""]
    while not (variables := (process / "environ").read_bytes()) and time.monotonic() < until:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        if fields[0] in ("Z", "X") or int(fields[_FLAGS_FIELD]) & _KERNEL_THREAD:
            break
        program = fields[_PROGRAM_FIELDS]
        if program[0] != "0" and program == before:
            break  # it really has none
        before = program
    return variables


def kill_marked(mark: str) -> int:
    """SIGKILL all processes with the mark until none is left; returns how many there were.

    A process may start another one between being found and being killed, hence the second search.
    Python's resource trackers come last, and get `TRACKER_S` to end by themselves: once the other
    processes are gone, they remove the named semaphores that those have left in shared memory.
    """
    killed: set[ProcessId] = set()
    while living := [process for process in marked_processes(mark) if process.pid != os.getpid()]:
        killed.update(living)
        if all(map(_is_tracker, living)):
            _wait_all(living, TRACKER_S)
        else:
            living = [process for process in living if not _is_tracker(process)]
        for process in living:
            send(process, signal.SIGKILL)
        _wait_all(living)
    return len(killed)


def _is_tracker(process: ProcessId) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return False


def _wait_all(processes: Sequence[ProcessId], patience_s: float = 5.0) -> None:
    for process in processes:
        with suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                if is_alive(process):
                    _poll(descriptor, patience_s)
            finally:
                os.close(descriptor)


def _poll(descriptor: int, patience_s: float) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(patience_s * 1000)


async def wait_exit(process: ProcessId) -> int | None:
    """Wait until the process has ended. If this process started it, reap it and return its exit
    code (negative for a signal); for an adopted process return None."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        if identify(process.pid) not in (process, None):
            return None
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
        return _reap(descriptor)
    finally:
        os.close(descriptor)


def _reap(descriptor: int) -> int | None:
    with suppress(ChildProcessError):
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        if result is not None:
            exited = result.si_code == os.CLD_EXITED
            return result.si_status if exited else -result.si_status
    return None
