"""Rendezvous backend `holdfast`, which gets the membership from the node's daemon.

Membership comes from the control loop by way of the daemon, so agents do not vote: an agent asks
for the world of the next epoch, one of them serves the store, all start their workers. While
workers run, a thread keeps asking whether a newer epoch has begun. If so, one of two things
happens, and the daemon and the agent say which:

- All workers run, and all follow their worlds (`World.keep`): they are kept. They form their
  groups anew by themselves, with other ranks where the number of nodes has changed; the thread
  enters the store of the new epoch, serves it if it has to, and goes on watching. Workers that do
  not arrive in time are killed, which is an ordinary failure.
- Otherwise the thread kills them at once, because a worker in a hung collective, or a stopped one,
  does not react to SIGTERM and would hold all others up. torchrun then starts new ones.

This module must not decide anything: neither when an epoch begins nor when a job is over, nor
which workers can be kept.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    DistError,
    TCPStore,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from holdfast._daemon.calls import REPLY_S, JobCalls
from holdfast._daemon.sealed_store import NO_KEY, SealedStore, new_store_key
from holdfast._launch.served_store import STORE_BYTES_MAX, serve_store, watch_store
from holdfast_core.errors import HoldfastError, ProtocolError, UnreachableError
from holdfast_core.job.failures import REFORM_S
from holdfast_core.states import EndReason
from holdfast_protos import codec, trainer_pb2

log = logging.getLogger(__name__)

BACKEND = "holdfast"
ASK_S = 20.0
"""Time for which the daemon may hold one call; a lost call is noticed only after it."""
RETRY_S = 0.2
"""Pause before a daemon that does not answer is asked again."""
CONNECT_S = 10.0
"""Time to try to reach the store of an epoch before asking whether the epoch still stands."""
KEEP_ASK_S = 1.0
"""Time for which the daemon may hold a call while workers are kept: they may die meanwhile, or a
newer epoch may have them restarted."""
STORE_S = 600.0
"""Time that a worker or agent may wait for a key in the store."""
DAEMON_ABSENT_S = 300.0
"""Time that a daemon may be away before an agent gives up. A daemon restarts in a second, and a
node whose daemon does not come back is lost anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedWorld:
    """Training world, as the daemon describes it; see `World` in trainer.proto."""

    ready: bool = False
    epoch: int = 0
    node_rank: int = 0
    nodes: int = 0
    store_address: str = ""
    store_key: str = field(default="", repr=False)
    serves_store: bool = False
    node_host: str = ""
    finished: bool = False
    keep: bool = False
    arrived: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedWorld:
    """Training world that this node has joined, and its open store."""

    epoch: int = 0
    node_rank: int = 0
    nodes: int = 0
    address: str = ""
    key: str = field(default="", repr=False)
    serves_store: bool = False
    store: TCPStore | None = None
    """None before the first world, after the last, and once its store was closed."""


class Daemon(Protocol):
    """Calls from an agent to its node's daemon. Methods raise only HoldfastError."""

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> AnnouncedWorld:
        """Ask for the world of an epoch newer than `after_epoch`; the daemon holds the call for up
        to `wait_s`."""

    def publish_store(self, epoch: int, store_address: str, store_key: str) -> None:
        """Publish the address of the store of `epoch` to the other agents, and its key to the
        job's ranks."""

    def report_worker_exit(
        self, epoch: int, rank: int, exit_code: int, last_lines: str, reason: EndReason
    ) -> None:
        """Report to the control loop that a worker failed; 128 + n stands for signal n."""

    def report_work(self, epoch: int, ranks: Collection[int]) -> None:
        """Report to the control loop that workers have worked of late."""

    def close(self) -> None:
        """End the connection and all calls that wait on it."""


