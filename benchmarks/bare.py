"""The floor of everything that moves between nodes: `sendfile` from tmpfs, `recv_into` a mapping.

Nodes are processes with a loopback address each. The streams of one round run in parallel, each
over a connection that stays open, with a thread at either end; nothing is verified, combined or
answered. The destination's pages are present before the first round.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.floors import SHARED_MEMORY, SharedBuffer

_REQUEST = struct.Struct("<QQ")
WITHIN_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Bytes that one node pulls from another in a round, over `streams` connections."""

    source: int
    destination: int
    nbytes: int
    streams: int = 1


class BarePath:
    """`nodes` processes that push the bytes of `flows` on each call."""

    def __init__(self, nodes: int, flows: Sequence[Flow], file_bytes: int) -> None:
        """`file_bytes` is the size of the tmpfs file that each node sends from."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes = []
        for node in range(nodes):
            ours, theirs = context.Pipe()
            own = [flow for flow in flows if flow.destination == node]
            process = context.Process(target=_node, args=(theirs, own, file_bytes), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        ports = [self._receive(pipe) for pipe in self._pipes]
        self._tell(ports)

    def __call__(self) -> float:
        """Seconds from the command to begin until the last node has all its bytes."""
        begin = time.perf_counter()
        self._tell("go")
        return time.perf_counter() - begin

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tell(self, word: object) -> None:
        """Send `word` to all nodes and wait until all have answered."""
        for pipe in self._pipes:
            pipe.send(word)
        for pipe in self._pipes:
            self._receive(pipe)

    @staticmethod
    def _receive(pipe: multiprocessing.connection.Connection) -> object:
        if not pipe.poll(WITHIN_S):
            raise TimeoutError(f"a node of the bare path did not answer in {WITHIN_S} s")
        return pipe.recv()


def _node(
    pipe: multiprocessing.connection.Connection, flows: Sequence[Flow], file_bytes: int
) -> None:
    path = SHARED_MEMORY / f"holdfast-bench-bare-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    os.posix_fallocate(descriptor, 0, file_bytes)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    threading.Thread(target=_serve, args=(listener, descriptor), daemon=True).start()
    pipe.send(listener.getsockname()[1])
    ports = pipe.recv()
    pulls = [
        (socket.create_connection(("127.0.0.1", ports[flow.source])), offset, view)
        for flow in flows
        for offset, view in _parts(flow)
    ]
    pipe.send("ready")
    try:
        while pipe.recv():
            threads = [threading.Thread(target=_pull, args=pull) for pull in pulls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pipe.send("done")
    except EOFError:
        return


def _parts(flow: Flow) -> list[tuple[int, memoryview]]:
    """(offset in the source, destination) of each stream of `flow`."""
    view = memoryview(SharedBuffer(flow.nbytes).mapping)
    bounds = [flow.nbytes * i // flow.streams for i in range(flow.streams + 1)]
    return [(a, view[a:b]) for a, b in itertools.pairwise(bounds)]


def _pull(connection: socket.socket, offset: int, view: memoryview) -> None:
    connection.sendall(_REQUEST.pack(offset, len(view)))
    while len(view):
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the sender went away")
        view = view[count:]


def _serve(listener: socket.socket, descriptor: int) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send, args=(connection, descriptor), daemon=True).start()


def _send(connection: socket.socket, descriptor: int) -> None:
    head = bytearray(_REQUEST.size)
    while connection.recv_into(head, 0, socket.MSG_WAITALL) == len(head):
        offset, left = _REQUEST.unpack(head)
        while left:
            sent = os.sendfile(connection.fileno(), descriptor, offset, left)
            offset, left = offset + sent, left - sent
