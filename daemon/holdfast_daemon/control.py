"""The Control stream: heartbeats up, memberships down.

The daemon dials the control loop, again and again; while it is away, training, snapshots and
protection go on with what is known.
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
from holdfast_protos import control_pb2, control_pb2_grpc

HEARTBEAT_S = 1.0
SOON_S = 0.02
"""Evidence is sent this long after it was seen: one heartbeat carries what comes together."""
RECONNECT_S_MIN, RECONNECT_S_MAX = 0.1, 2.0

_log = bind(logging.getLogger(__name__))


class ControlClient:
    """Keeps a Control stream open to `address` until it is closed."""

    def __init__(
        self,
        address: str,
        *,
        heartbeat: Callable[[], control_pb2.Heartbeat],
        receive: Callable[[control_pb2.ControlMessage], None],
    ) -> None:
        self._address = address
        self._heartbeat, self._receive = heartbeat, receive
        self._news = asyncio.Event()
        self._pause_s = HEARTBEAT_S
        self._task: asyncio.Task[None] | None = None
        self._complaints = OncePerCause(_log)
        self.connected = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Something happened that the control loop should hear of at once."""
        self._news.set()

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
            self.connected = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    async def _converse(self) -> None:
        options = [
            ("grpc.keepalive_time_ms", 5000),
            ("grpc.keepalive_timeout_ms", 5000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(channel)
            async for message in stub.Connect(self._heartbeats()):
                self.connected = True
                if message.HasField("welcome") and message.welcome.heartbeat_s > 0:
                    self._pause_s = message.welcome.heartbeat_s
                try:
                    self._receive(message)
                except HoldfastError as error:
                    _log.error("control_message_refused", cause=str(error))

    async def _heartbeats(self) -> AsyncIterator[control_pb2.Heartbeat]:
        told: dict[str, tuple[int, int]] = {}
        while True:
            self._news.clear()
            heartbeat = self._heartbeat()
            _leave_out_known(heartbeat, told)
            yield heartbeat
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._news.wait()
                    await asyncio.sleep(SOON_S)


def _leave_out_known(heartbeat: control_pb2.Heartbeat, told: dict[str, tuple[int, int]]) -> None:
    """Send a membership once on each stream: that of a large job is larger than all else, and the
    far side remembers it. `told` is (epoch, revision) of each job, and is brought up to date."""
    current = {
        state.job: (state.membership.epoch, state.membership.revision)
        for state in heartbeat.jobs
        if state.HasField("membership")
    }
    for state in heartbeat.jobs:
        if state.job in current and current[state.job] == told.get(state.job):
            state.ClearField("membership")
    told.clear()
    told.update(current)
