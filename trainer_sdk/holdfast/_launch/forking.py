"""The fork server of a launcher, which is a fork of the launcher itself.

The standard library starts a fork server as a new interpreter, which must import torch again. That
is more than half of the time that a launcher takes to start. Here the launcher, which imports torch
anyway, imports everything that workers need, and then forks. The two processes share this memory.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from holdfast_core.errors import InvalidJobError

STDIO_MAX = 2
CUDA_NOT_INITIALIZED = 3
"""Result of CUDA's driver before anything in the process has initialised it."""
FORK_SAFE = ("pyarrow",)
"""Modules whose threads may stay: their libraries start them again in a fork that needs them."""


def start_fork_server(modules: Sequence[str], wanted: Sequence[str] = ()) -> None:
    """Import those of `modules` that exist and all that are `wanted`, and start this process's fork
    server as a fork of it.

    Workers inherit everything that this process has set up by then. So call it before logging is
    configured, and before any thread starts.

    Args:
        wanted: names of modules that the user wants workers to find imported.

    Raises:
        InvalidJobError: a wanted module cannot be imported, or no worker may be forked after its
            import, because it has started threads or initialised CUDA. This process cannot start
            workers then.
    """
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    harmless = {str(os.getpid())}
    for module in wanted:
        _import_wanted(module, harmless)
    # Modules stay for good, so no worker has to look through their objects for garbage. That would
    # also copy their memory, because the collector writes into each object that it visits.
    gc.collect()
    gc.freeze()
    # For a server that is started by other means; this one has imported the modules.
    multiprocessing.set_forkserver_preload([*modules, *wanted])
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


def _import_wanted(module: str, harmless: set[str]) -> None:
    """Import a module, and see that this process can still fork workers.

    Args:
        harmless: ids of threads that may stay; those of a module that is `FORK_SAFE` are added.

    Raises:
        InvalidJobError: it cannot be imported, or no worker may be forked afterwards.
    """
    new = [name for name in FORK_SAFE if name not in sys.modules]
    try:
        importlib.import_module(module)
    except Exception as error:  # A module may raise anything when it is imported.
        raise InvalidJobError(
            f"HOLDFAST_PRELOAD names {module}, which cannot be imported before the script runs: "
            f"{type(error).__name__}: {error}; name modules that are installed, or leave it out"
        ) from error
    if module in FORK_SAFE:
        harmless |= _threads()
    if why := _why_no_forks(harmless):
        first = [name for name in new if name in sys.modules]
        advice = "".join(f"name {name} before it, whose threads may stay, or " for name in first)
        raise InvalidJobError(
            f"HOLDFAST_PRELOAD names {module}, but importing it {why}, which workers that are "
            f"forked afterwards could not use; {advice}leave it out"
        )


def _threads() -> set[str]:
    """Ids of this process's threads."""
    return {each.name for each in Path("/proc/self/task").iterdir()}


def _why_no_forks(harmless: set[str]) -> str:
    """Say what a fork of this process would lack; empty if nothing but `harmless` threads."""
    # Libraries that handle forks themselves, such as OpenBLAS, end their threads before one.
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    if _threads() - harmless:
        names = [each.name for each in threading.enumerate()[1:]]
        return f"starts threads ({', '.join(names)})" if names else "starts threads"
    return "initialises CUDA" if _has_cuda() else ""


def _has_cuda() -> bool:
    """Whether anything in this process has initialised CUDA's driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # It is not even loaded.
        return False
    result: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return result != CUDA_NOT_INITIALIZED


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
