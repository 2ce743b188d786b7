"""Rendezvous backend `holdfast`, which gets the membership from the node's daemon.

Membership comes from the control loop by way of the daemon, so agents do not vote: an agent asks
for the world of the next epoch, one of them serves the store, all start their workers. While
workers run, a thread keeps asking whether a newer epoch has begun. If so it kills them at once,
because a worker in a hung collective, or a stopped one, does not react to SIGTERM and would hold
all others up.

This module must not decide anything: neither when an epoch begins nor when a job is over.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    DistError,
    PrefixStore,
    TCPStore,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from holdfast._daemon.token import Token
from holdfast_core.errors import HoldfastError, ProtocolError, UnreachableError
from holdfast_protos import channels, codec, trainer_pb2, trainer_pb2_grpc

log = logging.getLogger(__name__)

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

BACKEND = "holdfast"
ASK_S = 20.0
"""Time for which the daemon may hold one call; a lost call is noticed only after it."""
REPLY_S = 5.0
"""Time that a reply may take beyond the time for which the call is held."""
RETRY_S = 0.2
"""Pause before a daemon that does not answer is asked again."""
CONNECT_S = 10.0
"""Time to try to reach the store of an epoch before asking whether the epoch still stands."""
STORE_S = 600.0
"""Time that a worker or agent may wait for a key in the store."""
DAEMON_ABSENT_S = 300.0
"""Time that a daemon may be away before an agent gives up. A daemon restarts in a second, and a
node whose daemon does not come back is lost anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Training world, as the daemon describes it; see `World` in trainer.proto."""

    ready: bool = False
    epoch: int = 0
    node_rank: int = 0
    nodes: int = 0
    store_address: str = ""
    serves_store: bool = False
    node_host: str = ""
    finished: bool = False


class Daemon(Protocol):
    """Calls from an agent to its node's daemon. Methods raise only HoldfastError."""

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> World:
        """Ask for the world of an epoch newer than `after_epoch`; the daemon holds the call for up
        to `wait_s`."""

    def publish_store(self, epoch: int, store_address: str) -> None:
        """Publish the address of the store of `epoch` to the other agents."""

    def worker_exited(self, epoch: int, rank: int, exit_code: int, last_lines: str) -> None:
        """Report to the control loop that a worker failed; 128 + n stands for signal n."""

    def close(self) -> None:
        """End the connection and all calls that wait on it."""


class GrpcDaemon:
    """Client of the daemon at the Unix socket `socket`; calls carry the token in `token_file`."""

    def __init__(self, socket: Path, job: str, token_file: Path | None = None) -> None:
        self._socket, self._job = socket, job
        self._token = Token(token_file)
        options = channels.channel_options(reconnect_ms_max=500)
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        self._stub = trainer_pb2_grpc.TrainerStub(self._channel)

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> World:
        request = trainer_pb2.JoinWorldRequest(
            protocol_version=codec.PROTOCOL_VERSION,
            job=self._job,
            after_epoch=after_epoch,
            wait_s=wait_s,
            peek=peek,
        )
        reply = self._ask(self._stub.JoinWorld, request, wait_s + REPLY_S)
        return World(
            ready=reply.ready,
            epoch=reply.epoch,
            node_rank=reply.node_rank,
            nodes=reply.nodes,
            store_address=reply.store_address,
            serves_store=reply.serves_store,
            node_host=reply.node_host,
            finished=reply.finished,
        )

    def publish_store(self, epoch: int, store_address: str) -> None:
        request = trainer_pb2.PublishStoreRequest(
            job=self._job, epoch=epoch, store_address=store_address
        )
        self._ask(self._stub.PublishStore, request)

    def worker_exited(self, epoch: int, rank: int, exit_code: int, last_lines: str) -> None:
        request = trainer_pb2.WorkerExitedRequest(
            job=self._job, epoch=epoch, rank=rank, exit_code=exit_code, last_lines=last_lines
        )
        self._ask(self._stub.WorkerExited, request)

    def close(self) -> None:
        self._channel.close()

    def _ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout_s: float = REPLY_S,
    ) -> _Reply:
        try:
            return method(request, timeout=timeout_s, metadata=self._token.metadata())
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
            if isinstance(error, grpc.Call):
                ours = codec.error_from_metadata(error.trailing_metadata(), error.details() or "")
                if ours is not None:
                    raise ours from error
            raise UnreachableError(
                f"the daemon at {self._socket} does not answer: {error}"
            ) from error


