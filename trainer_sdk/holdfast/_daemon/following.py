"""Following training worlds: which epoch is the newest, and where its ranks meet.

A thread reads the daemon's stream `Follow`. As long as the stream is open, the daemon knows that
this process can stay when its world changes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._daemon.calls import JobCalls
from holdfast_core.errors import (
    AccessDeniedError,
    HoldfastError,
    ProtocolError,
    RankInUseError,
)
from holdfast_protos import codec, trainer_pb2

_log = logging.getLogger("holdfast")
_RETRY_S = 0.2
_HELLO_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The world of one epoch, and the store at which its ranks meet."""

    epoch: int
    node_rank: int
    nodes: int
    store_address: str
    """`host:port`; empty until it is published."""
    store_key: str = field(default="", repr=False)
    """Key with which ranks recognise each other's values in the store; see `SealedStore`."""
    keep: bool
    """Whether this worker is kept. If not, a new worker replaces it."""


class WorldFollower:
    """Follows the worlds of this worker, from construction to `close`. Safe from any thread.

    Args:
        socket: the daemon's Unix socket.
        job: the job's key.
        rank: rank with which this worker was started.
        token_file: file with the token that the daemon requires; None if it requires none.
        size: number of ranks that a world must have for this worker to stay; 0 for any number.
    """

    def __init__(
        self, socket: Path, job: str, rank: int, token_file: Path | None, size: int = 0
    ) -> None:
        self._request = trainer_pb2.FollowRequest(
            protocol_version=codec.PROTOCOL_VERSION,
            job=job,
            rank=rank,
            pid=os.getpid(),
            size=size,
        )
        self._calls = JobCalls(socket, token_file)
        self._changed = threading.Condition()
        self._newest: Meeting | None = None
        self._problem: HoldfastError | None = None
        self._closed = False
        threading.Thread(target=self._follow, name="holdfast-follow", daemon=True).start()

    @property
    def epoch(self) -> int:
        """Newest epoch that the daemon has announced; 0 before the first."""
        newest = self._newest
        return 0 if newest is None else newest.epoch

    def wait_newer(self, epoch: int, timeout_s: float) -> bool:
        """Wait for an epoch newer than `epoch`; return whether one has begun."""
        with self._changed:
            return self._changed.wait_for(lambda: self.epoch > epoch, timeout_s)

    def wait_ready(self, epoch: int, timeout_s: float) -> Meeting | None:
        """Wait until the newest epoch is newer than `epoch`, and its store is published. Return its
        world, or None after `timeout_s`.

        Raises:
            HoldfastError: the daemon refuses this worker permanently.
        """

        def ready() -> bool:
            newest = self._newest
            published = newest is not None and newest.store_address != ""
            return (published and self.epoch > epoch) or self._problem is not None

        with self._changed:
            self._changed.wait_for(ready, timeout_s)
            if self._problem is not None:
                raise self._problem
            return self._newest if ready() else None

    def arrive(
        self,
        rank: int,
        store_address: str,
        *,
        began_alone: bool = False,
        held_beside: bool = False,
    ) -> None:
        """Report that this worker has left its old world and has reached the store of the new one,
        in which it has `rank`.

        Args:
            began_alone: whether training started there from the beginning, and no other member has
                the state of this one. Until something is protected, the worker then need not stay,
                because a loss would leave nothing to continue from.
            held_beside: whether another rank, perhaps of the same member, has the state of this
                one, so that the worker may stay if only ranks are lost.

        Raises:
            HoldfastError: the daemon does not answer, or the new world has ended.
        """
        request = trainer_pb2.HelloRequest(
            protocol_version=codec.PROTOCOL_VERSION,
            job=self._request.job,
            rank=rank,
            store_address=store_address,
            began_alone=began_alone,
            held_beside=held_beside,
        )
        self._calls.ask(self._calls.stub.Hello, request, _HELLO_S)

    def close(self) -> None:
        """End the stream. From then on, a change of the world ends this process."""
        self._closed = True
        self._calls.close()

    def _follow(self) -> None:
        while not self._closed:
            try:
                for world in self._calls.stream(self._calls.stub.Follow, self._request):
                    self._take(world)
                    if world.finished:
                        return
            except HoldfastError as error:
                if self._is_final(error):
                    return
            time.sleep(_RETRY_S)

    def _take(self, world: trainer_pb2.World) -> None:
        if world.epoch < self.epoch:
            return
        with self._changed:
            self._newest = Meeting(
                epoch=world.epoch,
                node_rank=world.node_rank,
                nodes=world.nodes,
                store_address=world.store_address if world.ready else "",
                store_key=world.store_key if world.ready else "",
                keep=world.keep,
            )
            self._changed.notify_all()

    def _is_final(self, error: HoldfastError) -> bool:
        """Whether it is useless to try again. If so, the calls that wait raise the error."""
        if not isinstance(error, AccessDeniedError | ProtocolError | RankInUseError):
            return self._closed
        _log.warning("this worker cannot follow its worlds: %s", error)
        with self._changed:
            self._problem = error
            self._changed.notify_all()
        return True
