"""One Control server for many jobs: each is woken for itself, and pays for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.control.server import ControlServer
from holdfast_protos import codec, control_pb2, control_pb2_grpc

WAIT_S = 30.0


def membership(job: str, *nodes: str, epoch: int = 1) -> Membership:
    members = tuple(
        Member(index=i, node=n, memory_id="m", peer_address="a:1", bulk_address="a:2")
        for i, n in enumerate(nodes)
    )
    return Membership(
        job=job,
        epoch=epoch,
        members=members,
        nproc_per_node=1,
        groups=(tuple(range(len(nodes))),),
    )


class Line:
    """One daemon's stream, and what the server made of it."""

    def __init__(self) -> None:
        self.woken: list[frozenset[str]] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.server = ControlServer(heartbeat_s=1.0, clock=lambda: 0.0, on_evidence=self._evidence)
        self._beats: asyncio.Queue[control_pb2.Heartbeat | None] = asyncio.Queue()
        self.received: list[control_pb2.ControlMessage] = []

    def _evidence(self, jobs: frozenset[str]) -> None:
        self.woken.append(jobs)
        self._spawn(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def converse(self, port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(channel)

            async def beats() -> AsyncIterator[control_pb2.Heartbeat]:
                while (beat := await self._beats.get()) is not None:
                    yield beat

            async for message in stub.Connect(beats()):
                self.received.append(message)
                await self._tell()

    def beat(self, *states: control_pb2.JobState) -> None:
        self._beats.put_nowait(
            control_pb2.Heartbeat(
                protocol_version=codec.PROTOCOL_VERSION, node="n0", memory_id="m", jobs=states
            )
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def run(self, test: Callable[[Line], Awaitable[None]]) -> None:
        port = await self.server.start("127.0.0.1")
        self._spawn(self.converse(port))
        try:
            await test(self)
        finally:
            self._beats.put_nowait(None)
            await self.server.stop()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def on_a_line(test: Callable[[Line], Awaitable[None]]) -> None:
    async def run() -> None:
        await Line().run(test)

    asyncio.run(run())


def state(job: str, *, lost: bool = False, held: Membership | None = None) -> control_pb2.JobState:
    found = control_pb2.JobState(job=job, epoch=1)
    found.ranks.add(rank=0, lost=lost)
    if held is not None:
        found.membership.CopyFrom(codec.membership_to_proto(held))
    return found


def test_only_the_job_that_something_happened_to_is_woken() -> None:
    async def test(line: Line) -> None:
        line.beat(state("a.a"), state("b.b"))
        await line.until(lambda: frozenset({"a.a", "b.b"}) in line.woken)
        before = len(line.woken)
        line.beat(state("a.a"), state("b.b"))
        line.beat(state("a.a", lost=True), state("b.b"))
        await line.until(lambda: len(line.woken) > before)
        assert line.woken[before:] == [frozenset({"a.a"})]

    on_a_line(test)


def test_a_job_whose_member_should_be_there_is_woken_when_the_daemon_comes() -> None:
    async def test(line: Line) -> None:
        line.server.publish(membership("a.a", "n0", "n1"))
        line.server.publish(membership("b.b", "n1", "n2"))
        line.beat()
        await line.until(lambda: bool(line.woken))
        assert line.woken[0] == frozenset({"a.a"})
        assert line.server.jobs_on("n0") == {"a.a"}
        await line.until(lambda: any(m.HasField("membership") for m in line.received))
        sent = [m.membership.job for m in line.received if m.HasField("membership")]
        assert sent == ["a.a"]

    on_a_line(test)


def test_a_membership_that_was_sent_once_is_remembered_for_its_epoch() -> None:
    async def test(line: Line) -> None:
        known = membership("a.a", "n0", "n1")
        line.beat(state("a.a", held=known))
        await line.until(lambda: bool(line.woken))
        line.beat(state("a.a", lost=True))
        await line.until(lambda: len(line.woken) > 1)
        view = line.server.view("n0", "a.a")
        assert view is not None
        assert view.job is not None
        assert view.job.membership == known
        newer = state("a.a")
        newer.epoch = 2
        line.beat(newer)
        await line.until(lambda: len(line.woken) > 2)
        view = line.server.view("n0", "a.a")
        assert view is not None
        assert view.job is not None
        assert view.job.membership is None

    on_a_line(test)


def test_the_list_of_jobs_that_nodes_hold_follows_the_heartbeats() -> None:
    async def test(line: Line) -> None:
        line.beat(state("a.a"), state("b.b"))
        await line.until(lambda: line.server.holders("a.a") == {"n0"})
        assert line.server.held_jobs() == {"a.a", "b.b"}
        line.server.drop("a.a")
        await line.until(lambda: any(m.HasField("drop") for m in line.received))
        line.beat(state("b.b"))
        await line.until(lambda: not line.server.holders("a.a"))
        assert line.server.held_jobs() == {"b.b"}

    on_a_line(test)


def test_what_is_newer_than_the_epoch_that_was_given_up_is_not_dropped() -> None:
    async def test(line: Line) -> None:
        line.server.drop("a.a", up_to_epoch=1)
        line.server.drop("b.b", up_to_epoch=0)
        line.server.drop("c.c")
        line.beat(state("a.a"), state("b.b"), state("c.c"))
        await line.until(lambda: sum(m.HasField("drop") for m in line.received) == 2)
        line.server.set_heartbeat_s(0.25)  # comes after whatever else was sent
        await line.until(lambda: any(m.welcome.heartbeat_s == 0.25 for m in line.received))
        assert {m.drop.job for m in line.received if m.HasField("drop")} == {"a.a", "c.c"}

    on_a_line(test)


def test_daemons_receive_another_pace_at_once() -> None:
    async def test(line: Line) -> None:
        line.beat()
        await line.until(lambda: bool(line.woken))
        line.server.set_heartbeat_s(0.25)
        await line.until(lambda: any(m.welcome.heartbeat_s == 0.25 for m in line.received))

    on_a_line(test)
