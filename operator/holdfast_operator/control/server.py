"""The Control service: daemons connect, heartbeats become views, memberships go to the daemons.

Level-triggered like everything else: a daemon that reports an older membership than the published
one receives the published one, whatever was sent before. The server stores nothing: its whole state
comes back with the next heartbeats. It decides nothing: its owner does, whom `on_evidence` wakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import grpc
import grpc.aio
from msgspec.structs import replace

from holdfast_core.errors import HoldfastError, ProtocolError, UnreachableError
from holdfast_core.snapshots.membership import Membership, are_two_jobs
from holdfast_operator.control.bounded import Outbox, Recent
from holdfast_operator.control.heartbeats import evidence_of, identity_of, job_view, node_view
from holdfast_operator.reconciler.observe.versions import completed, is_newer, version
from holdfast_operator.reconciler.observe.views import JobView, NodeView
from holdfast_protos import codec, control_pb2
from holdfast_protos.changes import change_between
from holdfast_protos.connections import channels
from holdfast_protos.connections.identity import Identity, Role, add_port, insist

_log = logging.getLogger(__name__)

RESEND_HEARTBEATS = 2.0
"""Heartbeats until a daemon that has not reported the newest membership is sent it again."""

ASKING_S = 30.0
"""Seconds for which a daemon that does not report an inspection is asked for it again."""

NODES_MAX = 20_000
"""Maximum number of nodes to remember. Beyond it, a new node replaces a disconnected node that held
nothing."""

DROPPED_MAX = 10_000
"""Ended jobs that are remembered: daemons that come back and hold one of them are asked to drop it.
For a job that ended longer ago, they are not asked until `drop` is called again."""

_Stream = grpc.aio.ServicerContext[control_pb2.Heartbeat, bytes]


@dataclass(slots=True)
class _Connection:
    """Open Control stream of one daemon."""

    node: str = ""
    """Name of the daemon's node; empty before its first heartbeat."""
    outbox: Outbox = field(default_factory=Outbox)
    sent: dict[str, tuple[Membership, float]] = field(default_factory=dict)
    """Newest membership of each job that went into the outbox, and when."""
    known: dict[str, Membership] = field(default_factory=dict)
    """Newest membership of each job that has passed on this stream, either way."""


@dataclass(slots=True)
class _Node:
    """Last report of one node's daemon."""

    view: NodeView
    jobs: dict[str, JobView]
    connection: _Connection | None
    evidence: dict[str, object] = field(default_factory=dict)
    """Fields of each job whose change may call for a decision."""
    awaited: frozenset[str] = frozenset()
    """Jobs that are not on the node, and for whose world an agent waits there."""


