"""Worlds that a test begins, for processes that stay."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch

from holdfast._elastic.world import World
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc


@contextmanager
def lone_world() -> Iterator[World]:
    """A world of one process, which stays for any number of ranks."""
    world = World(
        "gloo",
        None,
        any_size=True,
        store_address="",
        local_rank=0,
        nproc=1,
        timeout_s=30.0,
        reform_s=30.0,
    )
    world.join()
    try:
        yield world
    finally:
        world.close()


class Members(trainer_pb2_grpc.TrainerServicer):
    """Daemons of all members at one socket: a rank of `FollowRequest` is a member here.

    Args:
        worlds: for each epoch the members of one rank each, in the order of their ranks.
    """

    def __init__(self, socket: Path, worlds: Mapping[int, Sequence[int]]) -> None:
        self.worlds = worlds
        self._changed = threading.Condition()
        self._epoch = 0
        self._stores: list[TCPStore] = []
        self.greeted: dict[int, list[int]] = {}
        """Epoch → world ranks that have arrived."""
        self.absent = 0
        """Number of arrivals that get no answer, as while a daemon is being replaced."""
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def begin(self) -> TCPStore:
        """Begin the next epoch; return its store."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with self._changed:
            self._stores.append(store)
            self._epoch += 1
            self._changed.notify_all()
        return store

    @contextmanager
    def begin_all(self, clock: TCPStore) -> Iterator[None]:
        """Begin one world after the other, each once all ranks of the one before have added to
        `done-<epoch>` in `clock`; `began-<epoch>` says so there. The last one is no world."""
        stores, over = [], threading.Event()

        def begin() -> None:
            for epoch, present in self.worlds.items():
                stores.append(self.begin())
                clock.set(f"began-{epoch}", "")
                while clock.add(f"done-{epoch}", 0) < len(present) and not over.wait(0.01):
                    pass
            clock.set(f"began-{max(self.worlds) + 1}", "")

        beginning = threading.Thread(target=begin)
        beginning.start()
        try:
            yield
        finally:
            over.set()
            beginning.join()

    def stop(self) -> None:
        with self._changed:
            self._epoch = -1
            self._changed.notify_all()
        self._server.stop(0).wait()

    def Follow(self, request: trainer_pb2.FollowRequest, context: Any) -> Iterator[Any]:
        sent = 0
        while sent >= 0:
            with self._changed:
                self._changed.wait_for(lambda: self._epoch != sent)  # noqa: B023
                sent = self._epoch
            members = self.worlds.get(sent, ())
            if request.rank in members:
                yield trainer_pb2.World(
                    ready=True,
                    epoch=sent,
                    node_rank=members.index(request.rank),
                    nodes=len(members),
                    store_address=f"127.0.0.1:{self._stores[sent - 1].port}",
                    store_key="5e" * 16,
                    keep=request.size in (0, len(members)),
                )

    def Hello(self, request: trainer_pb2.HelloRequest, context: Any) -> trainer_pb2.HelloReply:
        with self._changed:
            self.absent -= 1
            if self.absent >= 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the daemon is being replaced")
            self.greeted.setdefault(self._epoch, []).append(request.rank)
        return trainer_pb2.HelloReply(protocol_version=codec.PROTOCOL_VERSION)
