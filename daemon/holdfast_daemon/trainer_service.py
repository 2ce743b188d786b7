"""The trainer-facing service: maps requests to the engine's inputs and questions.

A request that must wait asks the engine again after each change; it holds no state of its own, so a
client may repeat any call. Errors of ours become aborted calls that carry the error's code.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

from holdfast_core.errors import (
    HoldfastError,
    ProtocolError,
    SnapshotSkippedError,
    StaleEpochError,
    StepOrderError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_core.layouts import SLOTS_PER_ARENA
from holdfast_core.values import Generation
from holdfast_daemon.descriptors import ClaimRequest
from holdfast_daemon.engine import RestoreState
from holdfast_daemon.host import JobHost
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc

ASK_AGAIN_S = 1.0
WORLD_WAIT_S_MAX = 30.0

_STATUS = {
    UnreachableError.code: grpc.StatusCode.UNAVAILABLE,
    UnknownSessionError.code: grpc.StatusCode.NOT_FOUND,
    StaleEpochError.code: grpc.StatusCode.FAILED_PRECONDITION,
    StepOrderError.code: grpc.StatusCode.FAILED_PRECONDITION,
}

Handler = TypeVar("Handler", bound=Callable[..., Any])


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: HoldfastError) -> None:
    """End the call with `error` as the caller's side will raise it again."""
    await context.abort(
        _STATUS.get(error.code, grpc.StatusCode.INVALID_ARGUMENT),
        str(error),
        trailing_metadata=codec.error_to_metadata(error),
    )


