"""The Control stream: heartbeats up, memberships down.

The daemon dials the control loop until it answers, and again whenever the stream ends. While the
control loop is away, training, snapshots and protection continue with the last memberships.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc
import grpc.aio

from holdfast_core.errors import HoldfastError
from holdfast_daemon.logs import OncePerCause, bind
from holdfast_daemon.schedule import until_next
from holdfast_protos import control_pb2, control_pb2_grpc, values_pb2
from holdfast_protos.changes import changed
from holdfast_protos.connections import channels
from holdfast_protos.connections.identity import Identity, Role, aio_channel

HEARTBEAT_S = 1.0
SOON_S = 0.02
"""Delay before evidence is sent, so that one heartbeat carries all that arrives together."""
RECONNECT_S_MIN, RECONNECT_S_MAX = 0.1, 2.0
PING_MS = 5000
"""Interval at which a silent control loop is pinged."""

_log = bind(logging.getLogger(__name__))


class ControlClient:
    """Keeps a Control stream open to `address` until it is closed."""

    def __init__(
        self,
        address: str,
        *,
        heartbeat: Callable[[], control_pb2.Heartbeat],
        receive: Callable[[control_pb2.ControlMessage], None],
        identity: Identity | None = None,
    ) -> None:
        self._address, self._identity = address, identity
        self._heartbeat, self._receive = heartbeat, receive
        self._urgent = asyncio.Event()
        self._pause_s = HEARTBEAT_S
        self._task: asyncio.Task[None] | None = None
        self._complaints = OncePerCause(_log)
        self.connected = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Send a heartbeat soon, because the engine's evidence has changed."""
        self._urgent.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        pause_s = RECONNECT_S_MIN
        while True:
            try:
                await self._converse()
                pause_s = RECONNECT_S_MIN
            except grpc.aio.AioRpcError as error:
                if self.connected:
                    pause_s = RECONNECT_S_MIN
                self._complaints.warning(
                    "control_unreachable", cause=error.code().name, address=self._address
                )
            except Exception:
                _log.exception("control_failed")
            self.connected = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    async def _converse(self) -> None:
        options = channels.channel_options(ping_ms=PING_MS)
        async with aio_channel(self._address, self._identity, Role.OPERATOR, options) as channel:
            stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(channel)
            memberships: dict[str, values_pb2.Membership] = {}
            async for message in stub.Connect(self._heartbeats(memberships)):
                self.connected = True
                if message.HasField("welcome") and message.welcome.heartbeat_s > 0:
                    self._pause_s = message.welcome.heartbeat_s
                try:
                    self._receive(completed(message, memberships))
                except HoldfastError as error:
                    _log.error("control_message_refused", cause=str(error))
                except Exception:
                    # A defect of ours in one job must not cut the node off for all others.
                    _log.exception("control_message_failed")

    async def _heartbeats(
        self, known: dict[str, values_pb2.Membership]
    ) -> AsyncIterator[control_pb2.Heartbeat]:
        while True:
            self._urgent.clear()
            try:
                heartbeat = self._heartbeat()
                _leave_out_known(heartbeat, known)
            except Exception:
                # gRPC would cancel the task that reads this stream, and with it the connection.
                _log.exception("heartbeat_failed")
                return
            yield heartbeat
            with suppress(TimeoutError):
                now = asyncio.get_running_loop().time()
                async with asyncio.timeout(until_next(self._pause_s, now)):
                    await self._urgent.wait()
                    await asyncio.sleep(SOON_S)


def _leave_out_known(
    heartbeat: control_pb2.Heartbeat, known: dict[str, values_pb2.Membership]
) -> None:
    """Leave out memberships that both sides have: that of a large job is larger than all else.
    `known` is brought up to date; it maps each job to the last membership that passed on this
    stream, in either direction."""
    for state in heartbeat.jobs:
        if not state.HasField("membership"):
            continue
        state.revision = state.membership.revision
        if known.get(state.job) == state.membership:
            state.ClearField("membership")
        else:
            known[state.job] = values_pb2.Membership()
            known[state.job].CopyFrom(state.membership)


def completed(
    message: control_pb2.ControlMessage, known: dict[str, values_pb2.Membership]
) -> control_pb2.ControlMessage:
    """The message, with a change of a membership replaced by the whole new membership if its base
    is in `known`, which is updated."""
    if message.HasField("change"):
        base = known.get(message.change.job)
        whole = None if base is None else changed(base, message.change)
        if whole is None:
            return message
        message = control_pb2.ControlMessage(membership=whole)
    if message.HasField("membership"):
        known[message.membership.job] = message.membership
    elif message.HasField("drop"):
        known.pop(message.drop.job, None)
    return message
