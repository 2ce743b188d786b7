"""Ranks of a job, each a process with torch already imported: the import takes longer than a test.

They fork from a server of their own. A process has only one fork server of `multiprocessing`, and
that one has imported the daemon: daemons that fork from a server with torch instead import
themselves anew, which takes eight times as long as the rest of their start.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint")

_idle: dict[tuple[str, ...], Connection[Any, Any]] = {}
"""Further modules → the connection to the server that has imported them, if there is one and it
answered its last request."""


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], ranks: int, *further: str) -> None:
    """Call `work(rank, *args)` in a process for each of `ranks` ranks.

    Args:
        further: modules that they have imported, too.

    Raises:
        AssertionError: when one fails, with the traceback of the first, or the stacks of all its
            threads if a signal ended it.
    """
    server = _idle.pop(further, None) or _start_server(further)
    server.send((pickle.dumps((work, args)), ranks))
    failure = server.recv()
    _idle[further] = server
    assert failure is None, failure


def _start_server(further: tuple[str, ...]) -> Connection[Any, Any]:
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    spawning.Process(target=_serve, args=(there, further)).start()
    there.close()
    atexit.register(here.close)  # ends the server before the interpreter waits for it
    return here


def _serve(connection: Connection[Any, Any], further: tuple[str, ...]) -> None:
    for module in (*IMPORTED, *further):
        importlib.import_module(module)
    from torch.multiprocessing.spawn import ProcessException, start_processes

    while True:
        try:
            call, ranks = connection.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory(prefix="holdfast-ranks-") as stacks:
            try:
                start_processes(_work, args=(call, stacks), nprocs=ranks, start_method="fork")
                connection.send(None)
            except ProcessException as failed:
                crash = Path(stacks, str(failed.error_index))
                shown = crash.read_text(encoding="utf-8") if crash.exists() else ""
                connection.send(f"{failed}\n{shown}")


def _work(rank: int, call: bytes, stacks: str) -> None:
    with Path(stacks, str(rank)).open("w", encoding="utf-8") as file:
        faulthandler.enable(file)
        work, args = pickle.loads(call)
        work(rank, *args)
