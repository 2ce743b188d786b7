"""A membership passes once on a stream: after that the real client of a daemon and the real server
speak of it by its version, and of the next one by what differs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import grpc.aio

from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon.net.control import ControlClient
from holdfast_operator.control.server import ControlServer
from holdfast_protos import codec, control_pb2, control_pb2_grpc

WAIT_S = 30.0
FIRST = Membership(
    job="default.job",
    epoch=1,
    members=tuple(
        Member(index=i, node=f"n{i}", memory_id=f"m{i}", peer_address="a:1", bulk_address="a:2")
        for i in range(2)
    ),
    nproc_per_node=1,
    groups=((0, 1),),
)


def following(before: Membership) -> Membership:
    return replace(before, epoch=before.epoch + 1)


def moved(place: Member) -> Member:
    return replace(place, bulk_address=f"{place.bulk_address}0") if place.index else place


class Line:
    """A server, and a daemon that takes each membership as a real one does; with `deaf`, none."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        """Time that the server thinks has passed."""
        self.held: Membership | None = None
        self.deaf = False
        self.missed = 0
        """Memberships that came down while it was deaf."""
        self.kinds: list[str] = []
        """Of the messages that came down."""
        self.whole_up = 0
        """Heartbeats with a membership in them."""
        self._changed = asyncio.Condition()
        self.server = ControlServer(
            heartbeat_s=0.05, clock=lambda: self.passed_s, on_evidence=lambda jobs: None
        )
        self._client: ControlClient | None = None

    def _heartbeat(self) -> control_pb2.Heartbeat:
        found = control_pb2.Heartbeat(
            protocol_version=codec.PROTOCOL_VERSION, node="n0", memory_id="m0"
        )
        if self.held is not None:
            state = found.jobs.add(job=self.held.job, epoch=self.held.epoch)
            state.membership.CopyFrom(codec.membership_to_proto(self.held))
        return found

    def _receive(self, message: control_pb2.ControlMessage) -> None:
        if message.HasField("membership") and self.deaf:
            self.missed += 1
        elif message.HasField("membership"):
            self.held = codec.membership_from_proto(message.membership)
        elif message.HasField("drop"):
            self.held = None

    async def notify(self) -> None:
        """Wake those that wait: something has passed."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def reports(self, membership: Membership) -> None:
        """The server knows that the daemon has it."""

        def known() -> bool:
            view = self.server.view("n0", membership.job)
            return view is not None and view.job is not None and view.job.membership == membership

        await self.until(known)

    def connect(self, port: int) -> None:
        self._client = ControlClient(
            f"127.0.0.1:{port}", heartbeat=self._heartbeat, receive=self._receive
        )
        self._client.start()

    async def close(self) -> None:
        assert self._client is not None
        await self._client.close()


class Spy(control_pb2_grpc.ControlServicer):
    """Between the daemon and the server: counts what passes."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def Connect(
        self, request_iterator: AsyncIterator[control_pb2.Heartbeat], context: object
    ) -> AsyncIterator[control_pb2.ControlMessage]:
        async def beats() -> AsyncIterator[control_pb2.Heartbeat]:
            async for beat in request_iterator:
                self._line.whole_up += any(state.HasField("membership") for state in beat.jobs)
                yield beat
                await self._line.notify()  # the server has taken it in

        async for encoded in self._line.server.Connect(beats(), context):  # type: ignore[arg-type]
            message = control_pb2.ControlMessage.FromString(encoded)
            self._line.kinds.append(message.WhichOneof("message") or "")
            yield message
            await self._line.notify()


def on_a_line(test: Callable[[Line], Awaitable[None]]) -> None:
    async def run() -> None:
        line = Line()
        server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(Spy(line), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        line.connect(port)
        try:
            await test(line)
        finally:
            await line.close()
            await server.stop(grace=None)

    asyncio.run(run())


def test_a_membership_goes_down_once_and_the_next_ones_as_changes() -> None:
    async def test(line: Line) -> None:
        newest = FIRST
        for _ in range(4):
            line.server.publish(newest)
            await line.reports(newest)
            assert line.held == newest
            newest = replace(following(newest), members=tuple(map(moved, newest.members)))
        assert line.kinds.count("membership") == 1
        assert line.kinds.count("change") == 3
        assert line.whole_up == 0

    on_a_line(test)


def test_one_that_the_daemon_has_kept_goes_up_once_and_the_next_one_down_as_a_change() -> None:
    async def test(line: Line) -> None:
        line.held = FIRST
        await line.reports(FIRST)
        line.server.publish(following(FIRST))
        await line.reports(following(FIRST))
        assert line.whole_up == 1
        assert "membership" not in line.kinds

    on_a_line(test)


def test_a_daemon_that_has_another_of_that_version_reports_it() -> None:
    async def test(line: Line) -> None:
        line.server.publish(FIRST)
        await line.reports(FIRST)
        line.held = replace(FIRST, members=tuple(map(moved, FIRST.members)))
        await line.reports(line.held)
        assert line.whole_up == 1
        line.server.publish(following(FIRST))
        await line.reports(following(FIRST))
        assert line.held == following(FIRST)

    on_a_line(test)


def test_a_daemon_that_refuses_a_change_is_sent_the_whole_later() -> None:
    async def test(line: Line) -> None:
        line.server.publish(FIRST)
        await line.reports(FIRST)
        line.deaf = True
        line.server.publish(following(FIRST))
        await line.until(lambda: line.missed == 1)
        line.deaf = False
        line.passed_s = 10.0
        await line.reports(following(FIRST))
        assert line.kinds.count("membership") == 2
        assert line.kinds.count("change") == 1

    on_a_line(test)


def test_a_job_that_ended_and_began_anew_is_sent_whole() -> None:
    async def test(line: Line) -> None:
        line.server.publish(FIRST)
        await line.reports(FIRST)
        line.server.drop(FIRST.job)
        await line.until(lambda: line.held is None)
        line.server.publish(following(FIRST))
        await line.reports(following(FIRST))
        assert line.kinds.count("membership") == 2

    on_a_line(test)
