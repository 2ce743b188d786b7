"""A daemon that checks its node while no job is on it, and the control loop that learns of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast_core.idle_checks import IdleCheck
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon import settings
from holdfast_daemon.node import Node
from holdfast_daemon.observing import idle_checks
from holdfast_daemon.settings import DaemonSettings
from holdfast_host import idle_checks as checks_of_nodes
from holdfast_operator.control.server import ControlServer

WAIT_S = 100.0


def test_what_a_daemon_finds_reaches_the_control_loop_until_a_job_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[str], None]
) -> None:
    """The disk of the processes that check is broken, and is repaired later."""
    monkeypatch.setattr(settings, "IDLE_CHECK_S_MIN", 0.0)
    monkeypatch.setattr(idle_checks, "IDLE_S", 0.0)
    monkeypatch.setattr(idle_checks, "TURN_S", 0.05)
    monkeypatch.setattr(checks_of_nodes, "LIMIT_S", WAIT_S)
    urgent = "import os\nos.sched_setscheduler = lambda *_: None\n"  # on a busy machine, too
    plant(
        f"{urgent}import errno\n"
        "def fail(_):\n    raise OSError(errno.EIO, 'broken')\nos.fsync = fail\n"
    )

    async def run() -> None:
        server = ControlServer(heartbeat_s=0.1, clock=time.monotonic, on_evidence=lambda jobs: None)
        port = await server.start("127.0.0.1")
        node = Node(
            DaemonSettings(
                root=tmp_path / "memory",
                node="n0",
                control=f"127.0.0.1:{port}",
                idle_check_s=0.1,
            )
        )

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.02)

        def failed() -> list[str] | None:
            view = server.nodes().get("n0")
            if view is None or view.failed_checks is None:
                return None
            return [each.check for each in view.failed_checks]

        await node.start()
        try:
            await until(lambda: failed() is not None)
            assert failed() == [IdleCheck.SHARED_MEMORY, IdleCheck.DISK]
            member = Member(
                index=0,
                node="n0",
                memory_id=node.storage.memory_id,
                peer_address="a:1",
                bulk_address="a:2",
            )
            server.publish(
                Membership(
                    job="team.moe", epoch=1, members=(member,), nproc_per_node=1, groups=((0,),)
                )
            )
            await until(lambda: "team.moe" in node.hosts and failed() is None)
            plant(urgent)
            server.drop("team.moe")
            await until(lambda: failed() is not None)
            assert failed() == []
        finally:
            await node.stop()
            await server.stop()

    asyncio.run(run())
