"""Ranks of a job, each a process that finds torch imported: that takes longer than what they do.

They fork from a process of their own. The fork server of `multiprocessing`, of which a process has
one, has the daemon imported: daemons that fork from a server with torch instead import themselves
anew, which takes eight times as long as all else that starting one takes.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint")

_idle: list[Connection[Any, Any]] = []
"""The server, if there is one and it answered what it was asked last."""


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Call `work(rank, *args)` in as many processes; raises AssertionError with the traceback of
    the first of them that fails."""
    server = _idle.pop() if _idle else _start_server()
    server.send((pickle.dumps((work, args)), ranks))
    failure = server.recv()
    _idle.append(server)
    assert failure is None, failure


def _start_server() -> Connection[Any, Any]:
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    spawning.Process(target=_serve, args=(there,)).start()
    there.close()
    atexit.register(here.close)  # which ends it, before it is waited for
    return here


def _serve(connection: Connection[Any, Any]) -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    from torch.multiprocessing.spawn import ProcessException, start_processes

    while True:
        try:
            call, ranks = connection.recv()
        except EOFError:
            return
        try:
            start_processes(_work, args=(call,), nprocs=ranks, start_method="fork")
            connection.send(None)
        except ProcessException as failed:
            connection.send(str(failed))


def _work(rank: int, call: bytes) -> None:
    work, args = pickle.loads(call)
    work(rank, *args)
