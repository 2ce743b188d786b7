"""The Control service: daemons dial in, their heartbeats become views, memberships go down to them.

Level-triggered like everything else: a daemon that reports an older membership than the published
one is sent the published one, whatever was sent to it before. The server keeps no truth; what it
knows comes back with the next heartbeats. It must not decide: whoever is woken by `on_evidence`
does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio

from holdfast_core.errors import HoldfastError, UnreachableError
from holdfast_core.values import Membership
from holdfast_operator.heartbeats import job_view, node_view
from holdfast_operator.views import NEVER, JobView, NodeView
from holdfast_protos import codec, control_pb2, control_pb2_grpc

_log = logging.getLogger(__name__)

_Stream = grpc.aio.ServicerContext[control_pb2.Heartbeat, control_pb2.ControlMessage]


@dataclass(slots=True)
class _Connection:
    """The Control stream of one daemon, while it is open."""

    outbox: asyncio.Queue[control_pb2.ControlMessage | None] = field(default_factory=asyncio.Queue)
    """None ends the stream."""


@dataclass(slots=True)
class _Node:
    heartbeat: control_pb2.Heartbeat
    heard_at: float
    connection: _Connection | None
    evidence: object = None


class ControlServer(control_pb2_grpc.ControlServicer):
    """Hears every daemon that dials in.

    Args:
        heartbeat_s: how often daemons are told to send heartbeats.
        clock: monotonic seconds; stamps heartbeats.
        on_evidence: called whenever something changed that a recovery could follow from, at once.
    """

    def __init__(
        self, *, heartbeat_s: float, clock: Callable[[], float], on_evidence: Callable[[], None]
    ) -> None:
        self._heartbeat_s, self._clock, self._on_evidence = heartbeat_s, clock, on_evidence
        self._nodes: dict[str, _Node] = {}
        self._published: dict[str, Membership] = {}
        self._dropped: set[str] = set()
        self._server: grpc.aio.Server | None = None

    # --- for the owner ------------------------------------------------------------------------

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on `host`; returns the port.

        Raises:
            UnreachableError: when the address cannot be had.
        """
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        control_pb2_grpc.add_ControlServicer_to_server(self, server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise UnreachableError(f"cannot listen on {host}:{port} for daemons") from error
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        """End all streams and stop listening; daemons go on, and dial again."""
        for node in self._nodes.values():
            if node.connection is not None:
                node.connection.outbox.put_nowait(None)
        if self._server is not None:
            await self._server.stop(grace=0.2)
            self._server = None

    def publish(self, membership: Membership) -> None:
        """Make `membership` the newest of its job, and send it to whom it concerns."""
        self._published[membership.job] = membership
        self._dropped.discard(membership.job)
        for node in self._nodes.values():
            self._bring_up_to_date(node)

    def drop(self, job: str) -> None:
        """Tell every daemon that knows the job that it has ended."""
        self._published.pop(job, None)
        self._dropped.add(job)
        for node in self._nodes.values():
            self._bring_up_to_date(node)

    def views(self, job: str) -> dict[str, NodeView]:
        """All daemons that were ever heard, with what each last said of `job`."""
        views = {}
        for name, node in self._nodes.items():
            view = node_view(node.heartbeat, job, node.heard_at)
            views[name] = view if node.connection else replace(view, connected=False)
        return views

    # --- the service --------------------------------------------------------------------------

    async def Connect(
        self, request_iterator: AsyncIterator[control_pb2.Heartbeat], context: _Stream
    ) -> AsyncIterator[control_pb2.ControlMessage]:
        """One daemon's stream, until either side ends it or a newer one of the node begins."""
        connection = _Connection()
        listener = asyncio.ensure_future(self._listen(request_iterator, connection))
        yield control_pb2.ControlMessage(welcome=control_pb2.Welcome(heartbeat_s=self._heartbeat_s))
        try:
            while (message := await connection.outbox.get()) is not None:
                yield message
            if listener.done() and (error := listener.exception()) is not None:
                if not isinstance(error, HoldfastError):
                    raise error
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    str(error),
                    codec.error_to_metadata(error),
                )
        finally:
            listener.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await listener
            self._disconnected(connection)

    async def _listen(
        self, heartbeats: AsyncIterator[control_pb2.Heartbeat], connection: _Connection
    ) -> None:
        try:
            async for heartbeat in heartbeats:
                codec.check_version(heartbeat.protocol_version, f"the daemon on {heartbeat.node}")
                self._hear(heartbeat, connection)
        finally:
            connection.outbox.put_nowait(None)

    def _hear(self, heartbeat: control_pb2.Heartbeat, connection: _Connection) -> None:
        evidence = _evidence(heartbeat)  # refuses what is malformed before it is kept
        node = self._nodes.get(heartbeat.node)
        if node is None:
            node = _Node(heartbeat, NEVER, None)
            self._nodes[heartbeat.node] = node
        if node.connection is not connection:
            if node.connection is not None:
                node.connection.outbox.put_nowait(None)
            node.connection, node.evidence = connection, None
            _log.info("daemon on %s connected", heartbeat.node)
        node.heartbeat, node.heard_at = heartbeat, self._clock()
        self._bring_up_to_date(node)
        if evidence != node.evidence:
            node.evidence = evidence
            self._on_evidence()

    def _disconnected(self, connection: _Connection) -> None:
        for name, node in self._nodes.items():
            if node.connection is connection:
                node.connection = None
                _log.info("daemon on %s disconnected", name)
                self._on_evidence()

    def _bring_up_to_date(self, node: _Node) -> None:
        if node.connection is None:
            return
        known = {state.job: state.membership for state in node.heartbeat.jobs}
        for job in self._dropped & known.keys():
            drop = control_pb2.ControlMessage(drop=control_pb2.DropJob(job=job))
            node.connection.outbox.put_nowait(drop)
        for job, membership in self._published.items():
            theirs = known.get(job)
            name = node.heartbeat.node
            concerned = theirs is not None or membership.member_on(name) is not None
            newer = theirs is None or (theirs.epoch, theirs.revision) < (
                membership.epoch,
                membership.revision,
            )
            if concerned and newer:
                proto = codec.membership_to_proto(membership)
                node.connection.outbox.put_nowait(control_pb2.ControlMessage(membership=proto))


def _evidence(heartbeat: control_pb2.Heartbeat) -> object:
    """What of a heartbeat could call for a decision: everything but the passing of time."""
    jobs = [(state.job, _still(job_view(state))) for state in heartbeat.jobs]
    addresses = (heartbeat.peer_address, heartbeat.bulk_address)
    return (heartbeat.memory_id, heartbeat.incarnation, addresses, sorted(jobs, key=lambda j: j[0]))


def _still(view: JobView) -> JobView:
    ranks = tuple(replace(rank, step=0, idle_s=0.0, state="") for rank in view.ranks)
    return replace(
        view,
        ranks=ranks,
        protected=None,
        complete=None,
        skipped=0,
        failed=0,
        arena_bytes=0,
        parity_bytes=0,
    )
