"""Small messages between daemons: the peer service, the outbox, and manifests for threads.

Messages are best effort. The outbox keeps only the newest message per receiver, job and kind, so
that a slow peer costs neither memory nor order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import grpc
import grpc.aio

from holdfast_core.errors import (
    HoldfastError,
    ProtocolError,
    RateLimitedError,
    StaleEpochError,
    UnreachableError,
)
from holdfast_core.links import MeasuredLinks, links_of
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Member, are_two_jobs
from holdfast_daemon.engine.effects import Effect, Send, SendDirective, SendReport, SendSuspect
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.limits.rates import (
    FETCH_RATE,
    LINKS_RATE,
    PEER_RATE,
    STRANGERS,
    SUSPECT_RATE,
    Accounts,
    Rate,
)
from holdfast_daemon.limits.refusals import Context, refuse
from holdfast_protos import codec, peer_pb2, peer_pb2_grpc, values_pb2
from holdfast_protos.connections import channels
from holdfast_protos.connections.identity import Identity, Role, aio_channel, channel
from holdfast_protos.links import links_from_proto, links_to_proto

SEND_TIMEOUT_S = 2.0
FETCH_TIMEOUT_S = 5.0

Message = peer_pb2.ReportMessage | peer_pb2.DirectiveMessage | peer_pb2.SuspectMessage


class PeerOutbox:
    """Sends reports, directives and suspicions; implements `host.Sender`."""

    def __init__(
        self, on_failed: Callable[[str, str], None], identity: Identity | None = None
    ) -> None:
        """`on_failed(kind, reason)` counts messages that did not arrive; `kind` is report,
        directive or suspect."""
        self._on_failed = on_failed
        self._identity = identity
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}
        """Address → (version of the certificate that the channel was opened with, channel)."""
        self._pending: dict[tuple[str, str, str], tuple[Message, JobHost]] = {}
        self._sending: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, effect: Send, host: JobHost) -> None:
        message: Message
        match effect:
            case SendReport():
                message = codec.report_to_proto(effect.report)
            case SendDirective():
                message = codec.directive_to_proto(effect.directive)
            case SendSuspect():
                message = peer_pb2.SuspectMessage(
                    job=host.job,
                    epoch=host.engine.epoch,
                    rank=effect.rank,
                    generation=codec.generation_to_proto(effect.generation),
                )
        message.uid = host.uid
        address = effect.to.peer_address
        self._pending[(address, host.job, type(effect).__name__)] = (message, host)
        if address not in self._sending:
            self._sending.add(address)
            task = asyncio.get_running_loop().create_task(self._drain(address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, open_channel in self._channels.values():
            await open_channel.close(grace=None)

    async def _channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, with the current certificate. One task per address calls
        this."""
        version = 0 if self._identity is None else self._identity.current().version
        cached = self._channels.get(address)
        if cached is not None and cached[0] == version:
            return cached[1]
        opened = aio_channel(address, self._identity, Role.DAEMON, channels.channel_options())
        self._channels[address] = (version, opened)
        if cached is not None:
            await cached[1].close(grace=None)
        return opened

    async def _drain(self, address: str) -> None:
        try:
            while key := next((k for k in self._pending if k[0] == address), None):
                message, host = self._pending.pop(key)
                await self._deliver(address, message, host)
        finally:
            self._sending.discard(address)

    async def _deliver(self, address: str, message: Message, host: JobHost) -> None:
        stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(await self._channel(address))
        kind = ""
        try:
            match message:
                case peer_pb2.ReportMessage():
                    kind = "report"
                    reply = await stub.Report(message, timeout=SEND_TIMEOUT_S)
                case peer_pb2.DirectiveMessage():
                    kind = "directive"
                    reply = await stub.Direct(message, timeout=SEND_TIMEOUT_S)
                case peer_pb2.SuspectMessage():
                    kind = "suspect"
                    reply = await stub.Suspect(message, timeout=SEND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._on_failed(kind, error.code().name)
            return
        if reply.epoch > host.engine.epoch and not host.dropped:
            host.carry_out(host.engine.on_peer_epoch(reply.epoch, host.now))


class PeerService(peer_pb2_grpc.PeerServicer):
    """Serves the messages and requests of other daemons."""

    def __init__(
        self,
        host_of: Callable[[str], JobHost | None],
        links: Callable[[str, int], MeasuredLinks],
        limited: Callable[[], None] = lambda: None,
    ) -> None:
        """`links` are this daemon's newest measurements of (job, epoch); `limited` counts the calls
        that are refused because they come too fast."""
        self._host_of, self._links = host_of, links
        self._accounts = Accounts(time.monotonic, limited)

    async def Report(self, request: peer_pb2.ReportMessage, context: Context) -> peer_pb2.PeerReply:
        host = self._host_of(request.job)
        # All unknown members share one account, because their numbers could be made up.
        is_member = host is not None and host.engine.is_member(request.member)
        who = f"member {request.member}" if is_member else "no member"
        await self._admit(context, request.job, PEER_RATE, who)
        try:
            report = codec.report_from_proto(request)
        except ProtocolError as error:
            await refuse(context, error)
        return self._hand_over(request, lambda host: host.engine.on_report(report, host.now))

    async def Direct(
        self, request: peer_pb2.DirectiveMessage, context: Context
    ) -> peer_pb2.PeerReply:
        await self._admit(context, request.job, PEER_RATE, "directives")
        directive = codec.directive_from_proto(request)
        return self._hand_over(request, lambda host: host.engine.on_directive(directive, host.now))

    async def Suspect(
        self, request: peer_pb2.SuspectMessage, context: Context
    ) -> peer_pb2.PeerReply:
        await self._admit(context, request.job, SUSPECT_RATE, "suspicions")
        epoch, rank = request.epoch, request.rank
        generation = codec.generation_from_proto(request.generation)
        return self._hand_over(
            request, lambda host: host.engine.on_suspect(epoch, rank, generation, host.now)
        )

    async def _admit(self, context: Context, job: str, rate: Rate, what: str) -> None:
        """Return when it is the call's turn; refuse the call if that would take too long."""
        is_here = self._host_of(job) is not None
        try:
            await self._accounts.admit(*(((job, what), rate) if is_here else STRANGERS))
        except RateLimitedError as error:
            await refuse(context, error)

    def _hand_over(
        self, message: Message, act: Callable[[JobHost], list[Effect]]
    ) -> peer_pb2.PeerReply:
        """Pass a peer's message to the job's engine; the reply has the engine's epoch, 0 for an
        unknown job and for an earlier or later job of its name."""
        host = self._host_of(message.job)
        if host is None or are_two_jobs(message.uid, host.uid):
            return peer_pb2.PeerReply(epoch=0)
        host.carry_out(act(host))
        return peer_pb2.PeerReply(epoch=host.engine.epoch)

    async def FetchManifest(
        self, request: peer_pb2.FetchManifestRequest, context: Context
    ) -> peer_pb2.FetchManifestReply:
        await self._admit(context, request.job, FETCH_RATE, "manifests")
        host = self._host_of(request.job)
        if host is None:
            return peer_pb2.FetchManifestReply()
        if request.epoch < host.engine.epoch:
            error = StaleEpochError(
                f"a daemon of epoch {request.epoch} asks for a manifest; the epoch is "
                f"{host.engine.epoch}"
            )
            await refuse(context, error)
        description = host.storage.describe(
            request.rank, codec.generation_from_proto(request.generation)
        )
        manifest, layout = description or (b"", b"")
        return peer_pb2.FetchManifestReply(manifest=manifest, layout=layout)

    async def Links(
        self, request: peer_pb2.LinksRequest, context: Context
    ) -> values_pb2.MeasuredLinks:
        await self._admit(context, request.job, LINKS_RATE, "links")
        return links_to_proto(self._links(request.job, request.epoch))


class PeerReader:
    """Asks other daemons, for threads: `parity.group.PeerClient` over gRPC, and their measurements
    of links."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self._lock = threading.Lock()
        self._channels: dict[str, tuple[int, grpc.Channel]] = {}

    def fetch_manifest(
        self, member: Member, job: str, epoch: int, rank: int, generation: Generation
    ) -> tuple[bytes, bytes]:
        """(manifest, layout), encoded; both empty when the peer has neither.

        Raises:
            UnreachableError, StaleEpochError.
        """
        peer = self._channel(member.peer_address)
        request = peer_pb2.FetchManifestRequest(
            job=job, epoch=epoch, rank=rank, generation=codec.generation_to_proto(generation)
        )
        try:
            reply = peer_pb2_grpc.PeerStub(peer).FetchManifest(request, timeout=FETCH_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _translated(error, member) from error
        return reply.manifest, reply.layout

    def fetch_links(self, member: Member, job: str, epoch: int) -> MeasuredLinks:
        """The newest measurements of another daemon.

        Raises:
            UnreachableError, RateLimitedError.
        """
        peer = peer_pb2_grpc.PeerStub(self._channel(member.peer_address))
        request = peer_pb2.LinksRequest(job=job, epoch=epoch)
        try:
            reply = peer.Links(request, timeout=SEND_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _translated(error, member) from error
        return links_of(links_from_proto(reply), member.index)

    def close(self) -> None:
        with self._lock:
            for _, open_channel in self._channels.values():
                open_channel.close()
            self._channels.clear()

    def _channel(self, address: str) -> grpc.Channel:
        """The channel to `address`, with the current certificate. An older channel is not closed,
        because other threads may be using it; it ends when they drop it."""
        version = 0 if self._identity is None else self._identity.current().version
        with self._lock:
            known = self._channels.get(address)
            if known is None or known[0] != version:
                options = channels.channel_options()
                known = (version, channel(address, self._identity, Role.DAEMON, options))
                self._channels[address] = known
            return known[1]


def _translated(error: grpc.RpcError, member: Member) -> HoldfastError:
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    metadata = error.trailing_metadata() if isinstance(error, grpc.Call) else None
    ours = codec.error_from_metadata(metadata, details or "")
    return ours or UnreachableError(f"daemon of {member.node} at {member.peer_address}: {details}")
