"""The fork server of a launcher, which is a fork of the launcher itself.

The standard library starts a fork server as a new interpreter, which must import torch again. That
is more than half of the time that a launcher takes to start. Here the launcher, which imports torch
anyway, imports everything that workers need, and then forks. The two processes share this memory.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

STDIO_MAX = 2


def start_fork_server(modules: Sequence[str]) -> None:
    """Import those of `modules` that exist, and start this process's fork server as a fork of it.

    Workers inherit everything that this process has set up by then. So call it before logging is
    configured, and before any thread starts.
    """
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    # For a server that is started by other means; this one has imported the modules.
    multiprocessing.set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # Otherwise it would be started by a fork as well.
    spawn = util.spawnv_passfds

    def fork_instead(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        util.spawnv_passfds = spawn  # Restored before the fork, for the workers as well.
        return _fork(args[-1], passfds)

    util.spawnv_passfds = fork_instead
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(program: str, kept: Collection[int]) -> int:
    """Run `program` in a fork of this process, with only the standard streams and the descriptors
    `kept` open; return the pid of the fork."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _close_all_but(kept)
        exec(program, {})
        code = 0
    except SystemExit:
        code = 0  # No process is left that could ask for another fork.
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _close_all_but(kept: Collection[int]) -> None:
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        if number > STDIO_MAX and number not in kept:
            with suppress(OSError):  # The descriptor that listed them is already closed.
                os.close(number)
