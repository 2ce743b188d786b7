"""A training script as the fork server's child runs it.

The fork server has imported torch once; each worker is a fork of it, so a restart costs no import.
What the script sees must be what a fresh interpreter would show it: its arguments, its folder on
the path, `__name__ == "__main__"`, its exit code. Nothing here may import torch, or start a thread
before the fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from multiprocessing import connection
from pathlib import Path

MODULE = "-m"


def run_script(*command: str) -> None:
    """Runs `script.py args…`, or `-m module args…`, in this process as `__main__`.

    Raises:
        SystemExit: when the script exits with a code other than 0.
    """
    _die_with_parent()
    try:
        if command[0] == MODULE:
            sys.argv = list(command[1:])
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _die_with_parent() -> None:
    """Ends this process when the agent dies: its other relatives, the fork server and its siblings,
    keep each other alive."""
    agent = multiprocessing.parent_process()
    if agent is None:
        return

    def wait() -> None:
        connection.wait([agent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="holdfast-agent-watch", daemon=True).start()
