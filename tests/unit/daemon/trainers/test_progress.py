"""What the daemon keeps of a trainer's reports."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast_core.links import LinkVerdict
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.state import SavePace, TrainerSession
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.trainers.auth import TrustingAuthenticator
from holdfast_daemon.trainers.claims import Claims
from holdfast_daemon.trainers.service import TrainerService
from holdfast_daemon.trainers.waiting_agents import WaitingAgents
from holdfast_protos import trainer_pb2

JOB = "team.moe"


async def _no_links(job: str) -> LinkVerdict:
    return LinkVerdict()


def _engine() -> JobEngine:
    """The engine of a node with one rank, whose session is `s0`."""
    engine = JobEngine(job=JOB, node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    member = Member(index=0, node="a", memory_id="m", peer_address="", bulk_address="")
    engine.memory.begin_epoch(
        Membership(
            job=JOB,
            epoch=1,
            members=(member,),
            nproc_per_node=1,
            groups=((0,),),
            redundancy=Redundancy.NONE,
        )
    )
    session = TrainerSession(id="s0", rank=0, epoch=1, layout_id="", pid=10)
    engine.memory.sessions[session.id] = engine.memory.rank(0).session = session
    return engine


def test_the_pace_of_saves_is_kept_as_reported() -> None:
    engine = _engine()
    host: Any = SimpleNamespace(engine=engine, now=1.0)
    service = TrainerService(
        agents=WaitingAgents(time.monotonic),
        host_of=lambda job: host,
        hosts=lambda: {JOB: host},
        ended=lambda job: False,
        claims=Claims(),
        arena_socket=Path("arena.sock"),
        node_host="127.0.0.1",
        status=dict,
        authenticator=TrustingAuthenticator(),
        metrics=DaemonMetrics(),
        check_links=_no_links,
    )
    report = trainer_pb2.ProgressReport(
        session=service._seal.seal("s0"),
        save_period_s=2.0,
        staged_s=0.5,
        interval_steps=3,
        window_steps=4,
        bubble_s=5.0,
        bubble_bytes=6,
    )
    context: Any = SimpleNamespace(invocation_metadata=lambda: ())

    async def tell() -> None:
        await service.Progress(report, context)

    asyncio.run(tell())
    [rank] = engine.overview().ranks
    assert rank.pace == SavePace(
        period_s=2.0,
        staged_s=0.5,
        interval_steps=3,
        window_steps=4,
        bubble_s=5.0,
        bubble_bytes=6,
    )
