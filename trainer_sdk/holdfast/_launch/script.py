"""Runner of a training script in a child of the fork server.

The fork server has imported torch once, and each worker is a fork of it, so restarts need no
import. The script must find the same environment as in a new interpreter: its arguments, its folder
on the path, `__name__ == "__main__"`, and its exit code. Nothing here may start a thread
before the fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from types import TracebackType

from holdfast._checking.recording import WATCH
from holdfast._daemon.unsaved import OF_PROCESS
from holdfast._environment import (
    read_check_directory,
    read_environment,
    read_local_rank,
    read_stack_directory,
)
from holdfast._exits import exit_code_of
from holdfast._stacks import offer_stack
from holdfast_core.errors import InvalidJobError

MODULE = "-m"
STDERR = 2
FAILED = 1
"""Exit code after an uncaught exception, as for any Python program. Exceptions of Holdfast about
the world of this process have codes of their own; see `exit_code_of`."""


def run_script(stderr_paths: tuple[str, ...], *command: str) -> None:
    """Run `script.py args…`, or `-m module args…`, in this process as `__main__`.

    Args:
        stderr_paths: file for the stderr of each worker of the node; empty to leave stderr as it
            is.

    Raises:
        SystemExit: the script exited with a code other than 0, or raised an exception, which is
            printed as by any Python program.
    """
    _die_with_parent()
    offer_stack(read_stack_directory())
    # With the launcher's start method, each worker of a data loader would run the script again.
    multiprocessing.set_start_method(None, force=True)
    if stderr_paths:
        with Path(stderr_paths[read_local_rank()]).open("wb", buffering=0) as stderr:
            os.dup2(stderr.fileno(), STDERR)
    with suppress(InvalidJobError):  # `holdfast.init` raises it, if the script calls that.
        environment = read_environment()
        OF_PROCESS.watch(environment)
        if (directory := read_check_directory()) is not None:
            WATCH.begin(directory, environment.rank)
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
    except Exception as error:
        # Print it here: torchrun would pass it to the agent, and mix it with the agent's messages.
        shown = error.with_traceback(_of_script(error.__traceback__))
        code = exit_code_of(shown) or FAILED
        if WATCH.recorder is not None:
            WATCH.recorder.on_error(shown)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        raise SystemExit(code) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def do_nothing() -> None:
    """Body of a process that proves that the fork server answers."""


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Strip the frames with which this module started the script."""
    ours = (__file__, runpy.__file__, f"<frozen {runpy.__name__}>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _die_with_parent() -> None:
    """Kill this process when the agent dies. Otherwise the fork server and its children would keep
    each other alive."""
    agent = multiprocessing.parent_process()
    if agent is None:
        return

    def wait() -> None:
        connection.wait([agent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="holdfast-agent-watch", daemon=True).start()
