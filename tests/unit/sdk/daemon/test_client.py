from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from holdfast._daemon.client import (
    AbortRequest,
    CommitRequest,
    DaemonEvent,
    GrantRequest,
    GrpcClient,
    HeldSnapshot,
    LiveRequest,
    OpenRequest,
    RestoreRequest,
    Stage,
    TrainedRequest,
    TrainerReport,
)
from holdfast_core.corruption import Compared, Divergence
from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.errors import (
    HoldfastError,
    MemoryBudgetError,
    ProtocolError,
    StaleEpochError,
    UnreachableError,
    VersionMismatchError,
)
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout, encode_layout, encode_manifest
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.states import RestorePhase, RestoreProgress, RestoreSource
from holdfast_core.stragglers import StepTimes
from holdfast_protos import codec, persisting, trainer_pb2, trainer_pb2_grpc, values_pb2
from holdfast_protos.connections import channels
from holdfast_protos.divergences import divergence_from_proto, divergence_to_proto
from holdfast_protos.expert_plans import plan_from_proto
from holdfast_protos.losses import loss_from_proto
from holdfast_protos.step_times import times_from_proto

WAIT_S = 10.0
LAYOUT = Layout(
    rank=3,
    world_size=4,
    topology="dp4·ep1·tp1·pp1",
    entries=(),
    extras_offset=0,
    extras_capacity=4096,
)
LOSS = LossReport(
    ranks=1,
    k=2,
    experts_max=8,
    limit=0.05,
    layers=(0,),
    at_risk=(1,),
    routed=(9,),
    lost=(3,),
)
MANIFEST = Manifest(
    job="moe",
    rank=3,
    world_size=4,
    generation=Generation(1, 9),
    layout_id="x",
    payload_bytes=1,
    extras_offset=0,
    extras_bytes=1,
    piece_bytes=LAYOUT.piece_bytes,
    digests=bytes(8),
)


EXPERT = ExpertVersion(unit="layer0/expert0", generation=Generation(1, 3), number=3, tokens=5)
PLAN = PlanReport(
    epoch=2,
    step=5,
    cause=PlanCause.LOADS,
    ranks=4,
    rank_seats=4,
    layers=1,
    experts=2,
    least_nodes=2,
    busiest_node=1.5,
)
TIMES = StepTimes(window=2, steps=10, step_s=0.5, own_s=0.3, wait_s=0.2)
DIVERGED = Divergence(step=9, unit="layer0/gate", ranks=(0, 1), history=(Compared(9, 1, 2),))
REPORT = TrainerReport(
    session="s",
    step=7,
    skipped=2,
    failed=3,
    failure="no room",
    failure_code="memory_budget",
    save_period_s=0.1,
    staged_s=0.2,
    interval_steps=3,
    window_steps=5,
    bubble_s=0.4,
    bubble_bytes=6,
)
OPEN = OpenRequest(epoch=2, layout=b"layout", largest_slot_bytes=99)
RESTORE = RestoreRequest(epoch=2, no_replay="no pipeline")


