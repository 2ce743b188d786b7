"""The Control stream over a real connection: what daemons say reaches the loop, and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio

from holdfast_core.inspections import NAME_CHARACTERS_MAX
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.control.server import ASKING_S, ControlServer
from holdfast_protos import codec, control_pb2, control_pb2_grpc, values_pb2

WAIT_S = 30.0


def membership(epoch: int, revision: int = 0) -> Membership:
    places = tuple(
        Member(index=i, node=f"n{i}", memory_id=f"m{i}", peer_address="a:1", bulk_address="a:2")
        for i in range(2)
    )
    return Membership(
        job="default.job",
        epoch=epoch,
        revision=revision,
        members=places,
        nproc_per_node=1,
        groups=((0, 1),),
    )


class Daemon:
    """The far side of a stream: sends what it is asked to, keeps what it receives."""

    def __init__(self, node: str, port: int, *, version: int = codec.PROTOCOL_VERSION) -> None:
        self.node, self._port, self._version = node, port, version
        self._beats: asyncio.Queue[control_pb2.Heartbeat] = asyncio.Queue()
        self.received: list[control_pb2.ControlMessage] = []
        self._changed = asyncio.Condition()
        self.error: grpc.aio.AioRpcError | None = None
        self.ended = asyncio.Event()

    async def converse(self) -> None:
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
                stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(channel)
                async for message in stub.Connect(self._heartbeats()):
                    async with self._changed:
                        self.received.append(message)
                        self._changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self.ended.set()

    async def _heartbeats(self) -> AsyncIterator[control_pb2.Heartbeat]:
        while True:
            yield await self._beats.get()

    def beat(self, *jobs: control_pb2.JobState, memory_id: str = "m") -> None:
        self._beats.put_nowait(
            control_pb2.Heartbeat(
                protocol_version=self._version, node=self.node, memory_id=memory_id, jobs=jobs
            )
        )

    async def receives(self, wanted: Callable[[control_pb2.ControlMessage], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: any(map(wanted, self.received)))


class Loop:
    """The near side: a server, and how often it called for a look."""

    def __init__(self) -> None:
        self.calls, self.passed_s = 0, 0.0
        """Time that the server thinks has passed."""
        self._called = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.server = ControlServer(
            heartbeat_s=0.5,
            clock=lambda: self.passed_s,
            on_evidence=self._on_evidence,
        )
        self.port = 0

    def _on_evidence(self, jobs: frozenset[str]) -> None:
        self.calls += 1
        self.spawn(self._tell())

    async def _tell(self) -> None:
        async with self._called:
            self._called.notify_all()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def daemon(self, node: str, *, version: int = codec.PROTOCOL_VERSION) -> Daemon:
        daemon = Daemon(node, self.port, version=version)
        self.spawn(daemon.converse())
        return daemon

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._called:
            await self._called.wait_for(condition)

    async def close(self) -> None:
        await self.server.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def listening() -> AsyncIterator[Loop]:
    loop = Loop()
    loop.port = await loop.server.start("127.0.0.1")
    try:
        yield loop
    finally:
        await loop.close()


def state(
    epoch: int, *, lost: bool = False, idle_s: float = 0.0, revision: int = 0
) -> control_pb2.JobState:
    return control_pb2.JobState(
        job="default.job",
        epoch=epoch,
        membership=codec.membership_to_proto(membership(epoch, revision)),
        ranks=[control_pb2.RankState(rank=0, state="HEALTHY", lost=lost, idle_s=idle_s)],
    )


def is_membership(epoch: int, revision: int = 0) -> Callable[[control_pb2.ControlMessage], bool]:
    def matches(message: control_pb2.ControlMessage) -> bool:
        found = message.membership
        return message.HasField("membership") and (found.epoch, found.revision) == (epoch, revision)

    return matches


def test_a_daemon_is_welcomed_with_the_heartbeat_interval_and_becomes_a_view() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            daemon = loop.daemon("n0")
            daemon.beat(state(3))
            await daemon.receives(lambda message: message.welcome.heartbeat_s == 0.5)
            await loop.until(lambda: "n0" in loop.server.views("default.job"))
            view = loop.server.views("default.job")["n0"]
            assert view.connected and view.job is not None and view.job.epoch == 3
            assert view.job.membership == membership(3)
            assert loop.server.views("default.other")["n0"].job is None

    asyncio.run(scenario())


def test_evidence_calls_for_a_look_and_the_passing_of_time_does_not() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            daemon = loop.daemon("n0")
            daemon.beat(state(1))
            await loop.until(lambda: loop.calls == 1)
            daemon.beat(state(1, idle_s=1.0))
            daemon.beat(state(1, idle_s=2.0))
            began = time.monotonic()
            daemon.beat(state(1, idle_s=2.0, lost=True))
            await loop.until(lambda: loop.calls > 1)
            print(f"a lost rank called for a look after {1e3 * (time.monotonic() - began):.1f} ms")
            assert loop.calls == 2
            job = loop.server.views("default.job")["n0"].job
            assert job is not None and job.ranks[0].lost and job.ranks[0].idle_s == 2.0

    asyncio.run(scenario())


def test_a_membership_is_sent_to_its_members_and_to_daemons_that_have_an_older_one() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            member, fenced, spare = (loop.daemon(name) for name in ("n0", "n8", "n9"))
            member.beat()
            fenced.beat(state(1))
            spare.beat()
            await loop.until(lambda: len(loop.server.views("x")) == 3)
            loop.server.publish(membership(2))
            await member.receives(is_membership(2))
            await fenced.receives(is_membership(2))
            loop.server.drop("default.job")
            spare.beat(state(2))
            await spare.receives(lambda message: message.drop.job == "default.job")
            assert not any(map(is_membership(2), spare.received))

    asyncio.run(scenario())


def test_a_copy_is_requested_from_the_daemons_that_hold_something_of_the_job() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            members, spare = [loop.daemon(name) for name in ("n0", "n1")], loop.daemon("n9")
            for member in members:
                member.beat(state(1))
            spare.beat()
            await loop.until(lambda: len(loop.server.views("x")) == 3)
            loop.server.persist("default.other")
            loop.server.persist("default.job")
            for member in members:
                await member.receives(lambda message: message.persist.job == "default.job")
                assert not any(m.persist.job == "default.other" for m in member.received)
            loop.server.set_heartbeat_s(7.0)
            await spare.receives(lambda message: message.welcome.heartbeat_s == 7.0)
            assert not any(message.HasField("persist") for message in spare.received)

    asyncio.run(scenario())


def test_a_daemon_that_comes_back_is_brought_up_to_date() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            loop.server.publish(membership(4, revision=2))
            daemon = loop.daemon("n1")
            daemon.beat(state(4, revision=1))
            await daemon.receives(is_membership(4, revision=2))

    asyncio.run(scenario())


def test_a_membership_is_not_repeated_to_a_daemon_before_it_can_answer() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            daemon = loop.daemon("n0")
            daemon.beat()
            await loop.until(lambda: loop.calls == 1)
            loop.server.publish(membership(2))
            loop.server.publish(membership(2))  # as every look does until all daemons have it
            loop.server.publish(membership(3))
            await daemon.receives(is_membership(3))
            assert sum(map(is_membership(2), daemon.received)) == 1
            loop.passed_s = 60.0
            loop.server.publish(membership(3))
            loop.server.publish(membership(4))
            await daemon.receives(is_membership(4))
            assert sum(map(is_membership(3), daemon.received)) == 2

    asyncio.run(scenario())


def test_a_newer_stream_of_a_node_ends_the_older_one() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            older = loop.daemon("n0")
            older.beat(memory_id="old")
            await loop.until(lambda: loop.calls == 1)
            loop.passed_s = 5.0
            newer = loop.daemon("n0")
            newer.beat(memory_id="new")
            async with asyncio.timeout(WAIT_S):
                await older.ended.wait()
            view = loop.server.views("x")["n0"]
            assert view.connected and view.memory_id == "new"
            assert (view.first_heard_at, view.heartbeat_at) == (0.0, 5.0)

    asyncio.run(scenario())


def test_a_stream_that_breaks_is_evidence() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            daemon = Daemon("n0", loop.port)
            stream = loop.spawn(daemon.converse())
            daemon.beat()
            await loop.until(lambda: loop.calls == 1)
            stream.cancel()
            await loop.until(lambda: not loop.server.views("x")["n0"].connected)

    asyncio.run(scenario())


def test_a_stream_that_breaks_while_the_daemon_is_welcomed_is_evidence() -> None:
    """The service's own half: when the first answer is on its way, only this can be stopped at a
    certain moment."""

    async def scenario() -> None:
        async with listening() as loop:
            daemon = Daemon("n0", loop.port)
            daemon.beat()
            stream: Any = loop.server.Connect(daemon._heartbeats(), cast("Any", None))
            await anext(stream)
            await loop.until(lambda: loop.calls == 1)
            assert loop.server.views("x")["n0"].connected
            await stream.aclose()
            assert not loop.server.views("x")["n0"].connected and loop.calls == 2

    asyncio.run(scenario())


def test_a_daemon_of_another_protocol_version_is_refused_with_both_versions() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            daemon = loop.daemon("n0", version=99)
            daemon.beat()
            async with asyncio.timeout(WAIT_S):
                await daemon.ended.wait()
            assert daemon.error is not None
            assert daemon.error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "protocol version 99" in (daemon.error.details() or "")
            assert loop.server.views("x") == {}

    asyncio.run(scenario())


def inspected(number: int, *, answered: bool = False) -> control_pb2.JobState:
    found = state(1)
    processes = [values_pb2.InspectedProcess(rank=0, state="T", kernel="\x1b" + "k" * 500)]
    found.inspection.CopyFrom(
        control_pb2.InspectionState(
            number=number, age_s=1.0, answered=answered, processes=processes if answered else ()
        )
    )
    return found


def test_an_inspection_is_asked_for_until_the_daemon_reports_it_or_seems_too_old() -> None:
    def is_lost(loop: Loop, node: str) -> bool:
        job = loop.server.views("default.job")[node].job
        return job is not None and job.ranks[0].lost

    def requests(daemon: Daemon) -> list[tuple[int, int]]:
        found = [m.inspect for m in daemon.received if m.HasField("inspect")]
        return [(each.epoch, each.number) for each in found]

    async def scenario() -> None:
        async with listening() as loop:
            new, old, behind = [loop.daemon(name) for name in ("n0", "n1", "n2")]
            new.beat(state(1))
            old.beat(state(1))
            behind.beat(state(0))
            await loop.until(lambda: len(loop.server.views("x")) == 3)
            loop.server.inspect("default.job", 1, 4)
            for daemon in (new, old):
                await daemon.receives(lambda message: message.inspect.number == 4)
            # One that reports it is not asked again, the other is for a while.
            new.beat(inspected(4))
            new.beat(inspected(4, answered=True))
            old.beat(state(1, idle_s=1.0))
            await old.receives(lambda _: len(requests(old)) == 2)
            loop.passed_s = ASKING_S
            old.beat(state(1, lost=True))
            await loop.until(lambda: is_lost(loop, "n1"))
            loop.server.set_heartbeat_s(7.0)
            for daemon in (new, old, behind):
                await daemon.receives(lambda message: message.welcome.heartbeat_s == 7.0)
            assert requests(new) == [(1, 4)]
            assert requests(old) == [(1, 4), (1, 4)]
            assert requests(behind) == []

    asyncio.run(scenario())


def test_the_answer_to_an_inspection_wakes_the_loop_and_is_bounded() -> None:
    async def scenario() -> None:
        async with listening() as loop:
            daemon = loop.daemon("n0")
            daemon.beat(inspected(4))
            await loop.until(lambda: "n0" in loop.server.views("default.job"))
            view = loop.server.views("default.job")["n0"].job
            assert view is not None and view.inspection is not None
            assert (view.inspection.number, view.inspection.processes) == (4, None)
            calls = loop.calls
            daemon.beat(inspected(4, answered=True))
            await loop.until(lambda: loop.calls > calls)
            view = loop.server.views("default.job")["n0"].job
            assert view is not None and view.inspection is not None
            assert view.inspection.processes is not None
            (process,) = view.inspection.processes
            assert (process.state, process.kernel) == ("T", "?" + "k" * (NAME_CHARACTERS_MAX - 1))

    asyncio.run(scenario())
