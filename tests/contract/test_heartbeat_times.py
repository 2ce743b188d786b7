"""When a daemon's real client speaks to the control loop: at once of evidence, seldom of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from holdfast_daemon.control import PROGRESS_S, ControlClient
from holdfast_protos import codec, control_pb2, control_pb2_grpc

WAIT_S = 30.0
NEVER_S = 3600.0


class Listener(control_pb2_grpc.ControlServicer):
    """A control loop that wants to hear nothing unasked, and notes when it hears something."""

    def __init__(self) -> None:
        self.heard_s: list[float] = []
        self._changed = asyncio.Condition()

    async def Connect(
        self, request_iterator: AsyncIterator[control_pb2.Heartbeat], context: object
    ) -> AsyncIterator[control_pb2.ControlMessage]:
        welcome = control_pb2.Welcome(heartbeat_s=NEVER_S)
        yield control_pb2.ControlMessage(welcome=welcome)
        async for _ in request_iterator:
            async with self._changed:
                self.heard_s.append(asyncio.get_running_loop().time())
                self._changed.notify_all()

    async def heard(self, times: int) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: len(self.heard_s) >= times)


def with_a_client(test: Callable[[Listener, ControlClient], Awaitable[None]]) -> None:
    async def run() -> None:
        listener, server = Listener(), grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(listener, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        welcomed = asyncio.Event()
        beat = control_pb2.Heartbeat(protocol_version=codec.PROTOCOL_VERSION, node="n")
        client = ControlClient(
            f"127.0.0.1:{port}", heartbeat=lambda: beat, receive=lambda _: welcomed.set()
        )
        client.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await welcomed.wait()
            client.wake()  # the pause that the welcome names begins after the next heartbeat
            await listener.heard(2)
            await test(listener, client)
        finally:
            await client.close()
            await server.stop(grace=None)

    asyncio.run(run())


def test_progress_is_told_once_and_not_soon_after_the_last_heartbeat() -> None:
    async def test(listener: Listener, client: ControlClient) -> None:
        sent_before_s = listener.heard_s[-1]
        for _ in range(100):
            client.progressed()
        await listener.heard(3)
        # What is measured is the arrival of both, which takes a little of the pause away.
        assert listener.heard_s[2] - sent_before_s > PROGRESS_S / 2
        client.wake()
        await listener.heard(4)
        assert len(listener.heard_s) == 4

    with_a_client(test)


def test_evidence_does_not_wait_for_the_time_of_progress() -> None:
    async def test(listener: Listener, client: ControlClient) -> None:
        client.progressed()
        client.wake()
        await listener.heard(3)
        client.wake()
        await listener.heard(4)
        # The heartbeat that told of the evidence told of the progress, too.
        assert len(listener.heard_s) == 4

    with_a_client(test)


def test_progress_is_told_again_after_it_was_told() -> None:
    async def test(listener: Listener, client: ControlClient) -> None:
        for heartbeats in range(3, 6):
            client.progressed()
            await listener.heard(heartbeats)

    with_a_client(test)