class GrpcDaemon:
    """Client of the daemon at the Unix socket `socket`; calls carry the token in `token_file`."""

    def __init__(self, socket: Path, job: str, token_file: Path | None = None) -> None:
        self._calls, self._job = JobCalls(socket, token_file), job

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> AnnouncedWorld:
        request = trainer_pb2.JoinWorldRequest(
            protocol_version=codec.PROTOCOL_VERSION,
            job=self._job,
            after_epoch=after_epoch,
            wait_s=wait_s,
            peek=peek,
        )
        reply = self._calls.ask(self._calls.stub.JoinWorld, request, wait_s + REPLY_S)
        return AnnouncedWorld(
            ready=reply.ready,
            epoch=reply.epoch,
            node_rank=reply.node_rank,
            nodes=reply.nodes,
            store_address=reply.store_address,
            store_key=reply.store_key,
            serves_store=reply.serves_store,
            node_host=reply.node_host,
            finished=reply.finished,
            keep=reply.keep,
            arrived=reply.arrived,
        )

    def publish_store(self, epoch: int, store_address: str, store_key: str) -> None:
        request = trainer_pb2.PublishStoreRequest(
            job=self._job, epoch=epoch, store_address=store_address, store_key=store_key
        )
        self._calls.ask(self._calls.stub.PublishStore, request)

    def report_worker_exit(
        self, epoch: int, rank: int, exit_code: int, last_lines: str, reason: EndReason
    ) -> None:
        request = trainer_pb2.WorkerExitedRequest(
            job=self._job,
            epoch=epoch,
            rank=rank,
            exit_code=exit_code,
            last_lines=last_lines,
            reason=reason,
        )
        self._calls.ask(self._calls.stub.WorkerExited, request)

    def report_work(self, epoch: int, ranks: Collection[int]) -> None:
        request = trainer_pb2.WorkedRequest(job=self._job, epoch=epoch, ranks=ranks)
        self._calls.ask(self._calls.stub.Worked, request)

    def close(self) -> None:
        self._calls.close()


