"""Valid bytes of every kind, from which a fuzzer starts."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from holdfast_core.protection.standing import RankStanding
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import (
    Entry,
    Layout,
    TensorRole,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Inventory, Manifest, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Member, Membership, Tier
from holdfast_core.snapshots.pieces import bit_map
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_daemon.memory.parity_blocks import ParityRecord
from holdfast_daemon.memory.saved_epoch import SavedEpoch
from holdfast_daemon.transport import protocol
from holdfast_protos import codec, control_pb2, trainer_pb2, values_pb2
from holdfast_protos.changes import change_between

PIECE = 4096
PIECES = 3
GENERATION = Generation(1, 7)
JOB = "default.moe"
_EXAMPLE = Path(__file__).parents[2] / "examples" / "moe-job.yaml"

LAYOUT = Layout(
    rank=0,
    world_size=1,
    topology="dp1",
    entries=(
        Entry(
            unit="layer0/expert1",
            tensor="blocks.0.w",
            role=TensorRole.COMPUTE,
            dtype="float32",
            shape=(32, 64),
            start=0,
            nbytes=8192,
            offset=0,
        ),
        Entry(
            unit="embedding",
            tensor="embed.weight:exp_avg",
            role=TensorRole.OPTIMIZER,
            dtype="bfloat16",
            shape=(1024,),
            start=64,
            nbytes=1984,
            offset=8192,
        ),
    ),
    extras_offset=10240,
    extras_capacity=4096,
    piece_bytes=PIECE,
)
PAYLOAD = bytes(range(256)) * 42
MANIFEST = Manifest(
    job=JOB,
    rank=0,
    world_size=1,
    generation=GENERATION,
    layout_id=layout_id(encode_layout(LAYOUT)),
    payload_bytes=len(PAYLOAD),
    extras_offset=10240,
    extras_bytes=512,
    piece_bytes=PIECE,
    digests=piece_digests(PAYLOAD, PIECE),
    nan_units=("layer0/expert1",),
)
PARITY = ParityEntry(lane=0, generation=GENERATION, group=(0, 1, 2), sources=((1, 2**63), (2, 5)))
RECORD = ParityRecord(
    entry=PARITY,
    nbytes=len(PAYLOAD),
    piece_bytes=PIECE,
    digests=piece_digests(PAYLOAD, PIECE),
    payload_bytes=((1, 9000), (2, len(PAYLOAD))),
)
PLACES = tuple(
    Member(
        index=i,
        node=f"node-{i}",
        memory_id=f"m{i}",
        peer_address=f"10.0.0.{i}:7701",
        bulk_address=f"10.0.0.{i}:7702",
        domain="rack",
    )
    for i in range(3)
)
MEMBERSHIP = Membership(
    job=JOB,
    epoch=3,
    revision=1,
    members=PLACES,
    nproc_per_node=2,
    groups=((0, 1, 2),),
    tier=Tier(uri="s3://bucket/run", every_steps=10, restore_from="1.7"),
    restarting=frozenset({1}),
    restarting_ranks=frozenset({4}),
)
REPORT = MemberReport(
    job=JOB,
    epoch=3,
    member=1,
    incarnation=2,
    sequence=9,
    verified=True,
    inventory=Inventory(
        snapshots=(
            SnapshotEntry(
                rank=2, generation=GENERATION, manifest_digest=2**64 - 1, payload_bytes=1
            ),
        ),
        parities=(PARITY,),
        writing=((2, Generation(3, 8)),),
        passed=((2, Generation(3, 8)),),
    ),
    line=Line(generation=GENERATION, reason="newest"),
    retained=GENERATION,
)
DIRECTIVE = Directive(
    job=JOB,
    epoch=3,
    line=Line(generation=GENERATION, reason="newest"),
    protected=GENERATION,
    retained=GENERATION,
    dead=(Generation(3, 9),),
    rendezvous="10.0.0.1:29500",
)


def body_of(signed: bytes) -> bytes:
    """What follows the checksum of a signed file."""
    return signed.partition(b"\n")[2]


def manifests() -> list[bytes]:
    return [body_of(encode_manifest(MANIFEST))]


def layouts() -> list[bytes]:
    return [encode_layout(LAYOUT)]


def parity_records() -> list[bytes]:
    return [msgspec.json.encode(RECORD, order="deterministic")]


def epochs() -> list[bytes]:
    line = Line(generation=GENERATION, reason="newest")
    saved = SavedEpoch(membership=MEMBERSHIP, line=line, retained=GENERATION)
    return [
        msgspec.json.encode(saved),
        msgspec.json.encode(SavedEpoch(membership=MEMBERSHIP, line=None, retained=None)),
    ]


def bulk_requests() -> list[bytes]:
    plain = protocol.Request(
        job=JOB,
        epoch=3,
        kind=protocol.Kind.SNAPSHOT,
        index=1,
        generation=GENERATION,
        offset=0,
        nbytes=9000,
    )
    change = protocol.Request(
        job=JOB,
        epoch=3,
        kind=protocol.Kind.CHANGE,
        index=1,
        generation=GENERATION,
        offset=PIECE,
        nbytes=PIECE + 1,
        base=Generation(1, 6),
        piece_bytes=PIECE,
    )
    return [protocol.encode_request(plain), protocol.encode_request(change)]


def reports() -> list[bytes]:
    return [codec.report_to_proto(REPORT).SerializeToString()]


def directives() -> list[bytes]:
    return [codec.directive_to_proto(DIRECTIVE).SerializeToString()]


def memberships() -> list[bytes]:
    return [codec.membership_to_proto(MEMBERSHIP).SerializeToString()]


def control_messages() -> list[bytes]:
    later = Membership(
        job=JOB,
        epoch=4,
        members=PLACES,
        nproc_per_node=2,
        groups=((0, 1, 2),),
        tier=MEMBERSHIP.tier,
    )
    messages = [
        control_pb2.ControlMessage(membership=codec.membership_to_proto(MEMBERSHIP)),
        control_pb2.ControlMessage(drop=control_pb2.DropJob(job=JOB)),
        control_pb2.ControlMessage(welcome=control_pb2.Welcome(heartbeat_s=1.0)),
        control_pb2.ControlMessage(change=change_between(MEMBERSHIP, later)),
    ]
    return [message.SerializeToString() for message in messages]


def losses() -> values_pb2.LossReport:
    return values_pb2.LossReport(
        ranks=1,
        experts_per_layer=1,
        experts_max=4,
        limit=0.05,
        layers=[0, 1],
        at_risk=[5, 6],
        routed=[100, 100],
        lost=[1, 2],
        recoveries=[values_pb2.RecoveryLoss(epoch=2, step=5, lost_tokens=3, plt=0.1, mlt=0.2)],
    )


def plan() -> values_pb2.ExpertPlanReport:
    return values_pb2.ExpertPlanReport(
        epoch=1,
        step=200,
        cause="loads",
        ranks=4,
        rank_seats=3,
        layers=2,
        experts=6,
        least_nodes=2,
        busiest_node=1.125,
    )


def heartbeats() -> list[bytes]:
    state = control_pb2.JobState(
        job=JOB,
        epoch=3,
        membership=codec.membership_to_proto(MEMBERSHIP),
        verified=True,
        line=codec.line_to_proto(Line(generation=GENERATION, reason="newest")),
        has_line=True,
        protected=codec.generation_to_proto(GENERATION),
        ranks=[control_pb2.RankState(rank=2, state="HEALTHY", step=9, idle_s=0.5, pid=12)],
        revision=1,
        problem="no memory",
        problem_code="memory_budget",
        loss=losses(),
        plan=plan(),
    )
    beat = control_pb2.Heartbeat(
        protocol_version=1,
        node="node-1",
        memory_id="m1",
        incarnation=2,
        peer_address="10.0.0.1:7701",
        bulk_address="10.0.0.1:7702",
        memory_budget_bytes=1 << 30,
        jobs=[state],
    )
    return [beat.SerializeToString()]


def trainer_requests() -> list[bytes]:
    """One byte that chooses the call, then its message; sessions are put in by the target."""
    messages: list[tuple[int, bytes]] = [
        (0, trainer_pb2.HelloRequest(protocol_version=1, job=JOB).SerializeToString()),
        (
            1,
            trainer_pb2.OpenRequest(
                job=JOB, epoch=1, layout=encode_layout(LAYOUT), largest_slot_bytes=16384, pid=9
            ).SerializeToString(),
        ),
        (
            2,
            trainer_pb2.GrantRequest(
                session="s",
                epoch=1,
                step=9,
                base=codec.generation_to_proto(GENERATION),
                unchanged=bit_map([1], PIECES),
            ).SerializeToString(),
        ),
        (
            3,
            trainer_pb2.CommitRequest(
                session="s",
                epoch=1,
                step=8,
                slot=1,
                payload_bytes=len(PAYLOAD),
                extras_bytes=512,
                digests=piece_digests(PAYLOAD, PIECE),
                nan_units=["embedding"],
            ).SerializeToString(),
        ),
        (4, trainer_pb2.AbortRequest(session="s", epoch=1, step=8).SerializeToString()),
        (
            5,
            trainer_pb2.ProgressReport(
                session="s",
                step=9,
                skipped=1,
                failed=2,
                failure="no",
                failure_code="replicas_diverged",
                loss=losses(),
                plan=plan(),
                times=values_pb2.StepTimes(window=1, steps=10, step_s=0.2, own_s=0.1, wait_s=0.1),
            ).SerializeToString(),
        ),
        (
            6,
            trainer_pb2.JoinWorldRequest(
                protocol_version=1, job=JOB, after_epoch=0, wait_s=0.0
            ).SerializeToString(),
        ),
        (
            7,
            trainer_pb2.PublishStoreRequest(
                job=JOB, epoch=1, store_address="10.0.0.1:29500"
            ).SerializeToString(),
        ),
        (8, trainer_pb2.WorkerExitedRequest(job=JOB, epoch=1, exit_code=1).SerializeToString()),
        (9, trainer_pb2.RestoreRequest(job=JOB, epoch=1).SerializeToString()),
        (10, trainer_pb2.CloseRequest(session="s").SerializeToString()),
        (11, trainer_pb2.FollowRequest(protocol_version=1, job=JOB, pid=7).SerializeToString()),
        (12, trainer_pb2.WorkedRequest(job=JOB, epoch=1, ranks=[0]).SerializeToString()),
        (13, trainer_pb2.TrainedRequest(job=JOB, epoch=1, step=4).SerializeToString()),
    ]
    return [bytes([kind]) + message for kind, message in messages]


def standings() -> list[bytes]:
    """What a rank of four with six experts in two layers has; what a new one has; a pipeline."""
    seated = RankStanding(
        step=7,
        topology="dp4·ep1·tp1·pp1",
        rank=1,
        held=((0, 1, 2), (3, 4, 5)),
        layer_experts=6,
    )
    staged = RankStanding(step=7, ready=True, topology="dp2·ep1·tp1·pp2", rank=1)
    return [msgspec.json.encode(one) for one in (seated, RankStanding(), staged)]


@functools.cache
def jobs() -> list[bytes]:
    example = _EXAMPLE.read_bytes()
    anchored = example.replace(b"spec:", b"spec: &spec", 1)
    return [example, anchored]


def redis_records() -> list[bytes]:
    """Kind, then the text of a record."""
    return [
        b'state\n{"ranks":[{"rank":0,"state":"HEALTHY"}],"stages":{"0":{"committed":"1.7"}},'
        b'"losses":[{"epoch":2}]}',
        b"stage\n0:committed=1.7",
        b"rank\n12",
        b'loss\n{"epoch":2,"step":5,"lost_tokens":3,"plt":0.1,"mlt":0.2,"k_before":1,"k_after":1,'
        b'"total_tokens":9,"total_plt":0.1,"total_mlt":0.1}',
        b'event\n{"event":"epoch_began","time":1.5,"epoch":2,"rank":0,"node":"a"}',
        b'event\n{"event":"line","time":1.5,"epoch":2,"generation":"1.7","detail":"all"}',
    ]


def http_requests() -> list[bytes]:
    return [
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"POST /readyz?x=1 HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n0123",
    ]


def tokens() -> list[bytes]:
    return [b"0123456789abcdef" * 3 + b"\n", b"\n"]


def web_tokens() -> list[bytes]:
    return [b"eyJhbGciOiJSUzI1NiJ9.eyJleHAiOjE3MDAwMDAwMDB9.c2ln"]


def token_claims() -> list[bytes]:
    return [b'{"exp":1700000000,"sub":"system:serviceaccount:default:a"}']


def token_reviews() -> list[bytes]:
    return [
        b'{"status":{"authenticated":true,"audiences":["holdfast.dev/daemon"],"user":{"username":'
        b'"system:serviceaccount:default:a","extra":{"authentication.kubernetes.io/pod-name":'
        b'["moe-0-1"]}}}}'
    ]


def texts() -> list[bytes]:
    return [b"200Gi", b"1.5G", b"1073741824", b"layer3/expert5", b"layer0/gate", b"head", b"1.7"]
