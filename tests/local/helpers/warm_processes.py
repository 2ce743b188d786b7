"""Daemons and launchers of local runs, forked from a process that has imported what they need.

Starting one is mostly imports, of 1 s and 8 s of processor time, and some tests start dozens. A
fork becomes what the command would be: it has its session, output, folder, arguments, environment
and mark, and ends as it would. What cannot be the same is started as the command: other programs,
and those whose imports would read other variables.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MARK = "HOLDFAST_LOCAL"
"""As in `holdfast_cli.local.processes`, which neither a daemon nor a launcher imports."""
MARK_BYTES = 1024
MODULES = ("holdfast_daemon", "holdfast.launch")
"""Those that are forked, as `python -m` names them."""
READ_ON_IMPORT = ("PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "GRPC_", "LD_")
"""Beginnings of the names of variables that are read during imports."""
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""What every launcher gets."""
REQUEST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A process to fork."""

    module: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    log: str


class WarmProcesses:
    """The process that others are forked from, until `close`."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=os.environ | UNBUFFERED | {MARK: "." * MARK_BYTES},
                pass_fds=(theirs.fileno(),),
            )
        assert self._socket.recv(1), "the imports have failed"

    def close(self) -> None:
        """End the process, which has nothing to lose. That its socket is closed may not reach it:
        whatever a test has forked from this process holds the socket too."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> int | None:
        """Start what `processes.spawn` would; return its pid, or None for what cannot be forked."""
        request = _request(list(arguments), environment, log)
        ours = _read_on_import(os.environ | UNBUFFERED)
        if request is None or _read_on_import({**environment, **UNBUFFERED}) != ours:
            return None
        self._socket.send(json.dumps(asdict(request)).encode())
        return int(self._socket.recv(REQUEST_BYTES))


def _request(command: list[str], environment: Mapping[str, str], log: Path) -> Request | None:
    folder = str(Path.cwd())
    if command[:2] == ["env", "-C"]:
        folder, command = command[2], command[3:]
    if command[:2] != [sys.executable, "-m"] or command[2] not in MODULES:
        return None
    return Request(
        module=command[2],
        arguments=command[3:],
        folder=folder,
        environment=dict(environment),
        log=str(log),
    )


def _read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_ON_IMPORT)}


def _next_fork(asking: socket.socket) -> tuple[Request, int] | None:
    """Fork for each request; return it in the fork, with a pipe to close once it has its mark, and
    None here when nobody can ask any more."""
    while asked := asking.recv(REQUEST_BYTES):
        here, there = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(here)
            return Request(**json.loads(asked)), there
        os.close(there)
        os.read(here, 1)  # until it would be found, and killed, as one that was spawned
        os.close(here)
        asking.send(str(pid).encode())
    return None


def _become(request: Request, unmarked: int) -> None:
    """Be the process of a request, up to running its module."""
    _overwrite_mark(request.environment[MARK])
    os.close(unmarked)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, path, how in ((0, os.devnull, os.O_RDONLY), (1, request.log, flags)):
        opened = os.open(path, how, 0o600)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)
    os.chdir(request.folder)
    sys.path[0] = request.folder
    sys.argv = [request.module, *request.arguments]
    os.environ.clear()
    os.environ.update(request.environment)


def _overwrite_mark(mark: str) -> None:
    """Write `mark` into the block of variables that this process was started with, which is what
    /proc/<pid>/environ shows."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    block = libc.getenv(MARK.encode())
    ctypes.memmove(block, mark.encode().ljust(MARK_BYTES, b"\0"), MARK_BYTES)


def main() -> None:
    """Import everything, say so, and fork."""
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        from holdfast.launch import PRELOAD

        for module in (*PRELOAD, "holdfast_daemon.__main__", "grpc._utilities"):
            with suppress(ImportError):
                importlib.import_module(module)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the tests end this
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
        asking.send(b"1")
        forked = _next_fork(asking)
    if forked is None:
        os._exit(0)  # without what libraries print of their leaks
    request, unmarked = forked
    _become(request, unmarked)
    sys.modules.pop(request.module, None)  # it is run as a program
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
