"""The daemon: wires storage, services, engines and the control stream of one node together."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc.aio

from holdfast_core.errors import InvalidJobError, StaleEpochError, StorageError
from holdfast_core.snapshots.membership import Membership, are_two_jobs
from holdfast_daemon.durable.loader import Loader
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.factories import make_authenticator, make_catalogue
from holdfast_daemon.job.durable_tier import DurableTier
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.job.scrub import ScrubPlan, ScrubSettings, TargetKind, targets_of
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.job_threads import JobThreads
from holdfast_daemon.limits.window import Window
from holdfast_daemon.logs import bind
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.net import links
from holdfast_daemon.net.control import ControlClient
from holdfast_daemon.net.peers import PeerOutbox, PeerReader, PeerService
from holdfast_daemon.net.serving import clear_socket, serve_peers, serve_trainers
from holdfast_daemon.observing import status
from holdfast_daemon.observing.http import HttpServer
from holdfast_daemon.observing.idle_checks import IdleChecks
from holdfast_daemon.observing.observer import NodeObserver
from holdfast_daemon.observing.traffic import Traffic
from holdfast_daemon.parity.changes import change_of
from holdfast_daemon.schedule import PERIOD_S, until_next
from holdfast_daemon.settings import DaemonSettings
from holdfast_daemon.trainers.claims import Claims
from holdfast_daemon.trainers.descriptors import DescriptorServer
from holdfast_daemon.trainers.service import TrainerService
from holdfast_daemon.trainers.waiting_agents import WaitingAgents
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import Kind, Located, Request, probe_bytes
from holdfast_daemon.transport.server import BulkServer
from holdfast_daemon.transport.tls import ConnectionFactory
from holdfast_host.idle_checks import start_idle_checks
from holdfast_protos import codec, control_pb2
from holdfast_protos.connections.identity_gauges import show_identity
from holdfast_protos.idle_checks import idle_checks_to_proto
from holdfast_protos.links import links_to_proto

BULK_TIMEOUT_S = 5.0
PROBES_MAX = 600
"""Probes of links that are answered in a minute: of 2 MiB each, far less than any link carries, and
many more than other daemons need."""
STOP_GRACE_S = 0.5
JOBS_MAX = 256
"""Jobs at once: each ticks, sends reports and adds to every heartbeat."""
JOBS_REMEMBERED = 1000
"""Ended jobs whose names are remembered, so that a late agent learns that its job has ended."""

_log = bind(logging.getLogger(__name__))


class Node:
    """One daemon, from `start` to `stop`. Runs on the current event loop."""

    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        self.storage = NodeStorage(settings.root, settings.budget_bytes)
        self.metrics = DaemonMetrics()
        show_identity(settings.identity, self.metrics)
        self.hosts: dict[str, JobHost] = {}
        self._ended: dict[str, None] = {}
        self._undropped: dict[str, JobStorage] = {}
        """Memory of dropped jobs that is still to be freed."""
        self._agents = WaitingAgents(time.monotonic)
        self._lock = threading.Lock()
        self._epochs: dict[str, int] = {}
        """Job → its epoch, for the bulk service's threads; guarded by `_lock`."""
        self._threads = JobThreads(settings.threads, "effect")
        self._durable = DurableTier.of(settings)
        self._wiring = ConnectionFactory(settings.identity, settings.bulk)
        self._bulk = BulkServer(settings.host, settings.bulk_port, self, self._wiring)
        self._bulk_client = BulkClient(BULK_TIMEOUT_S, self._wiring)
        self._probes = Window("probes of links", PROBES_MAX, 60.0)
        self._fetcher = PeerReader(settings.identity)
        self._link_client = BulkClient(links.TIMEOUT_S, self._wiring)
        self._links = links.LinkMonitor(
            settings.node,
            hosts=lambda: self.hosts,
            client=self._link_client,
            fetch=self._fetcher.fetch_links,
        )
        self._catalogue = make_catalogue(settings, self.metrics, self.hosts)
        self._observer = NodeObserver(self.metrics, self._catalogue, settings.node)
        self._outbox = PeerOutbox(self._send_failed, settings.identity)
        self._claims = Claims()
        self._descriptors = DescriptorServer(
            settings.arena_socket,
            self._claims.resolve,
            self._claims.closed,
            on_granted=self._claims.granted,
            on_refused=self._claims.refused,
            mode=settings.permissions,
        )
        self._authenticator = make_authenticator(settings, self.metrics, self.hosts)
        self._scrub = ScrubPlan(
            ScrubSettings(
                interval_s=settings.scrub_interval_s, rate_bytes_s=settings.scrub_rate_bytes_s
            )
        )
        self._idle_checks: IdleChecks | None = None
        if settings.idle_check_s:
            self._idle_checks = IdleChecks(
                settings.idle_check_s,
                is_idle=lambda: not self.hosts and not self._agents.jobs(),
                start=partial(start_idle_checks, settings.root),
                metrics=self.metrics,
            )
        self._servers: list[grpc.aio.Server] = []
        self._peer_address = ""
        self._control: ControlClient | None = None
        self._http: HttpServer | None = None
        self._periodic: list[asyncio.Task[None]] = []
        self._traffic = Traffic(self.metrics, settings.protection_bytes_s)
        self._turned_at = time.monotonic()
        self._started_at = time.monotonic()

    async def start(self) -> None:
        """Adopt the jobs of an earlier daemon, then serve.

        Raises:
            StorageError, UnreachableError: a socket, port or directory cannot be used.
        """
        settings = self._settings
        if not self.storage.is_tmpfs:
            _log.warning("root_is_not_tmpfs", root=str(settings.root))
        # Adopt first: no caller may see a daemon that does not know its own jobs.
        await self._catalogue.start()
        for job in self.storage.jobs():
            self._adopt(job)
        # Serve peers and trainers, then health and metrics.
        self._bulk.start()
        clear_socket(settings.arena_socket)
        await self._descriptors.start()
        await self._serve()
        if settings.metrics_port is not None:
            self._http = HttpServer(
                self.metrics.registry,
                heartbeat_age_s=lambda: time.monotonic() - self._turned_at,
                not_ready=self._not_ready,
                host=settings.metrics_host or settings.host,
                port=settings.metrics_port,
            )
            self._http.start()
        # Dial the control loop last: the first heartbeat has the addresses of all services.
        if settings.control:
            self._control = ControlClient(
                settings.control,
                heartbeat=self.heartbeat,
                receive=self._receive,
                identity=settings.identity,
            )
            self._control.start()
        loop = asyncio.get_running_loop()
        work = [self._beat(), self._give_back(), self._links.run()]
        if self._idle_checks is not None:
            work.append(self._idle_checks.run())
        self._periodic = [loop.create_task(each) for each in work]
        _log.info(
            "daemon_started",
            node=settings.node,
            memory_id=self.storage.memory_id,
            incarnation=self.storage.incarnation,
            peer=self._peer_address,
            bulk=self._bulk.address,
            metrics_port=self._http.port if self._http else None,
            budget_bytes=settings.budget_bytes,
            security=settings.security,
            adopted_jobs=sorted(self.hosts),
        )

    async def stop(self) -> None:
        """End cleanly. Sealed snapshots and blocks stay on the tmpfs for the next daemon."""
        late = await self._durable.drain(list(self.hosts.values()), self._settings.persist_grace_s)
        if late:
            _log.warning("persist_unfinished", jobs=late, grace_s=self._settings.persist_grace_s)
        for task in self._periodic:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._control is not None:
            await self._control.close()
        for host in self.hosts.values():
            host.stop()
        for server in self._servers:
            await server.stop(STOP_GRACE_S)
        await self._descriptors.close()
        self._authenticator.close()
        await self._outbox.close()
        await self._catalogue.close()
        if self._http is not None:
            self._http.close()
        self._bulk.close()
        self._bulk_client.close()
        self._link_client.close()
        self._fetcher.close()
        self._durable.close()
        self._threads.close(wait=True)
        self.storage.close()
        _log.info("daemon_stopped", node=self._settings.node)

    # --- requests of the bulk service's threads ---------------------------------------------------

    def locate(self, request: Request) -> Located:
        """Find requested bytes, for `transport.protocol.Resolver`. Called from many threads."""
        storage = self._asked(request)
        is_snapshot = request.kind is Kind.SNAPSHOT
        locate = storage.locate_snapshot if is_snapshot else storage.locate_parity
        return locate(request.index, request.generation, request.offset, request.nbytes)

    def change(self, request: Request) -> Iterator[bytes]:
        """The change of a snapshot since an older one, or the bytes of a probe, for
        `transport.protocol.Resolver`. Called from many threads."""
        storage = self._asked(request)
        if request.kind is not Kind.PROBE:
            return change_of(storage, request)
        self._probes.take()
        return iter((probe_bytes()[: request.nbytes],))

    def _asked(self, request: Request) -> JobStorage:
        """The storage that a peer's request may read.

        Raises:
            StorageError: the job is not on this node.
            StaleEpochError: the peer's epoch has ended.
        """
        with self._lock:
            epoch = self._epochs.get(request.job)
        host = self.hosts.get(request.job)
        if host is None or epoch is None:
            raise StorageError(f"job {request.job} is not on node {self._settings.node}")
        if request.epoch < epoch:
            raise StaleEpochError(
                f"a daemon of epoch {request.epoch} asks for bytes; the epoch is {epoch}"
            )
        return host.storage

    # --- control ----------------------------------------------------------------------------------

    def heartbeat(self) -> control_pb2.Heartbeat:
        """The state of this node and its jobs, for the control loop."""
        failed = None if self._idle_checks is None else self._idle_checks.report()
        return control_pb2.Heartbeat(
            protocol_version=codec.PROTOCOL_VERSION,
            node=self._settings.node,
            memory_id=self.storage.memory_id,
            incarnation=self.storage.incarnation,
            peer_address=self._peer_address,
            bulk_address=self._bulk.address,
            memory_budget_bytes=self._settings.budget_bytes,
            memory_used_bytes=self.storage.reserved_bytes,
            jobs=[self._job_state(host) for host in self.hosts.values()],
            trainer_socket=str(self._settings.socket),
            awaited=sorted(job for job in self._agents.jobs() if job not in self.hosts),
            idle_checks=None if failed is None else idle_checks_to_proto(failed),
        )

    def _job_state(self, host: JobHost) -> control_pb2.JobState:
        state = status.job_state(host)
        measured = self._links.measured(host.job, host.engine.epoch)
        if measured.number:
            state.links.CopyFrom(links_to_proto(measured))
        return state

    def _receive(self, message: control_pb2.ControlMessage) -> None:
        if message.HasField("membership"):
            membership = codec.membership_from_proto(message.membership)
            host = self.hosts.get(membership.job)
            if host is not None and are_two_jobs(membership.uid, host.uid):
                self._drop(membership.job)
                host = None
            if host is None:
                if membership.member_on(self._settings.node) is None:
                    return
                self._check_room_for(membership.job)
                host = self._adopt(membership.job)
            host.carry_out(host.engine.set_membership(membership, host.now))
            if not host.engine.takes_part:
                self._drop(membership.job)
        elif message.HasField("persist"):
            host = self.hosts.get(message.persist.job)
            if host is not None and host.engine.has_tier:
                host.carry_out(host.engine.request_persist(host.now))
        elif message.HasField("inspect"):
            host = self.hosts.get(message.inspect.job)
            if host is not None:
                host.engine.inspect(message.inspect.epoch, message.inspect.number, host.now)
                host.carry_out([])
        elif message.HasField("drop"):
            self._receive_drop(message.drop.job, message.drop.uid)

    def _receive_drop(self, job: str, uid: str) -> None:
        """Drop the job, which has ended; with `uid`, only an earlier job that had its name."""
        if uid:
            host = self.hosts.get(job)
            if host is not None and host.uid == uid:
                self._drop(job)
            return
        self._ended[job] = None
        while len(self._ended) > JOBS_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._drop(job)

    def _check_room_for(self, job: str) -> None:
        if len(self.hosts) >= JOBS_MAX:
            self.metrics.add("jobs_refused")
            raise InvalidJobError(
                f"node {self._settings.node} has {JOBS_MAX} jobs already and cannot take job "
                f"{job}: end some, or place it elsewhere"
            )

    def _adopt(self, job: str) -> JobHost:
        self._free(job)
        storage = JobStorage(self.storage, job)
        adopted = storage.adopt()
        for problem in adopted.problems:
            _log.warning("adoption_problem", job=job, detail=problem)
            self.metrics.add("corrupt", job=job, kind="manifest")
        engine = JobEngine(
            job=job,
            node=self._settings.node,
            memory_id=self.storage.memory_id,
            incarnation=self.storage.incarnation,
            settings=EngineSettings(),
        )
        host = self._make_host(engine, storage, adopted.membership)
        self.hosts[job] = host
        self._ended.pop(job, None)
        host.start(adopted)
        return host

    def _make_host(
        self, engine: JobEngine, storage: JobStorage, membership: Membership | None
    ) -> JobHost:
        worker = EffectWorker(
            storage,
            bulk=self._bulk_client,
            peers=self._fetcher,
            executor=self._threads.of(storage.job),
            persister=self._durable.persister(engine.job, storage),
            membership=membership,
            loader=Loader(storage, storage.job, self._durable.open_sets),
            parity_traffic=self._traffic.parity.of_job(),
        )
        return JobHost(
            engine=engine,
            storage=storage,
            worker=worker,
            outbox=self._outbox,
            observer=self._observer,
            on_change=self._job_changed,
        )

    def _drop(self, job: str) -> None:
        if (host := self.hosts.pop(job, None)) is None:
            return
        host.drop()
        self._undropped[job] = host.storage
        self._threads.release(job)
        self._durable.release(job)
        with self._lock:
            self._epochs.pop(job, None)
        self._observer.forget(job)
        _log.info("job_dropped", job=job)
        try:
            self._free(job)
        except StorageError as error:
            _log.error("job_not_freed", job=job, cause=str(error))
        self._wake_control()

    def _free(self, job: str) -> None:
        """Free the memory of a job that was dropped, unless it is free. Raises StorageError."""
        if (storage := self._undropped.get(job)) is not None:
            storage.drop()
            del self._undropped[job]

    def _job_changed(self, host: JobHost) -> None:
        with self._lock:
            self._epochs[host.job] = host.engine.epoch
        evidence = host.engine.evidence()
        if evidence != host.evidence:
            host.evidence = evidence
            self._wake_control()

    def _wake_control(self) -> None:
        if self._control is not None:
            self._control.wake()

    # --- inside -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        settings = self._settings
        service = TrainerService(
            agents=self._agents,
            host_of=self.hosts.get,
            hosts=lambda: self.hosts,
            ended=lambda job: job in self._ended,
            claims=self._claims,
            arena_socket=settings.arena_socket,
            node_host=settings.host,
            status=self._status,
            authenticator=self._authenticator,
            metrics=self.metrics,
            check_links=self._links.check,
        )
        trainers = await serve_trainers(service, settings.socket, settings.permissions)
        self._servers.append(trainers)
        peers, self._peer_address = await serve_peers(
            PeerService(
                self.hosts.get,
                self._links.measured,
                partial(self.metrics.add, "rate_limited", service="peers"),
            ),
            settings.host,
            settings.peer_port,
            settings.identity,
        )
        self._servers.append(peers)

    async def _beat(self) -> None:
        """Once a second, refresh gauges and catalogue, scrub, and note that the loop turns."""
        while True:
            self._turned_at = before = time.monotonic()
            self.storage.tidy()
            for job in list(self._undropped):
                with suppress(StorageError):
                    self._free(job)
            self._observer.refresh(
                self.hosts, self.storage.reserved_bytes, self._settings.budget_bytes
            )
            self._traffic.count(self._bulk, self._bulk_client, self._descriptors, self._http)
            self._scrub_next(before)
            pause_s = until_next(PERIOD_S, before)
            await asyncio.sleep(pause_s)
            self.metrics.observe("loop_lag_seconds", max(0.0, time.monotonic() - before - pause_s))

    async def _give_back(self) -> None:
        """Once a second, give back the memory of parity blocks that need none now."""
        while True:
            await asyncio.sleep(PERIOD_S)
            for host in list(self.hosts.values()):
                try:
                    await asyncio.to_thread(host.storage.give_back)
                except StorageError as error:
                    _log.warning("parity_memory_kept", job=host.job, error=str(error))

    def _scrub_next(self, now: float) -> None:
        targets = {
            target: host
            for host in self.hosts.values()
            for target in targets_of(host.engine.held(), host.storage.sealed_parity_bytes)
        }
        target = self._scrub.next(now, targets)
        if target is None:
            return
        host = targets[target]
        self.metrics.add("scrubbed_bytes", target.nbytes, job=host.job)
        host.carry_out(
            host.engine.scrub(
                host.now,
                snapshot=target.kind is TargetKind.SNAPSHOT,
                index=target.index,
                slot=target.slot,
            )
        )

    def _status(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "node": settings.node,
            "memory_id": self.storage.memory_id,
            "incarnation": self.storage.incarnation,
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "memory_budget_bytes": settings.budget_bytes,
            "memory_used_bytes": self.storage.reserved_bytes,
            "security": settings.security,
            "control_connected": bool(self._control and self._control.connected),
            "sent_bytes": self._bulk.sent_bytes,
            "metrics_port": self._http.port if self._http else None,
            "jobs": {
                job: status.as_json(host, host.engine.overview())
                for job, host in self.hosts.items()
            },
        }

    def _not_ready(self) -> str:
        waiting = [job for job, host in self.hosts.items() if not host.engine.verified]
        return f"still verifying the memory of jobs {waiting}" if waiting else ""

    def _send_failed(self, kind: str, reason: str) -> None:
        _log.debug("peer_message_lost", kind=kind, cause=reason)
        self.metrics.add("peer_messages_lost", kind=kind)
