"""Reads a trainer's request only after the call's headers have identified the caller.

gRPC takes a request off the wire before a handler sees it: tens of megabytes for a layout or the
digests of a large slot. Here a server takes each request as a stream, and reads its one message
only when the headers alone have settled two things: the caller has a right to call (a valid token,
or a session that this daemon opened), and there is room in the share of the caller's job. So
strangers make a daemon hold no more than headers, and a job's trainers wait for each other, not for
trainers of other jobs. Nothing differs on the wire.

Must not: decide what a call may do. Its handler does that, by the request (`admission`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from holdfast_core.errors import HoldfastError, ProtocolError, RateLimitedError
from holdfast_daemon.limits.refusals import Context
from holdfast_protos.connections import channels

RECEIVE_S = 10.0
"""Time limit for a request whose headers have come: meanwhile it takes up its job's share."""
SHARE_BYTES_MAX = 4 * channels.MESSAGE_BYTES_MAX
"""Bytes of one job's requests that are being read or handled. While less than the limit of one
message is left, further requests wait unread."""
SHARE_CALLS_MAX = 256
"""Calls of one job at once: a rank has two to four, and an agent one. Callers who prove nothing,
where that is allowed, have no job, and their calls are not counted."""


class Gatekeeper(Protocol):
    """Recognizes callers by their headers."""

    async def share_of(self, headers: dict[str, str], of_session: bool) -> str:
        """The job in whose share a call is counted, or "" for a call of no particular job.
        `of_session`: the call names a session, not a job. Raises the error that the call is refused
        with."""

    async def refuse(self, request: Any, context: Context, error: HoldfastError) -> None:
        """Count the refusal, then end the call with it; `request` is None if it was not read."""


@dataclass(slots=True)
class _Share:
    """The calls of one job, and the bytes that their requests take up."""

    calls: int = 0
    nbytes: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    async def reserve(self) -> None:
        """Wait for this call's turn, then reserve room for the largest message."""
        if self.waiting or not self._has_room():
            turn = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self.waiting:
                    self.waiting.remove(turn)
                else:
                    self.give_back(channels.MESSAGE_BYTES_MAX)
                raise
        else:
            self.nbytes += channels.MESSAGE_BYTES_MAX

    def give_back(self, nbytes: int) -> None:
        """Return `nbytes` of room, and give it to the calls that wait."""
        self.nbytes -= nbytes
        while self.waiting and self._has_room():
            turn = self.waiting.popleft()
            if not turn.done():
                self.nbytes += channels.MESSAGE_BYTES_MAX
                turn.set_result(None)

    def _has_room(self) -> bool:
        return self.nbytes + channels.MESSAGE_BYTES_MAX <= SHARE_BYTES_MAX


class Receiving(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only its stub has some
    """Reads the requests of calls that have one message each. For one event loop.

    Args:
        sessions: methods that name a session, `/package.Service/Method`.
    """

    def __init__(self, gatekeeper: Gatekeeper, sessions: frozenset[str]) -> None:
        self._gatekeeper, self._sessions = gatekeeper, sessions
        self._shares: dict[str, _Share] = {}

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        of_session = details.method in self._sessions

        async def answer(messages: AsyncIterator[bytes], context: Context) -> Any:
            async with self._request(messages, context, of_session, handler) as request:
                return await handler.unary_unary(request, context)

        async def stream(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async with self._request(messages, context, of_session, handler) as request:
                async for reply in handler.unary_stream(request, context):
                    yield reply

        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                stream, response_serializer=handler.response_serializer
            )
        assert handler.unary_unary is not None, "requests are single messages"
        return grpc.stream_unary_rpc_method_handler(
            answer, response_serializer=handler.response_serializer
        )

    @asynccontextmanager
    async def _request(
        self, messages: AsyncIterator[bytes], context: Context, of_session: bool, handler: Any
    ) -> AsyncIterator[Any]:
        """The request, counted in its job's share while it is handled."""
        headers = {
            key: value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        try:
            job = await self._gatekeeper.share_of(headers, of_session)
            share = self._enter(job)
        except HoldfastError as error:
            await self._gatekeeper.refuse(None, context, error)
            raise AssertionError("refuse() raises") from error
        reserved = 0
        try:
            await share.reserve()
            reserved = channels.MESSAGE_BYTES_MAX
            request, nbytes = await self._read(messages, context, handler.request_deserializer)
            share.give_back(reserved - nbytes)
            reserved = nbytes
            yield request
        finally:
            share.give_back(reserved)
            share.calls -= 1
            if share.calls == 0:
                del self._shares[job]

    def _enter(self, job: str) -> _Share:
        share = self._shares.setdefault(job, _Share())
        if job and share.calls >= SHARE_CALLS_MAX:
            raise RateLimitedError(
                f"{SHARE_CALLS_MAX} calls of {job} are in progress; wait for the answer to one of "
                f"them"
            )
        share.calls += 1
        return share

    async def _read(
        self,
        messages: AsyncIterator[bytes],
        context: Context,
        deserialize: Callable[[bytes], Any],
    ) -> tuple[Any, int]:
        """The one message of a call, and its size."""
        try:
            data = await asyncio.wait_for(anext(messages), RECEIVE_S)
            return deserialize(data), len(data)
        except TimeoutError:
            error = ProtocolError(f"the call's request did not come within {RECEIVE_S:.0f} s")
        except StopAsyncIteration:
            error = ProtocolError("the call ended without a request")
        except DecodeError as cause:
            error = ProtocolError(f"the call's request cannot be decoded: {cause}")
        await self._gatekeeper.refuse(None, context, error)
        raise AssertionError("refuse() raises")
