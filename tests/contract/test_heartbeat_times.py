"""When a daemon's real client speaks to the control loop before its next heartbeat is due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from holdfast_daemon.net import control
from holdfast_daemon.net.control import ControlClient
from holdfast_protos import codec, control_pb2, control_pb2_grpc
from holdfast_protos.connections.identity import aio_channel

WAIT_S = 30.0
NEVER_S = 1e9


class Listener(control_pb2_grpc.ControlServicer):
    """A control loop that asks for no heartbeats, and counts those that come all the same."""

    def __init__(self) -> None:
        self.times = 0
        self.defects: list[Exception] = []
        """What the next heartbeats fail with."""
        self._changed = asyncio.Condition()

    async def Connect(
        self, request_iterator: AsyncIterator[control_pb2.Heartbeat], context: object
    ) -> AsyncIterator[control_pb2.ControlMessage]:
        welcome = control_pb2.Welcome(heartbeat_s=NEVER_S)
        yield control_pb2.ControlMessage(welcome=welcome)
        async for _ in request_iterator:
            async with self._changed:
                self.times += 1
                self._changed.notify_all()

    async def until_received(self, times: int) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self.times >= times)


def with_a_client(test: Callable[[Listener, ControlClient], Awaitable[None]]) -> None:
    async def run() -> None:
        listener, server = Listener(), grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(listener, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        welcomed = asyncio.Event()
        beat = control_pb2.Heartbeat(protocol_version=codec.PROTOCOL_VERSION, node="n")

        def heartbeat() -> control_pb2.Heartbeat:
            if listener.defects:
                raise listener.defects.pop()
            return beat

        client = ControlClient(
            f"127.0.0.1:{port}", heartbeat=heartbeat, receive=lambda _: welcomed.set()
        )
        client.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await welcomed.wait()
            client.wake()  # the pause that the welcome names begins after the next heartbeat
            await listener.until_received(2)
            await test(listener, client)
        finally:
            await client.close()
            await server.stop(grace=None)

    asyncio.run(run())


def test_evidence_does_not_wait_until_a_heartbeat_is_due() -> None:
    async def test(listener: Listener, client: ControlClient) -> None:
        for heartbeats in range(3, 6):
            client.wake()
            await listener.until_received(heartbeats)

    with_a_client(test)


def test_a_heartbeat_that_fails_is_sent_on_the_next_stream() -> None:
    async def test(listener: Listener, client: ControlClient) -> None:
        listener.defects.append(RuntimeError("a defect"))
        client.wake()
        await listener.until_received(3)
        client.wake()
        await listener.until_received(4)

    with_a_client(test)


def test_a_connection_that_cannot_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, connect = 0, aio_channel

    def fail_first(*given: Any) -> grpc.aio.Channel:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError("no certificate")
        return connect(*given)

    async def test(listener: Listener, client: ControlClient) -> None:
        assert tries == 2

    monkeypatch.setattr(control, "aio_channel", fail_first)
    with_a_client(test)


def test_evidence_that_comes_together_is_sent_together() -> None:
    async def test(listener: Listener, client: ControlClient) -> None:
        for _ in range(100):
            client.wake()
        await listener.until_received(3)
        client.wake()
        await listener.until_received(4)
        assert listener.times == 4

    with_a_client(test)
