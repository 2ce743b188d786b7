"""Rendezvous backend `holdfast`, which gets the membership from the node's daemon.

The control loop decides the membership and the daemons pass it on, so agents do not vote. Each
agent asks for the world of the next epoch, one agent serves the store, and all start their workers.
While workers run, a thread asks whether a newer epoch has begun. If so, one of two things happens:

- Workers that the daemon allows to stay (`World.kept_lanes`: they follow their worlds) and that
  still run are kept. They form their groups again by themselves, perhaps with other ranks. The
  thread enters the store of the new epoch, serves it if necessary, and continues to watch. It kills
  the other workers of the node, and the agent starts new ones beside those that are kept. Kept
  workers that do not arrive in time are killed, which is an ordinary failure.
- If no worker is kept, the thread kills all at once. A worker that is stopped or hangs in a
  collective does not react to SIGTERM and would hold up all others. Torchrun then starts new
  workers.

This module decides nothing: not when an epoch begins, not when a job is over, and not which workers
can be kept.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from holdfast_core.inspections import InspectedProcess
from holdfast_core.job.failures import REFORM_S
from holdfast_core.states import EndReason
from holdfast_protos import codec, trainer_pb2
from holdfast_protos.inspections import processes_to_proto

log = logging.getLogger(__name__)

BACKEND = "holdfast"
ASK_S = 20.0
"""Time for which the daemon may hold one call. A lost call is noticed only after this time."""
RETRY_S = 0.2
"""Pause before asking a daemon again that did not answer."""
CONNECT_S = 10.0
"""Time to try to reach the store of an epoch, before asking whether the epoch still lasts."""
KEEP_ASK_S = 1.0
"""Time for which the daemon may hold a call while workers are being kept. It is short, because
workers may die meanwhile, or a newer epoch may replace them."""
STORE_S = 600.0
"""Time for which a worker or agent may wait for a key in the store."""
DAEMON_ABSENT_S = 300.0
"""Time for which a daemon may not answer before the agent gives up. A daemon restarts in a second,
and a node whose daemon does not come back is lost anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedWorld:
    """A training world as the daemon describes it; see `World` in trainer.proto."""

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
    kept_lanes: frozenset[int] = frozenset()
    arrived_lanes: frozenset[int] = frozenset()

    def kept_among(self, lanes: Collection[int]) -> frozenset[int]:
        """Those of the running workers' `lanes` that can be kept. A daemon that is too old to
        distinguish lanes keeps all or none."""
        if self.finished:
            return frozenset()
        return frozenset(lanes) if self.keep else self.kept_lanes.intersection(lanes)

    def late_among(self, lanes: Collection[int]) -> frozenset[int]:
        """Those of the kept workers' `lanes` that have not arrived in this world."""
        return frozenset() if self.arrived else frozenset(lanes) - self.arrived_lanes


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedWorld:
    """The training world that this node has joined, and its open store."""

    epoch: int = 0
    node_rank: int = 0
    nodes: int = 0
    address: str = ""
    key: str = field(default="", repr=False)
    serves_store: bool = False
    store: TCPStore | None = None
    """None before the first world, after the last one, and once the store is closed."""
    kept: frozenset[int] = frozenset()
    """Lanes whose workers were kept when this node joined the world. The others' are new."""