class Trainer(trainer_pb2_grpc.TrainerServicer):
    """Answers as a daemon would, or with `error`."""

    def __init__(self) -> None:
        self.error: HoldfastError | None = None
        self.version = codec.PROTOCOL_VERSION
        self.seen: list[Any] = []
        self.sessions: list[str] = []
        """What the headers of each call name as its session."""
        self.fresh = False
        self.captured_by = 0
        self.ended = threading.Event()

    def _enter(self, request: Any, context: grpc.ServicerContext) -> None:
        self.seen.append(request)
        headers = dict(context.invocation_metadata())
        self.sessions.append(str(headers.get(channels.SESSION_HEADER, "")))
        if self.error is not None:
            context.set_trailing_metadata(codec.error_to_metadata(self.error))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(self.error))

    def Hello(self, request: Any, context: Any) -> trainer_pb2.HelloReply:
        self._enter(request, context)
        return trainer_pb2.HelloReply(
            protocol_version=self.version, epoch=2, world_size=4, external=True
        )

    def Restore(self, request: Any, context: Any) -> Iterator[trainer_pb2.RestoreProgress]:
        self._enter(request, context)
        yield trainer_pb2.RestoreProgress(phase="rebuild", done=1, total=2, detail="rank 3")
        decision = trainer_pb2.RestoreDecision(line=trainer_pb2.RestoreDecision().line)
        if not self.fresh:
            decision.line.generation.epoch, decision.line.generation.step = 1, 9
            decision.source, decision.captured_by = "parity", self.captured_by
            held: list[Any] = [decision.snapshots.add() for _ in range(2 * bool(self.captured_by))]
            for slot, each in enumerate(held or [decision], start=2):
                each.manifest, each.layout = encode_manifest(MANIFEST), encode_layout(LAYOUT)
                each.slot, each.token, each.arena_bytes, each.places = slot, "t", 7, b"\1"
        yield trainer_pb2.RestoreProgress(phase="ready", decision=decision)

    def Open(self, request: Any, context: Any) -> trainer_pb2.OpenReply:
        self._enter(request, context)
        return trainer_pb2.OpenReply(
            session="s",
            token="t",
            arena_bytes=12288,
            slot_bytes=4096,
            slots=2,
            earlier=divergence_to_proto(DIVERGED),
        )

    def Grant(self, request: Any, context: Any) -> trainer_pb2.GrantReply:
        self._enter(request, context)
        if request.step == 1:
            return trainer_pb2.GrantReply(slot=0)
        return trainer_pb2.GrantReply(skipped="protection is behind")

    def Commit(self, request: Any, context: Any) -> trainer_pb2.CommitReply:
        self._enter(request, context)
        return trainer_pb2.CommitReply()

    def Progress(self, request: Any, context: Any) -> trainer_pb2.ProgressReply:
        self._enter(request, context)
        return trainer_pb2.ProgressReply()

    def Abort(self, request: Any, context: Any) -> trainer_pb2.AbortReply:
        self._enter(request, context)
        return trainer_pb2.AbortReply()

    def Close(self, request: Any, context: Any) -> trainer_pb2.CloseReply:
        self._enter(request, context)
        return trainer_pb2.CloseReply()

    def Persist(self, request: Any, context: Any) -> trainer_pb2.PersistReply:
        raise NotImplementedError

    def CheckLinks(self, request: Any, context: Any) -> trainer_pb2.CheckLinksReply:
        raise NotImplementedError

    def Follow(self, request: Any, context: Any) -> Iterator[trainer_pb2.World]:
        raise NotImplementedError

    def JoinWorld(self, request: Any, context: Any) -> trainer_pb2.World:
        raise NotImplementedError

    def PublishStore(self, request: Any, context: Any) -> trainer_pb2.PublishStoreReply:
        raise NotImplementedError

    def WorkerExited(self, request: Any, context: Any) -> trainer_pb2.WorkerExitedReply:
        raise NotImplementedError

    def Worked(self, request: Any, context: Any) -> trainer_pb2.WorkedReply:
        raise NotImplementedError

    def Inspected(self, request: Any, context: Any) -> trainer_pb2.InspectedReply:
        raise NotImplementedError

    def Trained(self, request: Any, context: Any) -> trainer_pb2.TrainedReply:
        self._enter(request, context)
        return trainer_pb2.TrainedReply()

    def Status(self, request: Any, context: Any) -> trainer_pb2.StatusReply:
        raise NotImplementedError

    def Watch(self, request: Any, context: Any) -> Iterator[trainer_pb2.WatchEvent]:
        self._enter(request, context)
        generation = codec.generation_to_proto(Generation(2, 5))
        yield trainer_pb2.WatchEvent(protected=generation)
        yield trainer_pb2.WatchEvent(dead=generation)
        yield trainer_pb2.WatchEvent(unprotectable=generation)
        yield trainer_pb2.WatchEvent()  # of a newer daemon
        yield trainer_pb2.WatchEvent(epoch_ended=3, end_process=True)
        if request.session == "endless":
            context.add_callback(self.ended.set)
            self.ended.wait(WAIT_S)


@pytest.fixture
def service() -> Trainer:
    return Trainer()


@pytest.fixture
def client(service: Trainer, tmp_path: Path) -> Iterator[GrpcClient]:
    server = grpc.server(ThreadPoolExecutor(4))
    trainer_pb2_grpc.add_TrainerServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{tmp_path}/daemon.sock")
    server.start()
    client = GrpcClient(tmp_path / "daemon.sock", "moe", 3, "node0:1", WAIT_S)
    yield client
    client.close()
    service.ended.set()
    server.stop(None).wait(WAIT_S)