def _translating(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(handler)
    async def translated(
        self: TrainerService, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        try:
            return await handler(self, request, context)
        except HoldfastError as error:
            await refuse(context, error)

    return translated


@dataclass(slots=True)
class Claims:
    """Tokens of the arena socket, and the sessions they belong to."""

    requests: dict[str, ClaimRequest] = field(default_factory=dict)
    sessions: dict[str, tuple[JobHost, str]] = field(default_factory=dict)

    def issue(self, path: Path, session: tuple[JobHost, str] | None) -> str:
        """A token for the arena at `path`: a claim of `session`, or read-only when that is None."""
        token = secrets.token_hex(24)
        self.requests[token] = ClaimRequest(path=path, exclusive=session is not None)
        if session is not None:
            self.sessions[token] = session
        return token

    def resolve(self, token: str) -> ClaimRequest:
        """A token is good once."""
        request = self.requests.pop(token, None)
        if request is None:
            raise ProtocolError("the token is not known; open the session again")
        return request

    def granted(self, token: str) -> None:
        """The lock is taken: tell the engine."""
        if entry := self.sessions.get(token):
            host, session = entry
            host.carry_out(host.engine.claimed(session, host.now))

    def closed(self, token: str) -> None:
        """The trainer's process is gone, or closed its claim."""
        if entry := self.sessions.pop(token, None):
            host, session = entry
            if not host.dropped:
                host.carry_out(host.engine.session_ended(session, clean=False, now=host.now))


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """Serves the trainers and agents of this node."""

    def __init__(
        self,
        *,
        host_of: Callable[[str], JobHost | None],
        hosts: Callable[[], dict[str, JobHost]],
        ended: Callable[[str], bool],
        claims: Claims,
        arena_socket: Path,
        node_host: str,
        status: Callable[[], dict[str, object]],
    ) -> None:
        self._host_of, self._hosts, self._ended = host_of, hosts, ended
        self._claims = claims
        self._arena_socket = arena_socket
        self._node_host = node_host
        self._status = status

    @_translating
    async def Hello(self, request: trainer_pb2.HelloRequest, context: Any) -> Any:
        codec.check_version(request.protocol_version, f"the SDK of rank {request.rank}")
        host = self._host(request.job)
        epoch = host.engine.hello(request.rank, request.store_address)
        membership = host.engine.memory.membership
        return trainer_pb2.HelloReply(
            protocol_version=codec.PROTOCOL_VERSION,
            epoch=epoch,
            world_size=membership.world_size if membership else 0,
            arena_socket=str(self._arena_socket),
        )

    async def Restore(
        self, request: trainer_pb2.RestoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trainer_pb2.RestoreProgress]:
        try:
            host = self._host(request.job)
            told = ""
            while True:
                state = host.engine.restore_state(request.rank, request.epoch)
                if state.ready:
                    yield self._decision(host, state)
                    return
                word = f"{state.phase} {state.done} {state.detail}"
                if word != told:
                    told = word
                    yield trainer_pb2.RestoreProgress(
                        phase=state.phase, done=state.done, total=state.total, detail=state.detail
                    )
                await host.changed(ASK_AGAIN_S)
        except HoldfastError as error:
            await refuse(context, error)

    def _decision(self, host: JobHost, state: RestoreState) -> trainer_pb2.RestoreProgress:
        assert state.line is not None
        decision = trainer_pb2.RestoreDecision(
            line=codec.line_to_proto(state.line), source=state.source
        )
        if state.arena is not None and state.slot is not None:
            arena = host.storage.arena(state.arena.rank, state.arena.layout_id)
            decision.manifest = state.slot.encoded
            decision.layout = state.arena.encoded
            decision.slot = state.slot.index
            decision.token = self._claims.issue(arena.path, None)
            decision.arena_bytes = arena.nbytes
            host.engine.memory.rank(state.arena.rank).restored = (
                state.line.generation,
                state.source,
            )
        return trainer_pb2.RestoreProgress(phase="ready", detail=state.detail, decision=decision)

    @_translating
    async def Open(self, request: trainer_pb2.OpenRequest, context: Any) -> Any:
        host = self._host(request.job)
        session, effects = host.engine.open(
            rank=request.rank,
            epoch=request.epoch,
            layout=request.layout,
            largest_slot_bytes=request.largest_slot_bytes,
            pid=request.pid,
            now=host.now,
        )
        host.carry_out(effects)
        while (opened := host.engine.opened(session)) is None:
            await host.changed(ASK_AGAIN_S)
        arena = host.storage.arena(opened.arena.rank, opened.arena.layout_id)
        return trainer_pb2.OpenReply(
            session=session,
            token=self._claims.issue(arena.path, (host, session)),
            arena_bytes=arena.nbytes,
            slot_bytes=opened.arena.layout.slot_bytes,
            slots=SLOTS_PER_ARENA,
        )

    @_translating
    async def Grant(self, request: trainer_pb2.GrantRequest, context: Any) -> Any:
        host = self._host_of_session(request.session)
        try:
            slot, effects = host.engine.grant(
                request.session, epoch=request.epoch, step=request.step, now=host.now
            )
        except SnapshotSkippedError as skipped:
            host.carry_out(host.engine.tick(host.now))
            return trainer_pb2.GrantReply(skipped=str(skipped))
        host.carry_out(effects)
        return trainer_pb2.GrantReply(slot=slot)

    @_translating
    async def Commit(self, request: trainer_pb2.CommitRequest, context: Any) -> Any:
        host = self._host_of_session(request.session)
        host.carry_out(
            host.engine.commit(
                request.session,
                epoch=request.epoch,
                step=request.step,
                slot=request.slot,
                payload_bytes=request.payload_bytes,
                extras_bytes=request.extras_bytes,
                digests=request.digests,
                nan_units=tuple(request.nan_units),
                now=host.now,
            )
        )
        while True:
            digest = host.engine.committed(request.session, epoch=request.epoch, step=request.step)
            if digest is not None:
                return trainer_pb2.CommitReply(manifest_digest=digest)
            await host.changed(ASK_AGAIN_S)

    @_translating
    async def Abort(self, request: trainer_pb2.AbortRequest, context: Any) -> Any:
        host = self._host_of_session(request.session)
        host.carry_out(
            host.engine.abort(request.session, epoch=request.epoch, step=request.step, now=host.now)
        )
        return trainer_pb2.AbortReply()

    async def Watch(
        self, request: trainer_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trainer_pb2.WatchEvent]:
        try:
            host = self._host_of_session(request.session)
        except HoldfastError as error:
            await refuse(context, error)
            return
        session = host.engine.memory.sessions[request.session]
        told: Generation | None = None
        told_dead: set[Generation] = set()
        while request.session in host.engine.memory.sessions and not host.dropped:
            memory = host.engine.memory
            if memory.epoch > session.epoch:
                yield trainer_pb2.WatchEvent(epoch_ended=memory.epoch)
                return
            directive = memory.directive
            if directive is not None:
                newest = directive.retained
                if newest is not None and newest != told:
                    told, message = newest, codec.generation_to_proto(newest)
                    if directive.protected is not None:
                        yield trainer_pb2.WatchEvent(protected=message)
                    else:
                        yield trainer_pb2.WatchEvent(unprotectable=message)
                for generation in sorted(set(directive.dead) - told_dead):
                    told_dead.add(generation)
                    yield trainer_pb2.WatchEvent(dead=codec.generation_to_proto(generation))
            await host.changed(ASK_AGAIN_S)

    @_translating
    async def Close(self, request: trainer_pb2.CloseRequest, context: Any) -> Any:
        host = self._host_of_session(request.session)
        host.carry_out(host.engine.session_ended(request.session, clean=True, now=host.now))
        return trainer_pb2.CloseReply()

    @_translating
    async def Progress(self, request: trainer_pb2.ProgressReport, context: Any) -> Any:
        host = self._host_of_session(request.session)
        host.engine.progress(
            request.session,
            step=request.step,
            skipped=request.skipped,
            failed=request.failed,
            failure=request.failure,
            now=host.now,
        )
        return trainer_pb2.ProgressReply()

    @_translating
    async def JoinWorld(self, request: trainer_pb2.JoinWorldRequest, context: Any) -> Any:
        codec.check_version(request.protocol_version, "the agent")
        loop = asyncio.get_running_loop()
        until = loop.time() + min(request.wait_s, WORLD_WAIT_S_MAX)
        while True:
            world = self._world(request)
            left = until - loop.time()
            if world.ready or world.finished or left <= 0:
                return world
            host = self._host_of(request.job)
            if host is None:
                await asyncio.sleep(min(left, 0.1))
            else:
                await host.changed(min(left, ASK_AGAIN_S))

    def _world(self, request: trainer_pb2.JoinWorldRequest) -> trainer_pb2.World:
        host = self._host_of(request.job)
        if host is None:
            return trainer_pb2.World(finished=self._ended(request.job))
        if not request.peek:
            host.agent_waits(request.after_epoch)
        state = host.engine.world_state(request.after_epoch)
        if state is None:
            return trainer_pb2.World()
        return trainer_pb2.World(
            ready=request.peek or state.serves_store or bool(state.store_address),
            epoch=state.epoch,
            node_rank=state.node_rank,
            nodes=state.nodes,
            store_address=state.store_address,
            serves_store=state.serves_store,
            node_host=self._node_host,
        )

    @_translating
    async def PublishStore(self, request: trainer_pb2.PublishStoreRequest, context: Any) -> Any:
        host = self._host(request.job)
        host.carry_out(host.engine.publish_store(request.epoch, request.store_address, host.now))
        return trainer_pb2.PublishStoreReply()

    async def Status(self, request: trainer_pb2.StatusRequest, context: Any) -> Any:
        return trainer_pb2.StatusReply(json=msgspec.json.encode(self._status()).decode())

    # --- inside -----------------------------------------------------------------------------------

    def _host(self, job: str) -> JobHost:
        host = self._host_of(job)
        if host is None:
            raise UnreachableError(
                f"this daemon has not heard of job {job}; the control loop has not placed it here "
                f"yet, or it has ended"
            )
        return host

    def _host_of_session(self, session: str) -> JobHost:
        for host in self._hosts().values():
            if session in host.engine.memory.sessions:
                return host
        raise UnknownSessionError(f"session {session} is not known here; open a new one")