class Daemon(Protocol):
    """Calls from an agent to its node's daemon. Methods raise nothing but HoldfastError."""

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> AnnouncedWorld:
        """Ask for the world of an epoch newer than `after_epoch`. The daemon answers at once if
        there is one, and otherwise within `wait_s`.

        Args:
            peek: only ask, without stating that this agent is ready to start workers.
        """

    def publish_store(self, epoch: int, store_address: str, store_key: str) -> None:
        """Publish the address of the store of `epoch` to the other agents, and its key to the
        job's ranks."""

    def report_worker_exit(
        self,
        epoch: int,
        rank: int,
        exit_code: int,
        last_lines: str,
        reason: EndReason,
        kernel_messages: str,
    ) -> frozenset[int]:
        """Report to the control loop that a worker failed; code 128 + n means signal n.

        Returns:
            The lanes of this node whose workers follow their worlds.
        """

    def report_work(self, epoch: int, ranks: Collection[int]) -> int:
        """Report to the control loop which workers have worked since the last report. Returns the
        number of an inspection of the workers that it waits for; 0 if it waits for none."""

    def report_inspection(
        self, epoch: int, number: int, processes: Sequence[InspectedProcess]
    ) -> None:
        """Report the processes of this node's ranks for an inspection."""

    def close(self) -> None:
        """Close the connection, and end all calls that wait on it."""


class WhileWaiting(Protocol):
    """Something to do while a node waits for its first world."""

    def look(self) -> float:
        """Go on with it, without waiting. Returns seconds after which to call this again. What it
        raises ends the wait, and reaches the caller of `next_rendezvous`."""

    def stop(self) -> None:
        """End it: the first world has begun."""


class KillWorkers(Protocol):
    """Kills the workers of `lanes` at once; None: all workers."""

    def __call__(self, lanes: Collection[int] | None = None) -> object: ...


class GrpcDaemon:
    """Client of the daemon at the Unix socket `socket`. Its calls carry the token in
    `token_file`."""

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
            kept_lanes=frozenset(reply.kept_lanes),
            arrived_lanes=frozenset(reply.arrived_lanes),
        )

    def publish_store(self, epoch: int, store_address: str, store_key: str) -> None:
        request = trainer_pb2.PublishStoreRequest(
            job=self._job, epoch=epoch, store_address=store_address, store_key=store_key
        )
        self._calls.ask(self._calls.stub.PublishStore, request)

    def report_worker_exit(
        self,
        epoch: int,
        rank: int,
        exit_code: int,
        last_lines: str,
        reason: EndReason,
        kernel_messages: str,
    ) -> frozenset[int]:
        request = trainer_pb2.WorkerExitedRequest(
            job=self._job,
            epoch=epoch,
            rank=rank,
            exit_code=exit_code,
            last_lines=last_lines,
            reason=reason,
            kernel_messages=kernel_messages,
        )
        reply = self._calls.ask(self._calls.stub.WorkerExited, request)
        return frozenset(reply.following_lanes)

    def report_work(self, epoch: int, ranks: Collection[int]) -> int:
        request = trainer_pb2.WorkedRequest(job=self._job, epoch=epoch, ranks=ranks)
        return int(self._calls.ask(self._calls.stub.Worked, request).inspect)

    def report_inspection(
        self, epoch: int, number: int, processes: Sequence[InspectedProcess]
    ) -> None:
        request = trainer_pb2.InspectedRequest(
            job=self._job,
            epoch=epoch,
            number=number,
            processes=processes_to_proto(processes),
        )
        self._calls.ask(self._calls.stub.Inspected, request)

    def close(self) -> None:
        self._calls.close()