class HoldfastRendezvous(RendezvousHandler):
    """Rendezvous that forms the worlds of one job on one node, epoch after epoch.

    Args:
        daemon: the node's daemon.
        job: key of the job; torchrun's run id.
        host: address at which the job's other nodes reach this process; the daemon's when empty. A
            pod has its own.

    Attributes:
        kill: kills this agent's workers at once, whatever state they are in. Replace it before the
            first rendezvous where the agent has other children than workers.
    """

    def __init__(self, daemon: Daemon, job: str, host: str = "") -> None:
        self.kill: Callable[[], None] = kill_children
        self._daemon, self._job, self._host = daemon, job, host
        self._epoch = 0
        self._serves_store = False
        self._store: TCPStore | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._finished = False

    @property
    def epoch(self) -> int:
        """Epoch of the last world; 0 before the first."""
        return self._epoch

    @property
    def serves_store(self) -> bool:
        """Whether this agent serves the store of the last world."""
        return self._serves_store

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the last world's epoch; return whether it has ended."""
        return self._ended.wait(timeout_s)

    def worker_exited(self, rank: int, exit_code: int, last_lines: str) -> None:
        """Report to the control loop a worker that failed in the present epoch, with its last
        lines. Failure rules use the exit code, people read the lines; a recovery needs neither, so
        a daemon that is away is only logged."""
        if self._ended.is_set():
            return  # it was killed because the epoch has ended
        code = 128 - exit_code if exit_code < 0 else exit_code
        try:
            self._daemon.worker_exited(self._epoch, rank, code, last_lines)
        except HoldfastError as error:
            log.warning(
                "rank %d exited with code %d, which was not reported: %s", rank, code, error
            )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Always true: workers use the published store, so the daemon recognises their world."""
        return True

    def get_run_id(self) -> str:
        return self._job

    def is_closed(self) -> bool:
        return self._finished

    def set_closed(self) -> None:
        """Do nothing: the control loop decides when a job is over."""

    def num_nodes_waiting(self) -> int:
        """Return 1 when the epoch has ended, so that torchrun restarts its workers, which are
        killed; 0 otherwise."""
        if not self._ended.is_set():
            return 0
        self.kill()
        return 1

    def shutdown(self) -> bool:
        self._closed.set()
        self._daemon.close()
        self._store = None
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node belongs to the world of an epoch newer than the last one.

        Raises:
            RendezvousClosedError: when the job has ended.
            RendezvousConnectionError: when the daemon stays away, has another protocol version, or
                denies this job to this process; the cause is in `__cause__`.
        """
        after_epoch, self._store = self._epoch, None
        while True:
            world = self._ask(after_epoch)
            if not world.ready or world.epoch <= after_epoch:
                continue
            try:
                address = self._enter_store(world)
            except (DistError, HoldfastError) as error:
                log.warning("epoch %d: no store: %s; asking again", world.epoch, error)
                self._closed.wait(RETRY_S)
                continue
            with self._lock:
                self._epoch, self._serves_store = world.epoch, world.serves_store
                self._ended.clear()
            name = f"holdfast-epoch-{world.epoch}"
            threading.Thread(
                target=self._watch, args=(world.epoch,), name=name, daemon=True
            ).start()
            log.info("epoch %d: node %d of %d", world.epoch, world.node_rank, world.nodes)
            assert self._store is not None
            host, _, port = address.rpartition(":")
            return RendezvousInfo(
                PrefixStore(f"epoch-{world.epoch}", self._store),
                world.node_rank,
                world.nodes,
                RendezvousStoreInfo(host, int(port)),
            )

    def _ask(self, after_epoch: int) -> World:
        """Ask the daemon until it answers; return its answer."""
        until = time.monotonic() + DAEMON_ABSENT_S
        while True:
            try:
                world = self._daemon.join_world(after_epoch, ASK_S, peek=False)
            except UnreachableError as error:
                if time.monotonic() > until or self._closed.wait(RETRY_S):
                    raise RendezvousConnectionError(str(error)) from error
            except HoldfastError as error:
                raise RendezvousConnectionError(f"{type(error).__name__}: {error}") from error
            else:
                if world.finished:
                    self._finished = True
                    raise RendezvousClosedError(f"job {self._job} has ended")
                return world

    def _enter_store(self, world: World) -> str:
        """Open the world's store, and serve it if this node has to; return its address."""
        if not world.serves_store:
            host, _, port = world.store_address.rpartition(":")
            self._store = TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S)
            )
            self._store.set_timeout(timedelta(seconds=STORE_S))
            return world.store_address
        host = self._host or world.node_host
        self._store = TCPStore(
            host,
            0,
            is_master=True,
            timeout=timedelta(seconds=STORE_S),
            wait_for_workers=False,
        )
        address = f"{host}:{self._store.port}"
        self._daemon.publish_store(world.epoch, address)
        return address

    def _watch(self, epoch: int) -> None:
        """Wait for the end of `epoch`, then stop the workers that belong to it."""
        while self._epoch == epoch and not self._closed.is_set():
            try:
                world = self._daemon.join_world(epoch, ASK_S, peek=True)
            except ProtocolError as error:
                log.error("epoch %d is no longer watched: %s", epoch, error)
                return
            except HoldfastError:
                self._closed.wait(RETRY_S)
                continue
            if world.epoch <= epoch and not world.finished:
                continue
            with self._lock:
                if self._epoch == epoch:
                    log.info("epoch %d has ended; stopping its workers", epoch)
                    self._finished = world.finished
                    self._ended.set()
                    self.kill()
            return


def kill_children() -> None:
    """Send SIGKILL to every child of this process: under plain torchrun they are the workers."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (thread / "children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
