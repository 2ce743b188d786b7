"""The trainers' service over an engine in this process: what a request does, without a daemon."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from fuzzing_seeds import GENERATION, JOB, LAYOUT, PAYLOAD, PIECE

from holdfast_core.errors import HoldfastError, known_code
from holdfast_core.links import LinkVerdict
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import encode_layout, piece_digests
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_core.snapshots.reports import MemberReport
from holdfast_core.states import EndReason
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.effects import ArenaReady, Effect, Seal
from holdfast_daemon.engine.effects import SlotSealed as SealedEvent
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.observing import status
from holdfast_daemon.parity.traffic import NodeTraffic
from holdfast_daemon.trainers.auth import TrustingAuthenticator
from holdfast_daemon.trainers.claims import Claims
from holdfast_daemon.trainers.service import TrainerService
from holdfast_daemon.trainers.waiting_agents import WaitingAgents
from holdfast_protos import codec, trainer_pb2

MEMBERSHIP = Membership(
    job=JOB,
    epoch=1,
    members=(Member(index=0, node="n0", memory_id="m", peer_address="", bulk_address=""),),
    nproc_per_node=1,
    groups=((0,),),
    redundancy=Redundancy.NONE,
)
CALLS: tuple[tuple[str, Any], ...] = (
    ("Hello", trainer_pb2.HelloRequest),
    ("Open", trainer_pb2.OpenRequest),
    ("Grant", trainer_pb2.GrantRequest),
    ("Commit", trainer_pb2.CommitRequest),
    ("Abort", trainer_pb2.AbortRequest),
    ("Progress", trainer_pb2.ProgressReport),
    ("JoinWorld", trainer_pb2.JoinWorldRequest),
    ("PublishStore", trainer_pb2.PublishStoreRequest),
    ("WorkerExited", trainer_pb2.WorkerExitedRequest),
    ("Restore", trainer_pb2.RestoreRequest),
    ("Close", trainer_pb2.CloseRequest),
    ("Follow", trainer_pb2.FollowRequest),
    ("Worked", trainer_pb2.WorkedRequest),
    ("Trained", trainer_pb2.TrainedRequest),
    ("CheckLinks", trainer_pb2.CheckLinksRequest),
)


class Waits(Exception):
    """The call waits for something that does not happen here."""


class Aborted(Exception):
    """The call was refused, as it should be."""


class _Context:
    """What a handler may do with its call."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: object, details: str, trailing_metadata: object = ()) -> NoReturn:
        raise Aborted(details)


async def _no_links(job: str) -> LinkVerdict:
    return LinkVerdict()


class _Host:
    """A job whose effects end well at once."""

    def __init__(self) -> None:
        self.job, self.dropped, self.now = JOB, False, 0.0
        self.engine = JobEngine(
            job=JOB, node="n0", memory_id="m", incarnation=1, settings=EngineSettings()
        )
        self.storage = SimpleNamespace(
            arena=lambda rank, layout: SimpleNamespace(path=Path("arena"), nbytes=1, slots=3),
            arena_bytes=1,
            parity_bytes=1,
        )
        self.worker = SimpleNamespace(parity_traffic=NodeTraffic().of_job())
        self.carry_out(self.engine.set_membership(MEMBERSHIP, 0.0))
        self.session, effects = self.engine.open(
            rank=0,
            epoch=1,
            layout=encode_layout(LAYOUT),
            largest_slot_bytes=16384,
            pid=1,
            now=0.0,
        )
        self.carry_out(effects)
        (arena,) = self.engine.memory.arenas.values()
        done = ArenaReady(rank=0, layout_id=arena.layout_id, slots=3)
        self.carry_out(self.engine.on_completion(done, 0.0))
        self.carry_out(self.engine.claimed(self.session, 0.0))
        self.save(GENERATION.step)
        held = self.engine.memory.sealed(0, Generation(1, GENERATION.step))
        assert held is not None
        held[1].verified = True
        _, effects = self.engine.grant(self.session, epoch=1, step=8, now=0.0)
        self.carry_out(effects)

    @property
    def writer(self) -> JobEngine:
        return self.engine

    def hello(self, rank: int, store_address: str, world: str) -> Membership:
        membership, effects = self.engine.hello(rank, store_address, world, self.now)
        self.carry_out(effects)
        return membership

    def save(self, step: int) -> None:
        granted, effects = self.engine.grant(self.session, epoch=1, step=step, now=0.0)
        self.carry_out(effects)
        self.carry_out(
            self.engine.commit(
                self.session,
                epoch=1,
                step=step,
                slot=granted.slot,
                payload_bytes=len(PAYLOAD),
                extras_bytes=512,
                digests=piece_digests(PAYLOAD, PIECE),
                nan_units=(),
                now=0.0,
            )
        )

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Seal):
                event = SealedEvent(rank=0, slot=effect.slot, generation=effect.manifest.generation)
                self.carry_out(self.engine.on_completion(event, 0.0))

    async def changed(self, timeout_s: float) -> None:
        assert math.isfinite(timeout_s)
        raise Waits

    def agent_waits(self, after_epoch: int) -> None:
        self.engine.agent_waits(after_epoch)

    def follows(self, rank: int, pid: int, size: int) -> int:
        return self.engine.follows(rank, pid, size)

    def worker_exited(
        self,
        epoch: int,
        rank: int,
        exit_code: int,
        last_lines: str,
        reason: EndReason,
        kernel: str,
    ) -> None:
        self.engine.worker_exited(epoch, rank, exit_code, last_lines, reason, kernel)


def request(data: bytes) -> None:
    """Do the call that `data` describes: a byte that chooses it, then its message. Afterwards the
    daemon can still report to the control loop and people how the job fares."""
    if not data:
        return
    name, kind = CALLS[data[0] % len(CALLS)]
    message = kind.FromString(data[1:])
    host = cast(JobHost, _Host())
    claims = Claims()
    service = TrainerService(
        agents=WaitingAgents(time.monotonic),
        host_of=lambda job: host if job == JOB else None,
        hosts=lambda: {JOB: host},
        ended=lambda job: False,
        claims=claims,
        arena_socket=Path("arena.sock"),
        node_host="127.0.0.1",
        status=lambda: {"jobs": {}},
        authenticator=TrustingAuthenticator(),
        metrics=DaemonMetrics(),
        check_links=_no_links,
    )
    if "session" in kind.DESCRIPTOR.fields_by_name and message.session:
        message.session = service._seal.seal(cast(_Host, host).session)
    asyncio.run(_call(service, name, message))
    state = status.job_state(host)
    assert state.ByteSize() < 1 << 20, f"{state.ByteSize()} bytes of one job in each heartbeat"
    assert state.problem_code == known_code(state.problem_code), state.problem_code
    codec.report_to_proto(_report(host)).SerializeToString()
    status.as_json(host, host.engine.overview())


def _report(host: JobHost) -> MemberReport:
    host.engine.tick(100.0)
    memory = host.engine.memory
    return MemberReport(
        job=JOB,
        epoch=memory.epoch,
        member=0,
        incarnation=1,
        sequence=1,
        verified=memory.verified,
        inventory=memory.inventory(),
    )


async def _call(service: TrainerService, name: str, message: Any) -> None:
    context: Any = _Context()
    try:
        if name in ("Restore", "Follow"):
            async for _ in getattr(service, name)(message, context):
                pass
        else:
            await getattr(service, name)(message, context)
    except (Aborted, Waits):
        return
    except HoldfastError as error:
        raise AssertionError(f"{name} let through what it should answer: {error!r}") from error