class HoldfastRendezvous(RendezvousHandler):
    """The rendezvous of one node: it joins the worlds of one job, epoch after epoch.

    Two threads can move this node to a newer epoch: torchrun's thread, in `next_rendezvous`, and
    the watching thread, which keeps the workers. The invariant is: **only the owner replaces the
    joined world, ends it, or kills its workers, and only while it holds the lock.**
    `next_rendezvous` becomes the owner when it starts. The watching thread that it starts at its
    end inherits the ownership. So when a worker has died, nothing that the previous watching thread
    was about to do has an effect any more. Only the owner enters stores, and one at a time, so a
    node never serves two stores in one epoch. If a watching thread published a store just before it
    lost the ownership, the new owner takes that store over.

    Args:
        daemon: the node's daemon.
        job: key of the job, which is torchrun's run id.
        host: address at which the job's other nodes reach this process, such as that of its pod; if
            empty, the daemon's address.
        reform_s: time within which kept workers must arrive in a new epoch.

    Attributes:
        list_workers: returns the process id of each running worker by its lane. Any thread calls
            it. The default returns none, so that none is kept, because torchrun's own agent waits
            at its exit barrier in the store with which it began.
        kill: kills workers of this agent at once, whatever state they are in: all of them, or those
            of the lanes that it is given. If the agent has children other than workers, replace it
            before the first rendezvous. Any thread calls it.
        while_waiting: what this node does while it waits for its first world; None for nothing.
            The thread that calls `next_rendezvous` calls it.
    """

    def __init__(
        self, daemon: Daemon, job: str, host: str = "", reform_s: float = REFORM_S
    ) -> None:
        self.kill: KillWorkers = kill_children
        self.list_workers: Callable[[], Mapping[int, int]] = dict
        self.while_waiting: WhileWaiting | None = None
        self._daemon, self._job, self._host, self._reform_s = daemon, job, host, reform_s
        self._joined = JoinedWorld()
        self._published: JoinedWorld | None = None
        """The world whose store this agent serves already, but which it has not joined yet."""
        self._owner = object()
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        """Held while a store is entered. Always acquired before `_lock`."""
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._settled = threading.Event()
        """Cleared while kept workers have yet to arrive."""
        self._moved = threading.Event()
        """Set when this node has moved to another world with its workers; see `wait_moved`."""
        self._arrived = False
        self._finished = False

    @property
    def joined(self) -> JoinedWorld:
        """The newest joined world; workers that do not belong to it have been killed. Keep no
        reference to it: its store must close in time."""
        with self._lock:
            return self._joined

    @property
    def epoch(self) -> int:
        """Epoch of the newest joined world; 0 before the first."""
        return self._joined.epoch

    @property
    def node_rank(self) -> int:
        """Number of this node among the nodes of the newest joined world."""
        return self._joined.node_rank

    @property
    def nodes(self) -> int:
        """Number of nodes in the newest joined world."""
        return self._joined.nodes

    @property
    def serves_store(self) -> bool:
        """Whether this agent serves the store of the newest joined world."""
        return self._joined.serves_store

    @property
    def store(self) -> SealedStore:
        """The store of the newest joined world, below the prefix `epoch-<n>`. Names are the same on
        all nodes, whether their workers were kept or are new.

        Raises:
            DistError: the store was closed.
        """
        return _sealed_store_of(self._joined)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the present epoch; return whether it has ended."""
        return self._ended.wait(timeout_s)

    def wait_moved(self, timeout_s: float) -> None:
        """Wait until this node has moved to another world with some of its workers, at most
        `timeout_s`. A move ends one call, or the next one if none waits."""
        if self._moved.wait(timeout_s):
            self._moved.clear()

    def wait_arrived(self, timeout_s: float) -> bool:
        """Wait until it is known whether the workers have arrived in the newest joined world, and
        return that.

        Workers that were started in the world have arrived. Kept workers have not if they took too
        long, or if the world ended first.
        """
        self._settled.wait(timeout_s)
        return self._arrived

    def report_worker_exit(
        self,
        epoch: int,
        rank: int,
        exit_code: int,
        last_lines: str,
        reason: EndReason = EndReason.UNKNOWN,
        kernel_messages: str = "",
    ) -> frozenset[int] | None:
        """Report to the control loop that a worker failed in `epoch`, with its last lines and those
        of the kernel. Failure rules use the exit code, and people read the lines.

        Returns:
            The lanes of this node whose workers follow their worlds, and need not end with this
            one. None if the epoch has ended, or if the report did not reach the daemon.
        """
        if self._ended.is_set() and reason is EndReason.UNKNOWN:
            return None  # The worker was killed because the epoch has ended.
        code = 128 - exit_code if exit_code < 0 else exit_code
        try:
            return self._daemon.report_worker_exit(
                epoch, rank, code, last_lines, reason, kernel_messages
            )
        except HoldfastError as error:
            log.warning(
                "rank %d exited with code %d, which was not reported: %s", rank, code, error
            )
            return None

    def workers(self) -> Mapping[int, int]:
        """Return the process id of each running worker by its local rank."""
        return self.list_workers()

    def report_work(self, ranks: Collection[int]) -> int:
        """Report to the control loop which ranks have worked since the last report. Returns the
        number of an inspection that is to be made; 0 if there is none. Errors are ignored: the
        daemon may be away, or too old to know the call."""
        if self.epoch:
            with suppress(HoldfastError):
                return self._daemon.report_work(self.epoch, ranks)
        return 0

    def report_inspection(self, number: int, processes: Sequence[InspectedProcess]) -> None:
        """Report the processes of this node's world ranks for an inspection. Errors are ignored:
        the daemon asks again."""
        with suppress(HoldfastError):
            self._daemon.report_inspection(self.epoch, number, processes)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Always True: workers use the published store, so the daemon recognises their world."""
        return True

    def get_run_id(self) -> str:
        return self._job

    def is_closed(self) -> bool:
        return self._finished

    def set_closed(self) -> None:
        """Do nothing: the control loop decides when a job is over."""

    def num_nodes_waiting(self) -> int:
        """If the epoch has ended, kill the workers and return 1, so that torchrun starts new ones.
        Otherwise return 0, also while workers are kept."""
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
        if self.while_waiting is not None:
            self.while_waiting.stop()
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node has joined the world of an epoch that is newer than its last one.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousConnectionError: the daemon does not answer, has another protocol version,
                denies this job to this process, or is too old to pass on the store's key. The cause
                is in `__cause__`, if there is one.
            Exception: what `while_waiting` raises.
        """
        # Become the owner, so that the thread that watches the last epoch changes nothing more.
        mine = object()
        with self._lock:
            self._owner = mine
            after_epoch = self.epoch
        # Ask for a newer world, and enter its store.
        while True:
            beside = None if after_epoch else self.while_waiting
            wait_s = ASK_S if beside is None else min(ASK_S, beside.look())
            world = self._ask(after_epoch, wait_s)
            if not world.ready or world.epoch <= after_epoch:
                continue
            if beside is not None:
                beside.stop()
            entered = self._enter_store(mine, world)
            if entered is None:
                continue
            # Join the world, and watch its epoch.
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
        """Ask the daemon for a newer world until it answers; return its answer. Raises as
        `next_rendezvous`."""
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
        """Open the store of `world`, and serve it if that is this node's part.

        Returns:
            None if that failed (after a pause), or if the caller is no longer the owner.

        Raises:
            RendezvousConnectionError: another node serves the store, and the daemons have no key.
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
        """Whether this agent must serve the store of `world`, or serves it already."""
        published = self._published
        ours = published is not None and published.address == world.store_address
        return world.serves_store or ours

    def _serve(self, world: AnnouncedWorld) -> JoinedWorld:
        """Serve the store of `world`, and publish its address and key. If the daemon still asks for
        a store that is served already, publish it again."""
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
        """Close the store of `epoch`, which this agent serves, because it has grown too large."""
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
        """Watch for newer epochs, and move to each with the workers, as long as they can be kept;
        then kill them. The body of the watching thread."""
        left: list[JoinedWorld] = []  # Worlds whose stores the workers may still use.
        until = 0.0
        while self._owner is mine:
            # Ask whether a newer epoch has begun. Hold no reference to the joined world during the
            # call, since its store may have to be closed. While kept workers have yet to arrive,
            # name an older epoch, so that the daemon answers at once.
            epoch = self.epoch
            after_epoch = left[0].epoch if left else epoch
            try:
                world = self._daemon.join_world(after_epoch, RETRY_S if left else ASK_S, peek=True)
            except ProtocolError as error:
                log.error("epoch %d is no longer watched: %s", epoch, error)
                return
            except HoldfastError:
                self._closed.wait(RETRY_S)
                continue
            # A newer epoch: move there with the workers. Otherwise wait for workers to arrive.
            if world.finished or world.epoch > epoch:
                left.append(self._joined)
                if not self._keep(mine, world):
                    return
                until = time.monotonic() + self._reform_s
            elif left and self._is_arrival_settled(mine, world, until):
                left.clear()

    def _keep(self, mine: object, world: AnnouncedWorld) -> bool:
        """Move to the newest epoch with the running workers, or kill them if they cannot be kept.

        Returns:
            Whether this node has moved, so that the thread must watch the new epoch.
        """
        after_epoch = self.epoch
        try:
            while self._owner is mine and self._kept_in(world):
                world = self._ask(after_epoch, KEEP_ASK_S)
                if not world.ready or world.epoch <= after_epoch or not self._kept_in(world):
                    continue
                entered = self._enter_store(mine, world)
                if entered is not None and self._move(mine, world, entered):
                    return True
        except RendezvousError as error:
            log.warning("epoch %d: workers cannot be kept: %s", after_epoch, error)
        self._end(mine, finished=world.finished or self._finished)
        return False

    def _kept_in(self, world: AnnouncedWorld) -> frozenset[int]:
        """Lanes of the running workers that can continue in `world`. They have told the daemon
        which numbers of ranks suit them, so its answer takes account of that."""
        return world.kept_among(self.list_workers().keys())

    def _move(self, mine: object, world: AnnouncedWorld, entered: JoinedWorld) -> bool:
        """Join the world of `entered` with the present workers, and kill those that cannot be kept.
        Return False if there is no longer any to keep; a worker that has exited by now belongs to
        the last epoch."""
        with self._lock:
            kept = self._kept_in(world)
            if self._owner is not mine or not kept:
                return False
            self._joined, self._published = replace(entered, kept=kept), None
            self._arrived = False
            self._settled.clear()
            if others := self.list_workers().keys() - kept:
                self.kill(others)
        self._moved.set()
        log.info(
            "epoch %d: node %d of %d, keeping its workers %s",
            entered.epoch,
            entered.node_rank,
            entered.nodes,
            sorted(kept),
        )
        return True

    def _is_arrival_settled(self, mine: object, world: AnnouncedWorld, until: float) -> bool:
        """Return whether it is settled that the kept workers arrive: they have all arrived, or this
        kills them because they took too long. If it is open, pause and return False."""
        kept = self._joined.kept
        late = world.late_among(kept) if world.epoch == self.epoch else kept
        if late and time.monotonic() < until:
            self._closed.wait(RETRY_S)
            return False
        with self._lock:
            if self._owner is mine:
                if late:
                    log.warning(
                        "epoch %d: workers %s have not arrived within %g s; killing them",
                        self.epoch,
                        sorted(late),
                        self._reform_s,
                    )
                    self.kill(late)
                self._arrived = not late
                self._settled.set()
        return True

    def _end(self, mine: object, *, finished: bool) -> None:
        """Note that the joined world has ended, and kill its workers, unless there is another owner
        by now."""
        with self._lock:
            if self._owner is not mine:
                return
            log.info("epoch %d has ended; stopping its workers", self.epoch)
            self._finished = finished
            self._ended.set()
            self._settled.set()
            self.kill()


def _connect(world: AnnouncedWorld) -> JoinedWorld:
    """Connect to a store that another agent serves.

    Raises:
        RendezvousConnectionError: the daemons have no key for the store.
        DistError: the store cannot be reached.
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


def kill_children(lanes: Collection[int] | None = None) -> None:
    """Send SIGKILL to every child of this process. Under plain torchrun these are the workers, of
    which none is ever kept."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (thread / "children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