def test_calls_carry_what_they_should(client: GrpcClient, service: Trainer) -> None:
    hello = client.hello()
    assert (hello.epoch, hello.world_size, hello.external) == (2, 4, True)
    assert service.seen[-1].store_address == "node0:1"
    opened = client.open(OPEN, WAIT_S)
    assert (opened.session, opened.arena_bytes, opened.slots) == ("s", 12288, 2)
    assert opened.earlier == DIVERGED
    assert service.seen[-1].largest_slot_bytes == 99
    assert client.grant(GrantRequest(session="s", epoch=2, step=1)).slot == 0
    skipped = client.grant(GrantRequest(session="s", epoch=2, step=2))
    assert (skipped.slot, skipped.skipped) == (-1, "protection is behind")
    client.commit(
        CommitRequest(
            session="s",
            epoch=2,
            step=1,
            slot=0,
            payload_bytes=5,
            extras_bytes=1,
            digests=b"12345678",
            nan_units=("layer0/gate",),
        )
    )
    assert list(service.seen[-1].nan_units) == ["layer0/gate"]


@pytest.mark.parametrize(
    ("call", "request_sent"),
    [
        ("restore", RESTORE),
        (
            "go_live",
            LiveRequest(epoch=2, live=0, repeated_after=7, restored_from=RestoreSource.PARITY),
        ),
        ("open", OPEN),
        (
            "grant",
            GrantRequest(
                session="s",
                epoch=2,
                step=9,
                base=Generation(1, 4),
                unchanged=b"\5",
                first_step=8,
            ),
        ),
        (
            "commit",
            CommitRequest(
                session="s",
                epoch=2,
                step=9,
                slot=1,
                payload_bytes=5,
                extras_bytes=1,
                digests=b"12345678",
                nan_units=("layer0/gate", "layer1/gate"),
                experts=(EXPERT, replace(EXPERT, number=4)),
            ),
        ),
        ("abort", AbortRequest(session="s", epoch=2, step=9, reason="why")),
        ("progress", replace(REPORT, loss=LOSS, plan=PLAN, times=TIMES, divergence=DIVERGED)),
        ("report_without_session", TrainedRequest.of(REPORT, epoch=2, closed=True)),
    ],
)
def test_every_field_of_a_request_arrives(
    client: GrpcClient, service: Trainer, call: str, request_sent: Any
) -> None:
    further = {"restore": (WAIT_S, lambda progress: None), "open": (WAIT_S,)}
    getattr(client, call)(request_sent, *further.get(call, ()))
    message = service.seen[-1]
    for field in fields(request_sent):
        value = getattr(request_sent, field.name)
        assert value not in (None, "", b"", ()), f"{field.name} has to be given, to be seen"
        assert arrived(getattr(message, field.name)) == value


def arrived(value: Any) -> Any:
    """What the daemon reads from a message's field."""
    match value:
        case values_pb2.Generation():
            return codec.generation_from_proto(value)
        case values_pb2.LossReport():
            return loss_from_proto(value)
        case values_pb2.ExpertPlanReport():
            return plan_from_proto(value)
        case values_pb2.StepTimes():
            return times_from_proto(value)
        case values_pb2.Divergence():
            return divergence_from_proto(value)
        case values_pb2.ExpertVersion():
            return persisting.expert_from_proto(value)
        case bool() | int() | float() | str() | bytes():
            return value
        case _:
            return tuple(map(arrived, value))


def test_what_a_request_leaves_out_is_absent(client: GrpcClient, service: Trainer) -> None:
    client.go_live(LiveRequest(epoch=2, live=0))
    assert service.seen[-1].HasField("live") and not service.seen[-1].HasField("repeated_after")
    client.restore(RESTORE, WAIT_S, lambda progress: None)
    assert not service.seen[-1].HasField("live")
    client.grant(GrantRequest(session="s", epoch=2, step=1))
    assert not service.seen[-1].HasField("base")
    client.progress(REPORT)
    assert not service.seen[-1].HasField("loss") and not service.seen[-1].HasField("plan")