class ControlServer:
    """Server that receives the heartbeats of all daemons and sends them memberships.

    Args:
        heartbeat_s: interval in seconds at which daemons are asked to send heartbeats.
        clock: monotonic seconds; stamps heartbeats.
        on_evidence: called at once, with keys of jobs, whenever a change may lead to a recovery of
            one of them; with no keys when a node holds nothing of any job.
        identity: identity of the control loop; None admits every caller.
    """

    def __init__(
        self,
        *,
        heartbeat_s: float,
        clock: Callable[[], float],
        on_evidence: Callable[[frozenset[str]], None],
        identity: Identity | None = None,
    ) -> None:
        self._identity = identity
        self._heartbeat_s, self._clock, self._on_evidence = heartbeat_s, clock, on_evidence
        self._nodes: dict[str, _Node] = {}
        self._published: dict[str, Membership] = {}
        self._messages: dict[str, bytes] = {}
        """Message of each published membership, encoded when first needed: for a large job that
        takes long, and the message goes to many."""
        self._changes: dict[str, tuple[Membership, bytes]] = {}
        """For each job, an older membership that nearly all daemons have, and the message that
        turns it into the published one."""
        self._placed: dict[str, set[str]] = {}
        """Node → the jobs whose published memberships have a member on it."""
        self._holders: dict[str, set[str]] = {}
        """Job → the nodes that hold something of it."""
        self._dropped: Recent[float] = Recent(DROPPED_MAX)
        """Job → the newest epoch of what daemons are to drop of it."""
        self._inspections: dict[str, tuple[int, int, float]] = {}
        """Job → the epoch and number of the inspection that its daemons were last asked for, and
        the time until which they are asked."""
        self._server: grpc.aio.Server | None = None

    # --- for the owner ------------------------------------------------------------------------

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on `host`; returns the port.

        Raises:
            UnreachableError: when the server cannot listen on the address.
        """
        server = grpc.aio.server(
            options=channels.server_options(channels.CONTROL_STREAMS_MAX),
            maximum_concurrent_rpcs=channels.CONTROL_CALLS_MAX,
        )
        server.add_generic_rpc_handlers((_handler(self.Connect),))
        try:
            bound = add_port(server, f"{host}:{port}", self._identity)
        except RuntimeError as error:
            raise UnreachableError(f"cannot listen on {host}:{port} for daemons") from error
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        """End all streams and stop listening; daemons keep running, and connect again."""
        for node in self._nodes.values():
            if node.connection is not None:
                node.connection.outbox.end()
        if self._server is not None:
            await self._server.stop(grace=0.2)
            self._server = None

    @property
    def heartbeat_s(self) -> float:
        """Seconds between the heartbeats that daemons are asked to send."""
        return self._heartbeat_s

    def set_heartbeat_s(self, heartbeat_s: float) -> None:
        """Ask all daemons to send heartbeats at this interval from now on."""
        if heartbeat_s == self._heartbeat_s:
            return
        self._heartbeat_s = heartbeat_s
        for node in self._nodes.values():
            if node.connection is not None:
                node.connection.outbox.put(self._welcome())

    def publish(self, membership: Membership) -> None:
        """Make `membership` the newest of its job, and send it to all daemons that it concerns."""
        if membership == self._published.get(membership.job):
            self._send_news(membership.job)
            return
        self._unplace(membership.job)
        self._published[membership.job] = membership
        for member in membership.members:
            self._placed.setdefault(member.node, set()).add(membership.job)
        self._dropped.pop(membership.job, None)
        self._send_news(membership.job)

    def drop(self, job: str, *, up_to_epoch: int | None = None) -> None:
        """Have every daemon drop what it holds of the job up to an epoch; of any epoch when None,
        because the job has ended."""
        self._unplace(job)
        self._dropped[job] = inf if up_to_epoch is None else up_to_epoch
        self._send_news(job)

    def free_earlier(self, job: str, uid: str) -> None:
        """Have connected daemons drop what they hold of earlier jobs of this name, while the job
        `uid` has no membership, which would tell them the same."""
        for name in self._holders.get(job, ()) if job not in self._published else ():
            node = self._nodes[name]
            theirs = node.jobs[job].uid
            if node.connection is not None and are_two_jobs(uid, theirs):
                message = control_pb2.ControlMessage(drop=control_pb2.DropJob(job=job, uid=theirs))
                node.connection.outbox.put(message.SerializeToString())

    def persist(self, job: str) -> None:
        """Ask all connected daemons of the job to write the newest generation to the durable tier;
        one of them is enough."""
        message = control_pb2.ControlMessage(persist=control_pb2.PersistNow(job=job))
        for node in self._nodes.values():
            if node.connection is not None and job in node.jobs:
                node.connection.outbox.put(message.SerializeToString())

    def inspect(self, job: str, epoch: int, number: int) -> None:
        """Ask the daemons of an epoch for an inspection, now and with each heartbeat, until they
        report that they have been asked. Older daemons never do, so this ends after a while."""
        self._inspections[job] = (epoch, number, self._clock() + ASKING_S)
        for name in self._holders.get(job, ()):
            self._ask_for_inspection(self._nodes[name], job)

    def forget(self, job: str) -> None:
        """Leave the job to its daemons, as if it had never been published or dropped."""
        self._unplace(job)
        self._dropped.pop(job, None)

    def views(self, job: str) -> dict[str, NodeView]:
        """All remembered daemons by node, each with its last report of `job`."""
        return {name: self._view(node, job) for name, node in self._nodes.items()}

    def view(self, name: str, job: str) -> NodeView | None:
        """One daemon with its last report of `job`; None when it is not known."""
        node = self._nodes.get(name)
        return None if node is None else self._view(node, job)

    def nodes(self) -> dict[str, NodeView]:
        """All remembered daemons by node, without their reports of jobs."""
        return {name: node.view for name, node in self._nodes.items()}

    def holders(self, job: str) -> frozenset[str]:
        """Nodes whose daemons last reported that they hold something of the job."""
        return frozenset(self._holders.get(job, ()))

    def held_jobs(self) -> frozenset[str]:
        """Jobs that connected daemons hold something of."""
        connected = (node for node in self._nodes.values() if node.connection is not None)
        return frozenset(job for node in connected for job in node.jobs)

    def jobs_on(self, name: str) -> frozenset[str]:
        """Jobs that a node's daemon holds something of, and jobs with a member on the node."""
        node = self._nodes.get(name)
        held = frozenset(node.jobs) if node is not None else frozenset[str]()
        return held | self._placed.get(name, frozenset())

    def awaited_on(self, name: str) -> frozenset[str]:
        """Jobs that are not on a node, and for whose world an agent waits there."""
        node = self._nodes.get(name)
        return node.awaited if node is not None else frozenset()

    def _view(self, node: _Node, job: str) -> NodeView:
        return replace(node.view, job=node.jobs.get(job), agent_waits=job in node.awaited)

    def _unplace(self, job: str) -> None:
        membership = self._published.pop(job, None)
        self._messages.pop(job, None)
        self._changes.pop(job, None)
        self._inspections.pop(job, None)
        for member in membership.members if membership is not None else ():
            jobs = self._placed.get(member.node, set())
            jobs.discard(job)
            if not jobs:
                self._placed.pop(member.node, None)

    def _send_news(self, job: str) -> None:
        membership = self._published.get(job)
        names = {member.node for member in membership.members} if membership is not None else set()
        for name in names | self._holders.get(job, set()):
            node = self._nodes.get(name)
            if node is not None:
                self._bring_up_to_date(node, (job,))

    # --- the service --------------------------------------------------------------------------

    async def Connect(
        self, request_iterator: AsyncIterator[control_pb2.Heartbeat], context: _Stream
    ) -> AsyncIterator[bytes]:
        """Serve one daemon's stream until either side ends it or a newer one of the node begins."""
        await insist(context, self._identity, Role.DAEMON)
        connection = _Connection()
        listener = asyncio.ensure_future(self._listen(request_iterator, connection))
        try:  # from here on: the stream may end while the first message is on its way
            yield self._welcome()
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
            connection.outbox.end()

    def _welcome(self) -> bytes:
        welcome = control_pb2.Welcome(heartbeat_s=self._heartbeat_s)
        return control_pb2.ControlMessage(welcome=welcome).SerializeToString()

    def _hear(self, heartbeat: control_pb2.Heartbeat, connection: _Connection) -> None:
        jobs = {state.job: job_view(state) for state in heartbeat.jobs}  # refuses the malformed
        node, now = self._nodes.get(heartbeat.node), self._clock()
        view = node_view(heartbeat, now, now if node is None else node.view.first_heard_at)
        if node is None:
            self._forget_a_node()
            node = self._nodes[heartbeat.node] = _Node(view, {}, None)
        elif node.connection is connection:
            before = node.jobs
            jobs = {
                job: completed(found, before.get(job), connection.known.get(job))
                for job, found in jobs.items()
            }
        for job, found in jobs.items():
            _note_known(connection, job, found.membership)
        evidence = {job: evidence_of(found) for job, found in jobs.items()}
        concerned = {
            job
            for job in evidence.keys() | node.evidence.keys()
            if evidence.get(job) != node.evidence.get(job)
        }
        for job in node.jobs.keys() - jobs.keys():
            self._holders[job].discard(view.name)
            if not self._holders[job]:
                del self._holders[job]
        for job in jobs.keys() - node.jobs.keys():
            self._holders.setdefault(job, set()).add(view.name)
        awaited = frozenset(heartbeat.awaited)
        concerned |= awaited ^ node.awaited
        moved = identity_of(view) != identity_of(node.view) or node.connection is not connection
        if node.connection is not connection:
            if node.connection is not None:
                node.connection.outbox.end()
            node.connection, connection.node = connection, view.name
            _log.info("daemon on %s connected", view.name)
        node.view, node.jobs, node.evidence = view, jobs, evidence
        node.awaited = awaited
        everything = self.jobs_on(view.name)
        self._bring_up_to_date(node, everything)
        if moved or concerned:
            self._on_evidence(everything | concerned if moved else frozenset(concerned))

    def _forget_a_node(self) -> None:
        """Make room for another node: nodes come and go, and a daemon could invent names without
        end."""
        if len(self._nodes) >= NODES_MAX:
            gone = (n for n, node in self._nodes.items() if not (node.connection or node.jobs))
            name = next(gone, None)
            if name is None:
                raise ProtocolError(
                    f"{NODES_MAX} daemons are connected or hold jobs; one control loop takes no "
                    f"more"
                )
            del self._nodes[name]

    def _disconnected(self, connection: _Connection) -> None:
        node = self._nodes.get(connection.node)
        if node is not None and node.connection is connection:
            node.connection = None
            node.view = replace(node.view, connected=False)
            _log.info("daemon on %s disconnected", connection.node)
            self._on_evidence(self.jobs_on(connection.node))

    def _bring_up_to_date(self, node: _Node, jobs: Iterable[str]) -> None:
        """Send the node whatever is newer of `jobs` than its last report."""
        if node.connection is None:
            return
        for job in jobs:
            theirs, membership = node.jobs.get(job), self._published.get(job)
            if theirs is not None and theirs.epoch <= self._dropped.get(job, -1):
                drop = control_pb2.ControlMessage(drop=control_pb2.DropJob(job=job))
                node.connection.outbox.put(drop.SerializeToString())
                node.connection.known.pop(job, None)
            elif membership is not None and is_newer(membership, theirs):
                self._send_membership(node.connection, membership, theirs)
            self._ask_for_inspection(node, job)

    def _ask_for_inspection(self, node: _Node, job: str) -> None:
        """Ask a daemon for the inspection of the job, unless it reports that it was asked."""
        asked, theirs = self._inspections.get(job), node.jobs.get(job)
        if asked is None or theirs is None or node.connection is None:
            return
        epoch, number, until = asked
        known = theirs.inspection.number if theirs.inspection is not None else 0
        if theirs.epoch == epoch and known < number and self._clock() < until:
            inspect = control_pb2.Inspect(job=job, epoch=epoch, number=number)
            message = control_pb2.ControlMessage(inspect=inspect)
            node.connection.outbox.put(message.SerializeToString())

    def _send_membership(
        self, connection: _Connection, membership: Membership, theirs: JobView | None
    ) -> None:
        job, now = membership.job, self._clock()
        before, sent_at = connection.sent.get(job, (None, now))
        message = b""
        if before is membership:
            # A daemon takes a moment to report what it was sent.
            if now - sent_at < RESEND_HEARTBEATS * self._heartbeat_s:
                return
        elif theirs is not None and theirs.revision is not None:
            message = self._change(connection.known.get(job), membership)
        connection.sent[job], connection.known[job] = (membership, now), membership
        connection.outbox.put(message or self._whole(membership))

    def _whole(self, membership: Membership) -> bytes:
        if membership.job not in self._messages:
            whole = control_pb2.ControlMessage(membership=codec.membership_to_proto(membership))
            self._messages[membership.job] = whole.SerializeToString()
        return self._messages[membership.job]

    def _change(self, base: Membership | None, membership: Membership) -> bytes:
        """Change from `base` to the published `membership`; empty when only the whole will do."""
        if base is None:
            return b""
        known, message = self._changes.get(membership.job, (None, b""))
        if known is not base:
            change = change_between(base, membership)
            if change is not None:
                message = control_pb2.ControlMessage(change=change).SerializeToString()
            else:
                message = b""
            self._changes[membership.job] = (base, message)
        return message


def _handler(
    connect: Callable[[Any, Any], AsyncIterator[bytes]],
) -> grpc.GenericRpcHandler[control_pb2.Heartbeat, bytes]:
    """Make the service's handler. Answers are bytes already: one message goes to thousands."""
    method = grpc.stream_stream_rpc_method_handler(
        connect, request_deserializer=control_pb2.Heartbeat.FromString
    )
    return grpc.method_handlers_generic_handler("holdfast.v1.Control", {"Connect": method})


def _note_known(connection: _Connection, job: str, theirs: Membership | None) -> None:
    """Note `theirs` as what the daemon has, unless we sent a newer one: then `theirs` was sent
    before ours arrived."""
    known = connection.known.get(job)
    if theirs is None or (known is not None and are_two_jobs(known.uid, theirs.uid)):
        return
    if known is None or version(theirs) >= version(known):
        connection.known[job] = theirs
