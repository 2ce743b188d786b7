"""A real daemon drops what it holds of a job: when it is told to, and when it hears of a later job
of the same name. A defect on the way ends neither the job nor the daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast_core.errors import StorageError
from holdfast_core.snapshots.layouts import Layout, encode_layout
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon.engine.effects import Effect
from holdfast_daemon.node import Node
from holdfast_daemon.settings import DaemonSettings
from holdfast_operator.control.server import ControlServer

WAIT_S = 100.0
JOB = "team.moe"


class Line:
    """The daemon of node n0, and a control loop; the first job of the name is in epoch 7."""

    def __init__(self, root: Path, port: int, server: ControlServer) -> None:
        self.server = server
        self.node = Node(DaemonSettings(root=root, node="n0", control=f"127.0.0.1:{port}"))

    def publish(self, uid: str, epoch: int, *nodes: str) -> None:
        members = tuple(
            Member(
                index=index,
                node=node,
                memory_id=self.node.storage.memory_id,
                peer_address="127.0.0.1:9",
                bulk_address="127.0.0.1:9",
            )
            for index, node in enumerate(nodes)
        )
        groups = (tuple(range(len(nodes))),)
        membership = Membership(
            job=JOB, uid=uid, epoch=epoch, members=members, nproc_per_node=1, groups=groups
        )
        self.server.publish(membership)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.02)

    @property
    def told(self) -> tuple[str, int] | None:
        """Uid and epoch of what the control loop knows to be on the node."""
        view = self.server.view("n0", JOB)
        return None if view is None or view.job is None else (view.job.uid, view.job.epoch)

    @property
    def used_bytes(self) -> int:
        return self.node.storage.reserved_bytes


def on_a_line(root: Path, test: Callable[[Line], Awaitable[None]]) -> None:
    async def run() -> None:
        server = ControlServer(heartbeat_s=0.1, clock=time.monotonic, on_evidence=lambda jobs: None)
        port = await server.start("127.0.0.1")
        line = Line(root, port, server)
        await line.node.start()
        try:
            line.publish("earlier", 7, "n0", "n1")
            await line.until(lambda: line.told == ("earlier", 7))
            layout = Layout(
                rank=0,
                world_size=2,
                topology="dp2",
                entries=(),
                extras_offset=0,
                extras_capacity=4096,
            )
            line.node.hosts[JOB].storage.allocate(0, encode_layout(layout))
            assert line.used_bytes > 0
            server.forget(JOB)  # the operator is another one
            await test(line)
        finally:
            await line.node.stop()
            await server.stop()

    asyncio.run(run())


def test_memory_that_cannot_be_freed_at_once_is_freed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0

    async def test(line: Line) -> None:
        storage = line.node.hosts[JOB].storage
        drop = storage.drop

        def fail_first() -> None:
            nonlocal failures
            failures += 1
            if failures < 3:
                raise StorageError("busy")
            drop()

        monkeypatch.setattr(storage, "drop", fail_first)
        line.server.drop(JOB)
        await line.until(lambda: line.told is None)
        assert line.used_bytes > 0
        await line.until(lambda: line.used_bytes == 0)

    on_a_line(tmp_path / "memory", test)


def test_a_defect_in_one_message_does_not_cut_the_node_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(line: Line) -> None:
        with monkeypatch.context() as patched:
            patched.delattr(type(line.node.hosts[JOB]), "drop")
            line.server.drop(JOB)
            await line.until(lambda: JOB not in line.node.hosts)
            await line.until(lambda: line.told is None)
        line.server.forget(JOB)
        line.publish("later", 1, "n0", "n1")
        await line.until(lambda: line.told == ("later", 1))

    on_a_line(tmp_path / "memory", test)


def test_a_tick_that_fails_is_not_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = 0

    async def test(line: Line) -> None:
        engine = line.node.hosts[JOB].engine
        tick = engine.tick

        def fail_first(now: float) -> list[Effect]:
            nonlocal ticks
            ticks += 1
            if ticks == 1:
                raise RuntimeError("a defect")
            return tick(now)

        monkeypatch.setattr(engine, "tick", fail_first)
        await line.until(lambda: ticks > 2)

    on_a_line(tmp_path / "memory", test)


def test_a_later_job_on_the_node_begins_with_nothing(tmp_path: Path) -> None:
    async def test(line: Line) -> None:
        line.publish("later", 1, "n0", "n1")
        await line.until(lambda: line.told == ("later", 1))
        assert line.used_bytes == 0
        line.publish("later", 2, "n0", "n1")
        await line.until(lambda: line.told == ("later", 2))

    on_a_line(tmp_path / "memory", test)


def test_a_later_job_of_equal_epochs_is_another_one(tmp_path: Path) -> None:
    async def test(line: Line) -> None:
        line.publish("later", 7, "n0", "n1")
        await line.until(lambda: line.told == ("later", 7))
        assert line.used_bytes == 0

    on_a_line(tmp_path / "memory", test)


def test_a_node_without_a_member_of_the_later_job_is_freed(tmp_path: Path) -> None:
    async def test(line: Line) -> None:
        line.publish("later", 1, "n1", "n2")
        await line.until(lambda: line.told is None)
        assert line.used_bytes == 0

    on_a_line(tmp_path / "memory", test)


def test_a_job_without_a_membership_frees_the_earlier_one_alone(tmp_path: Path) -> None:
    async def test(line: Line) -> None:
        line.server.free_earlier(JOB, "earlier")
        line.server.free_earlier(JOB, "")
        line.publish("earlier", 8, "n0", "n1")
        await line.until(lambda: line.told == ("earlier", 8))
        assert line.used_bytes > 0
        line.server.forget(JOB)
        line.server.free_earlier(JOB, "later")
        await line.until(lambda: line.told is None)
        assert line.used_bytes == 0

    on_a_line(tmp_path / "memory", test)


def test_a_daemon_that_starts_again_knows_which_job_it_holds(tmp_path: Path) -> None:
    root = tmp_path / "memory"

    async def nothing(line: Line) -> None:
        pass

    on_a_line(root, nothing)

    async def again() -> None:
        server = ControlServer(heartbeat_s=0.1, clock=time.monotonic, on_evidence=lambda jobs: None)
        line = Line(root, await server.start("127.0.0.1"), server)
        await line.node.start()
        try:
            await line.until(lambda: line.told == ("earlier", 7))
        finally:
            await line.node.stop()
            await server.stop()

    asyncio.run(again())
