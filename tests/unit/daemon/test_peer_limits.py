"""What peers may ask of a daemon, and how often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from member_engines import engine_of, membership_of

from holdfast_core.links import MeasuredLinks
from holdfast_core.snapshots.reports import MemberReport
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.limits import rates
from holdfast_daemon.net.peers import PeerService
from holdfast_protos import codec, peer_pb2

JOB = "team.job"


class Aborted(Exception):
    """The call was refused."""


class Context:
    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        raise Aborted(dict(trailing_metadata)[codec.ERROR_CODE_KEY])


def _engine() -> JobEngine:
    return engine_of(membership_of((0, 1), job=JOB), 0)


def _service(engine: JobEngine, limited: list[int], uid: str = "") -> PeerService:
    host: Any = SimpleNamespace(
        job=JOB,
        uid=uid,
        engine=engine,
        now=0.0,
        carry_out=lambda effects: None,
        storage=SimpleNamespace(describe=lambda rank, generation: None),
    )
    return PeerService(
        lambda job: host if job == JOB else None,
        lambda job, epoch: MeasuredLinks(),
        lambda: limited.append(1),
    )


def _report(member: int) -> peer_pb2.ReportMessage:
    return peer_pb2.ReportMessage(job=JOB, epoch=1, member=member, incarnation=1, sequence=1)


def test_a_report_of_a_stranger_is_not_kept() -> None:
    engine = _engine()

    async def main() -> None:
        service = _service(engine, [])
        for member in (1, 2, 77, 2**32 - 1):
            await service.Report(_report(member), Context())  # type: ignore[arg-type]

    asyncio.run(main())
    assert set(engine.memory.reports) <= {0, 1}
    assert isinstance(engine.memory.reports[1], MemberReport)


@pytest.mark.parametrize("uid", ["", "earlier", "later"])
def test_the_epochs_of_an_earlier_job_of_the_name_fence_nobody(uid: str) -> None:
    engine = _engine()
    report = _report(1)
    report.epoch, report.uid = 9, uid
    direction = peer_pb2.DirectiveMessage(job=JOB, epoch=9, uid=uid)

    async def main() -> None:
        service = _service(engine, [], "later")
        replies = [
            await service.Report(report, Context()),  # type: ignore[arg-type]
            await service.Direct(direction, Context()),  # type: ignore[arg-type]
        ]
        assert [reply.epoch for reply in replies] == ([0, 0] if uid == "earlier" else [1, 1])

    asyncio.run(main())
    assert engine.memory.fenced == (uid != "earlier")


def test_a_malformed_report_is_refused_as_one() -> None:
    message = _report(1)
    message.inventory.snapshots.add(rank=1)

    async def main() -> None:
        await _service(_engine(), []).Report(message, Context())  # type: ignore[arg-type]

    with pytest.raises(Aborted, match="protocol"):
        asyncio.run(main())


@pytest.mark.parametrize("call", ["Suspect", "Report of strangers"])
def test_a_flood_is_refused_and_other_members_are_served(call: str) -> None:
    limited: list[int] = []
    suspicion = peer_pb2.SuspectMessage(job=JOB, epoch=1, rank=0)

    async def main() -> list[object]:
        service = _service(_engine(), limited)
        calls: list[Any] = [
            service.Suspect(suspicion, Context())  # type: ignore[arg-type]
            if call == "Suspect"
            else service.Report(_report(1000 + number), Context())  # type: ignore[arg-type]
            for number in range(rates.PEER_RATE.burst + 200)
        ]
        flood = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        reply = await service.Report(_report(1), Context())  # type: ignore[arg-type]
        assert reply.epoch == 1 and not flood.done()
        return await flood

    answers = asyncio.run(main())
    refused = [answer for answer in answers if isinstance(answer, Aborted)]
    assert refused and {str(answer) for answer in refused} == {"rate_limited"}
    assert len(limited) == len(refused)