class HoldfastRendezvous(RendezvousHandler):
    """Rendezvous that forms the worlds of one job on one node, epoch after epoch.

    Two threads can move this node to a newer epoch: torchrun's, in `next_rendezvous`, and the one
    that watches the epoch, which keeps the workers. The invariant is: **only the owner replaces the
    joined world, ends it, or kills its workers, and it does so while it holds the lock.**
    `next_rendezvous` makes itself the owner at its start, and the thread that it starts at its end
    inherits that. So whatever the watching thread was about to do when a worker died has no effect
    any more. Stores are entered one at a time, by the owner, so no epoch gets two stores from one
    node: one that the watching thread published just before it lost its ownership is taken over.

    Args:
        daemon: the node's daemon.
        job: key of the job; torchrun's run id.
        host: address at which the job's other nodes reach this process; the daemon's when empty. A
            pod has its own.
        reform_s: time that workers that are kept have to arrive in a new epoch.

    Attributes:
        list_workers: returns the process id of each worker that runs, by its local rank. Empty,
            unless replaced.
        kill: kills this agent's workers at once, whatever state they are in. Replace it before the
            first rendezvous where the agent has other children than workers.
        can_keep: returns whether all workers run, so that they can be kept. Both are called from
            any thread. Never, unless replaced: torchrun's own agent waits for its exit barrier in
            the store that it began with.
    """

    def __init__(
        self, daemon: Daemon, job: str, host: str = "", reform_s: float = REFORM_S
    ) -> None:
        self.kill: Callable[[], None] = kill_children
        self.can_keep: Callable[[], bool] = lambda: False
        self.list_workers: Callable[[], Mapping[int, int]] = dict
        self._daemon, self._job, self._host, self._reform_s = daemon, job, host, reform_s
        self._joined = JoinedWorld()
        self._published: JoinedWorld | None = None
        """World whose store this agent serves, and which it has yet to join."""
        self._owner = object()
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        """Held while a store is entered; taken before `_lock`."""
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._settled = threading.Event()
        """Set unless the arrival of kept workers is awaited."""
        self._arrived = False
        self._finished = False

    @property
    def epoch(self) -> int:
        """Epoch of the last world; 0 before the first."""
        return self._joined.epoch

    @property
    def node_rank(self) -> int:
        """Number of this node in the last world: its position among those present."""
        return self._joined.node_rank

    @property
    def nodes(self) -> int:
        """Number of nodes of the last world."""
        return self._joined.nodes

    @property
    def serves_store(self) -> bool:
        """Whether this agent serves the store of the last world."""
        return self._joined.serves_store

    @property
    def store(self) -> SealedStore:
        """Store of the last world, below its prefix `epoch-<n>`: the same names on all nodes,
        whether their workers were kept or started anew.

        Raises:
            DistError: it was closed.
        """
        return _sealed_store_of(self._joined)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the last world's epoch; return whether it has ended."""
        return self._ended.wait(timeout_s)

    def wait_arrived(self, timeout_s: float) -> bool:
        """Wait until it is known whether the workers have arrived in the last world; return that.

        They have where they were started in it. Kept ones have not when their time is over, or when
        the world ended first.
        """
        self._settled.wait(timeout_s)
        return self._arrived

    def report_worker_exit(
        self,
        rank: int,
        exit_code: int,
        last_lines: str,
        reason: EndReason = EndReason.UNKNOWN,
    ) -> None:
        """Report to the control loop a worker that failed in the present epoch, with its last
        lines. Failure rules use the exit code, people read the lines; a recovery needs neither, so
        a daemon that is away is only logged."""
        if self._ended.is_set() and reason is EndReason.UNKNOWN:
            return  # it was killed because the epoch has ended
        code = 128 - exit_code if exit_code < 0 else exit_code
        try:
            self._daemon.report_worker_exit(self.epoch, rank, code, last_lines, reason)
        except HoldfastError as error:
            log.warning(
                "rank %d exited with code %d, which was not reported: %s", rank, code, error
            )

    def workers(self) -> Mapping[int, int]:
        """Process id of each worker that runs, by its local rank."""
        return self.list_workers()

    def report_work(self, ranks: Collection[int]) -> None:
        """Report to the control loop which ranks have worked of late. A daemon that is away, or of
        a version that does not know the call, misses it."""
        with suppress(HoldfastError):
            self._daemon.report_work(self.epoch, ranks)

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
        killed; 0 otherwise, also while workers are kept."""
        if not self._ended.is_set():
            return 0
        self.kill()
        return 1

    def shutdown(self) -> bool:
        self._closed.set()
        with self._lock:
            self._owner = object()
            self._joined, self._published = replace(self._joined, store=None), None
        self._daemon.close()
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node belongs to the world of an epoch newer than the last one.

        Raises:
            RendezvousClosedError: when the job has ended.
            RendezvousConnectionError: when the daemon stays away, has another protocol version,
                denies this job to this process, or is too old to pass on the store's key; a cause
                is in `__cause__`.
        """
        mine = object()
        with self._lock:
            self._owner = mine
            after_epoch = self.epoch
        while True:
            world = self._ask(after_epoch, ASK_S)
            if not world.ready or world.epoch <= after_epoch:
                continue
            entered = self._enter_store(mine, world)
            if entered is None:
                continue
            with self._lock:
                self._joined, self._published = entered, None
                self._ended.clear()
                self._arrived = True
                self._settled.set()
            log.info("epoch %d: node %d of %d", world.epoch, world.node_rank, world.nodes)
            threading.Thread(
                target=self._watch, args=(mine,), name="holdfast-epochs", daemon=True
            ).start()
            host, _, port = entered.address.rpartition(":")
            return RendezvousInfo(
                _sealed_store_of(entered),
                entered.node_rank,
                entered.nodes,
                RendezvousStoreInfo(host, int(port)),
            )

    def _ask(self, after_epoch: int, wait_s: float) -> AnnouncedWorld:
        """Ask the daemon until it answers; return its answer."""
        until = time.monotonic() + DAEMON_ABSENT_S
        while True:
            try:
                world = self._daemon.join_world(after_epoch, wait_s, peek=False)
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

    def _enter_store(self, mine: object, world: AnnouncedWorld) -> JoinedWorld | None:
        """Open the world's store, and serve it if this node has to.

        Returns:
            None when that failed, after a pause, or when the caller is no longer the owner.

        Raises:
            RendezvousConnectionError: another node serves it, and the daemons hand out no key.
        """
        with self._entering:
            if self._owner is not mine:
                return None
            try:
                return self._serve(world) if self._serves(world) else _connect(world)
            except (DistError, HoldfastError) as error:
                log.warning("epoch %d: no store: %s; asking again", world.epoch, error)
        self._closed.wait(RETRY_S)
        return None

    def _serves(self, world: AnnouncedWorld) -> bool:
        """Whether this agent is to serve the world's store, or does so already."""
        published = self._published
        ours = published is not None and published.address == world.store_address
        return world.serves_store or ours

    def _serve(self, world: AnnouncedWorld) -> JoinedWorld:
        """Serve the world's store and publish it; once more if it is unknown whether the daemon
        has received the address."""
        served = self._published
        if served is None or served.epoch != world.epoch:
            host = self._host or world.node_host
            store = serve_store(host, STORE_S)
            watch_store(store, lambda: self._close_store(world.epoch))
            served = JoinedWorld(
                epoch=world.epoch,
                node_rank=world.node_rank,
                nodes=world.nodes,
                address=f"{host}:{store.port}",
                key=new_store_key(),
                serves_store=True,
                store=store,
            )
            self._published = served
        if world.serves_store:
            self._daemon.publish_store(served.epoch, served.address, served.key)
        return served

    def _close_store(self, epoch: int) -> None:
        """Close the store of `epoch`, which this agent serves: it has grown beyond its bound."""
        log.error(
            "epoch %d: its store holds more than %d bytes, which no job puts there, and is closed: "
            "keep strangers from the ports of trainers; training goes on until its world changes",
            epoch,
            STORE_BYTES_MAX,
        )
        with self._lock:
            if self._joined.epoch == epoch:
                self._joined = replace(self._joined, store=None)
            if self._published is not None and self._published.epoch == epoch:
                self._published = None

    def _watch(self, mine: object) -> None:
        """Follow the epochs for as long as the workers are kept; stop them when they cannot be."""
        left: list[JoinedWorld] = []  # kept until the workers have left their stores
        until = 0.0
        while self._owner is mine:
            epoch = self.epoch  # not the world: its store may have to be closed during the call
            after_epoch = left[0].epoch if left else epoch
            try:
                # Asked for an older epoch, the daemon answers at once.
                world = self._daemon.join_world(after_epoch, RETRY_S if left else ASK_S, peek=True)
            except ProtocolError as error:
                log.error("epoch %d is no longer watched: %s", epoch, error)
                return
            except HoldfastError:
                self._closed.wait(RETRY_S)
                continue
            if world.finished or world.epoch > epoch:
                left.append(self._joined)
                if not self._keep(mine, world):
                    return
                until = time.monotonic() + self._reform_s
            elif left and self._is_arrival_settled(mine, world, until):
                left.clear()

    def _keep(self, mine: object, world: AnnouncedWorld) -> bool:
        """Move to the newest epoch with the running workers, or stop them if they cannot be kept.

        Returns:
            Whether this thread has moved and goes on watching.
        """
        after_epoch = self.epoch
        try:
            while self._owner is mine and self._keeps_workers(world):
                world = self._ask(after_epoch, KEEP_ASK_S)
                if not world.ready or world.epoch <= after_epoch or not self._keeps_workers(world):
                    continue
                entered = self._enter_store(mine, world)
                if entered is not None and self._move(mine, world, entered):
                    return True
        except RendezvousError as error:
            log.warning("epoch %d: workers cannot be kept: %s", after_epoch, error)
        self._end(mine, finished=world.finished or self._finished)
        return False

    def _keeps_workers(self, world: AnnouncedWorld) -> bool:
        """Whether the workers can go on in `world`. Whether its number of ranks suits them is part
        of `keep`: they have told the daemon."""
        return world.keep and not world.finished and self.can_keep()

    def _move(self, mine: object, world: AnnouncedWorld, entered: JoinedWorld) -> bool:
        """Join the world of `entered` with the workers of the last one; return whether they still
        could be kept. A worker that has exited before is one of the last epoch."""
        with self._lock:
            if self._owner is not mine or not self._keeps_workers(world):
                return False
            self._joined, self._published = entered, None
            self._arrived = False
            self._settled.clear()
        log.info(
            "epoch %d: node %d of %d, with its workers of before",
            entered.epoch,
            entered.node_rank,
            entered.nodes,
        )
        return True

    def _is_arrival_settled(self, mine: object, world: AnnouncedWorld, until: float) -> bool:
        """Return whether all kept workers have arrived, or are killed because it is too late; pause
        if neither."""
        arrived = world.arrived and world.epoch == self.epoch
        if not arrived and time.monotonic() < until:
            self._closed.wait(RETRY_S)
            return False
        with self._lock:
            if self._owner is mine:
                if not arrived:
                    log.warning(
                        "epoch %d: workers have not arrived within %g s; killing them",
                        self.epoch,
                        self._reform_s,
                    )
                    self.kill()
                self._arrived = arrived
                self._settled.set()
        return True

    def _end(self, mine: object, *, finished: bool) -> None:
        """Note that the joined world has ended, and kill its workers."""
        with self._lock:
            if self._owner is not mine:
                return
            log.info("epoch %d has ended; stopping its workers", self.epoch)
            self._finished = finished
            self._ended.set()
            self._settled.set()
            self.kill()


def _connect(world: AnnouncedWorld) -> JoinedWorld:
    """Connect to the store that another agent serves.

    Raises:
        RendezvousConnectionError: there is no key for it.
        DistError: it cannot be reached.
    """
    if not world.store_key:
        raise RendezvousConnectionError(f"epoch {world.epoch}: {NO_KEY}")
    host, _, port = world.store_address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S))
    store.set_timeout(timedelta(seconds=STORE_S))
    return JoinedWorld(
        epoch=world.epoch,
        node_rank=world.node_rank,
        nodes=world.nodes,
        address=world.store_address,
        key=world.store_key,
        store=store,
    )


def _sealed_store_of(joined: JoinedWorld) -> SealedStore:
    if joined.store is None:
        raise DistError(f"the store of epoch {joined.epoch} is closed")
    return SealedStore(joined.store, f"epoch-{joined.epoch}", joined.key)


def kill_children() -> None:
    """Send SIGKILL to every child of this process: under plain torchrun they are the workers."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (thread / "children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