def test_a_rank_without_a_session_reports_its_step_and_why_nothing_is_saved(
    client: GrpcClient, service: Trainer
) -> None:
    client.report_without_session(TrainedRequest.of(REPORT, epoch=2, closed=False))
    sent = service.seen[-1]
    assert (sent.job, sent.rank, sent.epoch, sent.step) == ("moe", 3, 2, 7)
    assert (sent.skipped, sent.failed, sent.failure) == (2, 3, "no room")
    assert (sent.failure_code, sent.closed) == ("memory_budget", False)
    client.report_without_session(TrainedRequest.of(REPORT, epoch=2, closed=True))
    assert service.seen[-1].closed


def test_the_headers_of_a_sessions_calls_name_it_before_the_request_is_read(
    client: GrpcClient, service: Trainer
) -> None:
    client.hello()
    client.open(OPEN, WAIT_S)
    client.grant(GrantRequest(session="s1", epoch=2, step=1))
    client.abort(AbortRequest(session="s2", epoch=2, step=1, reason="why"))
    list(client.watch("s3"))
    client.close_session("s4")
    assert service.sessions == ["", "", "s1", "s2", "s3", "s4"]


def test_a_restore_tells_its_progress_and_ends_in_a_decision(
    client: GrpcClient, service: Trainer
) -> None:
    progress: list[RestoreProgress] = []
    decision = client.restore(RESTORE, WAIT_S, progress.append)
    assert [(each.phase, str(each)) for each in progress] == [
        (RestorePhase.REBUILD, "rebuild 1/2 rank 3")
    ]
    held = HeldSnapshot(
        manifest=MANIFEST, layout=LAYOUT, slot=2, token="t", arena_bytes=7, places=b"\1"
    )
    assert (decision.captured_by, decision.snapshots, decision.source) == (0, (held,), "parity")
    service.captured_by = 5
    decision = client.restore(RESTORE, WAIT_S, progress.append)
    assert (decision.captured_by, decision.source) == (5, "parity")
    assert decision.snapshots == (held, replace(held, slot=3))
    service.fresh = True
    assert client.restore(RESTORE, WAIT_S, progress.append).snapshots == ()


def test_events_arrive_until_the_session_ends(client: GrpcClient) -> None:
    generation = Generation(2, 5)
    assert list(client.watch("s")) == [
        DaemonEvent(stage=Stage.PROTECTED, generation=generation),
        DaemonEvent(stage=Stage.DEAD, generation=generation),
        DaemonEvent(stage=Stage.UNPROTECTABLE, generation=generation),
        DaemonEvent(stage=Stage.EPOCH_ENDED, epoch=3, ends_process=True),
    ]


def test_closing_the_client_ends_a_watch(client: GrpcClient) -> None:
    news = client.watch("endless")
    assert next(news).stage is Stage.PROTECTED
    client.close()
    with pytest.raises(UnreachableError):
        list(news)
    with pytest.raises(UnreachableError):
        client.hello()


def test_an_error_of_the_daemon_comes_back_as_its_kind(
    client: GrpcClient, service: Trainer
) -> None:
    service.error = StaleEpochError("epoch 1 has ended")
    with pytest.raises(StaleEpochError, match="epoch 1 has ended"):
        client.hello()
    with pytest.raises(StaleEpochError):
        list(client.watch("s"))
    with pytest.raises(StaleEpochError):
        client.restore(RESTORE, WAIT_S, lambda message: None)
    service.error = MemoryBudgetError("too big", needed_bytes=9, available_bytes=4)
    with pytest.raises(MemoryBudgetError) as caught:
        client.open(OPEN, WAIT_S)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (9, 4)


def test_another_version_is_refused(client: GrpcClient, service: Trainer) -> None:
    service.version = codec.PROTOCOL_VERSION + 1
    with pytest.raises(VersionMismatchError):
        client.hello()


def test_a_failure_that_is_not_of_ours_is_a_protocol_error(
    client: GrpcClient, service: Trainer
) -> None:
    service.version = -1  # does not fit its field
    with pytest.raises(ProtocolError, match="failed a call: UNKNOWN"):
        client.hello()


def test_a_session_is_aborted_and_closed_by_name(client: GrpcClient, service: Trainer) -> None:
    client.abort(AbortRequest(session="s", epoch=2, step=1, reason="why"))
    client.close_session("s")
    assert [request.session for request in service.seen] == ["s", "s"]


def test_a_daemon_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    client = GrpcClient(tmp_path / "none.sock", "moe", 0, "", WAIT_S)
    with pytest.raises(UnreachableError, match="UNAVAILABLE"):
        client.hello()
    client.close()
