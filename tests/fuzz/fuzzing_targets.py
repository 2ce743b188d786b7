"""Every parser that reads bytes from outside: one table for the tests and for `make fuzz`.

A target gets any bytes and must return or raise one of the errors that it declares, in bounded time
and memory. Where bytes carry a checksum, the target adds it, so that what is behind it is reached;
a checksum keeps damage out, not people. Where there is an encoder, what was read is written and
read again.
"""

from __future__ import annotations

import functools
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fuzzing_seeds as seeds
import fuzzing_service
import fuzzing_surroundings
import msgspec
import xxhash
from google.protobuf.message import DecodeError

from holdfast_cli.commands.recorded_recoveries import history_of
from holdfast_cli.job_files import read_document
from holdfast_cli.planner.copies_plan import read_loads
from holdfast_core.catalogue import records
from holdfast_core.catalogue.records import losses_of_state, ranks_of_state, stages_of_state
from holdfast_core.elastic_experts.moving import moves_of, renumbered
from holdfast_core.elastic_experts.plans import ExpertPlan, ExpertRoom, plan_experts
from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    InvalidJobError,
    ProtocolError,
    known_code,
)
from holdfast_core.job.parsing import check_local, ignored_locally, parse_job
from holdfast_core.last_lines import (
    CHARACTERS_MAX,
    LINES_MAX,
    decoded_end,
    essence_of,
    last_lines,
)
from holdfast_core.protection.replaying import (
    ReplayEvidence,
    ReplayPlan,
    decode_evidence,
    encode_evidence,
    plan_replay,
)
from holdfast_core.protection.standing import NEW, StandingAction, read_standings, standing
from holdfast_core.quantities import parse_bytes
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    decode_layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
)
from holdfast_core.snapshots.pieces import encode_places, split_places
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_daemon.memory.files import sign
from holdfast_daemon.memory.parity_blocks import decode_record, encode_record
from holdfast_daemon.memory.saved_epoch import decode_epoch
from holdfast_daemon.net.control import completed
from holdfast_daemon.trainers.auth import token_expiry
from holdfast_daemon.trainers.claims import SessionSeal
from holdfast_daemon.trainers.token_review import identity_in
from holdfast_daemon.transport import protocol
from holdfast_operator.control.heartbeats import job_view, node_view
from holdfast_operator.kube.client.amounts import amount
from holdfast_protos import codec, control_pb2, peer_pb2, values_pb2
from holdfast_protos.connections.validity import ends_at

FIXED_BYTES = 8 << 20
"""What a parser may allocate for any input: imports at first use, a table."""
BYTES_PER_BYTE = 100
"""And for each byte of it: Python's objects take 50 to 90 bytes where JSON takes two."""
SECONDS_MAX = 20.0
"""A hang, on the slowest machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One parser."""

    name: str
    parse: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    allowed: tuple[type[Exception], ...] = (HoldfastError,)
    """What it may raise: beyond these, the callers of the parser would not notice."""


def attempt(target: Target, data: bytes) -> None:
    """Give `data` to the target. Raises what it must not raise, and AssertionError for what it
    must not take."""
    began = time.monotonic()
    tracemalloc.start()
    try:
        target.parse(data)
    except target.allowed:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    allowance = FIXED_BYTES + BYTES_PER_BYTE * len(data)
    assert peak <= allowance, f"{target.name} took {peak} bytes for {len(data)} bytes of input"
    took_s = time.monotonic() - began
    assert took_s < SECONDS_MAX, f"{target.name} took {took_s:.1f} s for {len(data)} bytes of input"


# --- files of the daemon --------------------------------------------------------------------------


def _manifest(data: bytes) -> None:
    manifest = decode_manifest(sign(data))
    assert decode_manifest(encode_manifest(manifest)) == manifest
    hash(manifest)


def _manifest_file(data: bytes) -> None:
    """Before the first zero byte the manifest, after it the places."""
    body, _, places = data.partition(b"\0")
    trailer = b"\n" + xxhash.xxh3_64_hexdigest(places).encode() + b"\n" + places if places else b""
    encoded, found = split_places(sign(body) + trailer)
    manifest = decode_manifest(encoded)
    assert split_places(encode_manifest(manifest) + encode_places(found))[1] == found


def _layout(data: bytes) -> None:
    layout = decode_layout(data)
    assert decode_layout(encode_layout(layout)) == layout
    assert 0 < layout.slot_bytes <= layout.arena_bytes(2)


def _parity_record(data: bytes) -> None:
    record = decode_record(sign(data))
    assert decode_record(encode_record(record)) == record


# --- between daemons, and with the control loop ---------------------------------------------------


def _bulk_request(data: bytes) -> None:
    head = data[: protocol.REQUEST_BYTES].ljust(protocol.REQUEST_BYTES, b"\0")
    size = protocol.job_name_bytes(head)
    assert size <= protocol.JOB_NAME_BYTES_MAX
    request = protocol.decode_request(head, data[protocol.REQUEST_BYTES :][:size])
    assert request.reply_bytes >= request.nbytes
    protocol.encode_ok(request)


def _bulk_reply(data: bytes) -> None:
    head = protocol.decode_reply(data[: protocol.REPLY_BYTES].ljust(protocol.REPLY_BYTES, b"\0"))
    assert head.message_bytes <= protocol.MESSAGE_BYTES_MAX
    assert str(protocol.decode_error(data[protocol.REPLY_BYTES :])) is not None


def _report(data: bytes) -> None:
    report = codec.report_from_proto(peer_pb2.ReportMessage.FromString(data))
    assert codec.report_from_proto(codec.report_to_proto(report)) == report


def _directive(data: bytes) -> None:
    directive = codec.directive_from_proto(peer_pb2.DirectiveMessage.FromString(data))
    assert codec.directive_from_proto(codec.directive_to_proto(directive)) == directive


def _membership(data: bytes) -> None:
    message = values_pb2.Membership.FromString(data)
    membership = codec.membership_from_proto(message)
    for place in membership.members:
        ranks = membership.ranks_of(place.index)
        assert membership.member_of(ranks.start) == place.index
    assert membership.group_of(membership.leader)
    hash(membership)


def _control_message(data: bytes) -> None:
    base = codec.membership_to_proto(seeds.MEMBERSHIP)
    message = completed(control_pb2.ControlMessage.FromString(data), {seeds.JOB: base})
    if message.HasField("membership"):
        codec.membership_from_proto(message.membership)


def _heartbeat(data: bytes) -> None:
    beat = control_pb2.Heartbeat.FromString(data)
    codec.check_version(beat.protocol_version, "the daemon")
    hash(node_view(beat, 0.0, 0.0))
    for state in beat.jobs:
        view = job_view(state)
        assert view.problem_code == known_code(view.problem_code), view.problem_code


# --- between ranks --------------------------------------------------------------------------------


def _standing(data: bytes) -> None:
    """Go on with what a rank states beside an honest one and a new one, on each place."""
    honest, new, _ = (text.decode() for text in seeds.standings())
    said = data.decode(errors="replace")
    for texts in ([said, honest, new], [honest, said, new], [said]):
        ranks = read_standings(texts)
        verdict = standing(ranks)
        assert verdict.reason
        if verdict.action is not StandingAction.LIVE:
            continue
        live = {rank: one for rank, one in enumerate(ranks) if one.step != NEW}
        assert {one.step for one in live.values()} == {verdict.step} and verdict.step >= 0
        assert all({*sources} <= live.keys() for sources in verdict.sources.values())
        for of_ranks in zip(*(one.held for one in live.values()), strict=True):
            held = {expert for of_rank in of_ranks for expert in of_rank}
            assert held == set(range(ranks[0].layer_experts or len(held)))


@functools.cache
def _plan() -> ExpertPlan:
    loads = [[9, 4, 2, 2], [1, 1, 8, 3]]
    return plan_experts(loads, ExpertRoom(nodes=2, rank_seats=3))


def _seats_of(rank: int) -> bytes:
    from holdfast._moe.statements import Stack, Statement, encode_statement

    plan = _plan()
    one = Statement(
        loads=tuple(layer.tokens for layer in plan.layers),
        step_s=0.5,
        held=tuple(layer.experts_of(rank) for layer in plan.layers),
        stacks=(Stack(0, "w_in:exp_avg", "float32", (4, 8), "cpu"),),
    )
    return encode_statement(one)


def _seats(data: bytes) -> None:
    """Plan and move with what a rank states of its experts beside an honest one and a new one."""
    from holdfast._moe.statements import (
        Statement,
        check_all_held,
        encode_statement,
        read_statements,
    )

    new = encode_statement(Statement(loads=tuple(layer.tokens for layer in _plan().layers)))
    said = read_statements([data, _seats_of(1), new], layers=2, experts=4, seats=3)
    check_all_held(said, 4)
    held = [one.held for one in said]
    plan = renumbered(_plan().renewed(3, said[0].loads), held)
    for move in moves_of(plan, held):
        assert move.expert in held[move.source][move.layer]
    assert sum(stack.nbytes for one in said for stack in one.stacks) >= 0


# --- what people and others write -----------------------------------------------------------------


def _job(data: bytes) -> None:
    job = parse_job(read_document(data))
    check_local(job)
    ignored_locally(job)
    assert job.key.isascii() and "/" not in job.key and not job.key.startswith(".")
    assert job.world_size >= 1 and job.group_size >= 1
    assert job.memory_per_node_bytes is None or job.memory_per_node_bytes > 0
    assert all(isinstance(text, str) for text in (*job.command, *job.env.values()))


def _loads(data: bytes) -> None:
    loads = read_loads(data)
    assert all(type(tokens) is int for layer in loads for tokens in layer)


def _extras(data: bytes) -> None:
    from holdfast._state.extras import decode_extras, encode_extras, split_extras

    first, second = split_extras(data)
    assert len(first) + len(second) <= len(data)
    decode_extras(encode_extras(decode_extras(b"hfx1" + data)))


def _expert_state(data: bytes) -> None:
    from holdfast._capture.partial_state import PartialState

    state = PartialState.decode(data)
    assert PartialState.decode(state.encode()) == state


def _expert_state_seeds() -> list[bytes]:
    from holdfast._capture.partial_state import PartialState
    from holdfast_core.experts.counts import UNKNOWN, Mark
    from holdfast_core.experts.ledger import ExpertLedger
    from holdfast_core.experts.replenish import Replenishing
    from holdfast_core.experts.token_loss import LossAccount

    unit = UnitKey(0, UnitKind.EXPERT, 1)
    state = PartialState(
        ledger=ExpertLedger.start([unit]).captured(Generation(1, 2), [unit]),
        account=LossAccount.start(),
        k=1,
        marks={unit: Mark(1, 20)},
        measures=UNKNOWN,
        replenishing=Replenishing.start(),
    )
    return [state.encode()]


def _extras_seeds() -> list[bytes]:
    import numpy as np
    import torch

    from holdfast._state.extras import encode_extras

    state = {
        "rng": torch.arange(16, dtype=torch.uint8),
        "numpy": ("MT19937", np.arange(8, dtype=np.uint32), 3, 0, 0.0),
        "scheduler": {"lr": 1e-3, "steps": [1, 2, 2**70], "name": "cosine", 3: None},
        "sizes": {1, 2},
        "kinds": [torch.float32, torch.device("cpu"), torch.Size([1, 2]), 1j, b"x", np.float64(1)],
    }
    return [encode_extras(state)[4:], encode_extras([[]] * 3)[4:]]


# --- between ranks --------------------------------------------------------------------------------


def _window_record(data: bytes) -> None:
    from holdfast._capture import window_records as windows

    record = windows.decode_record(b"hfw1" + data)
    assert record is not None
    assert windows.decode_record(windows.encode_record(record)) == record
    assert record.schedule.window == len(record.extras) and record.restored_extras in record.extras
    for entry in windows.restored_entries(seeds.LAYOUT, record):
        assert 0 <= entry.offset <= seeds.LAYOUT.extras_offset - entry.nbytes


def _window_record_seeds() -> list[bytes]:
    from holdfast._capture.window_records import WindowRecord, encode_record
    from holdfast_core.job.snapshots import Repeats

    first, second = (entry.unit for entry in seeds.LAYOUT.entries)
    training = WindowRecord(
        first=7,
        slots=((first,), (second,)),
        early=("embed.weight:exp_avg",),
        state_end=seeds.LAYOUT.extras_offset,
        extras=(b"hfx1", b""),
    )
    optimizer = msgspec.structs.replace(
        training,
        slots=((second,), (first,)),
        late=training.early,
        early=(),
        repeats=Repeats.OPTIMIZER,
        optimizer_steps=(b"", b"hfx1"),
        digests={second: 2**64 - 1},
    )
    return [encode_record(one)[4:] for one in (training, optimizer)]


def _log_part(data: bytes) -> None:
    from holdfast._elastic.boundary_log import BoundaryLog, decode_part, encode_part
    from holdfast._elastic.pipeline import BoundaryReplay

    part = decode_part(data)
    assert decode_part(encode_part(part)) == part
    plan = ReplayPlan(scope=(0,), line=1, target=2, sources={0: (1,)}, shared_by=1)
    replay = BoundaryReplay(plan, {1: part})
    replay.end()
    assert bool(replay.divergence) == bool(part.sent or part.received)
    log = BoundaryLog(1000, keeps_received=True)
    log.restart(2)
    log.refill({1: part})
    assert log.nbytes <= 1000
    assert log.last == 2 and log.first <= 3


def _log_part_seeds() -> list[bytes]:
    from holdfast._elastic.boundary_log import Crossing, Key, LogPart, Message, encode_part

    sent = (Message(Key(2, Crossing.GRADIENT, 0), b"abc", xxhash.xxh3_64_intdigest(b"abc")),)
    received = ((Key(2, Crossing.ACTIVATION, 1), 2**64 - 1), (Key(2, Crossing.SHARED, 0), 1))
    returned = LogPart(sent, received, copies=sent, first=2, last=2)
    return [encode_part(LogPart(sent, received)), encode_part(LogPart()), encode_part(returned)]


def _replay_evidence(data: bytes) -> None:
    """Statements of two ranks, a zero byte between them."""
    first, _, second = data.partition(b"\0")
    evidence = [decode_evidence(first), decode_evidence(second)]
    assert [decode_evidence(encode_evidence(one)) for one in evidence] == evidence
    plan = plan_replay(evidence)
    if not isinstance(plan, str):
        assert 0 <= plan.line <= plan.target
        assert plan.shared_by not in plan.scope


def _replay_evidence_seeds() -> list[bytes]:
    logged = {"line": 3, "whole": 6, "topology": "dp1·ep1·tp1·pp2"}
    kept = ReplayEvidence(step=8, logged_from=1, logged_to=8, **logged)  # type: ignore[arg-type]
    lost = ReplayEvidence(ring=True, **logged)  # type: ignore[arg-type]
    refusing = ReplayEvidence(step=8, problem="nothing was protected yet")
    return [
        b"\0".join(map(encode_evidence, pair))
        for pair in ((kept, lost), (lost, kept), (refusing, lost))
    ]


# --- records of the catalogue, and tokens ---------------------------------------------------------


def _redis(data: bytes) -> None:
    kind, _, rest = data.partition(b"\n")
    text = rest.decode(errors="replace")
    records.ranks_from([text])
    records.health_from(text)
    for state in records.states_from({"a": text}).values():
        stages_of_state(state), ranks_of_state(state), losses_of_state(state)
    name, _, value = text.partition("=")
    records.stages_from({name: value})
    records.losses_from([text])
    event = records.event_from("1-0", {"event": text})
    history_of([] if event is None else [event])
    del kind


def _web_token(data: bytes) -> None:
    token_expiry(data.decode(errors="replace"))


def _token_claims(data: bytes) -> None:
    from base64 import urlsafe_b64encode

    token_expiry(f"a.{urlsafe_b64encode(data).decode()}.c")


def _certificates(data: bytes) -> None:
    ends_at(data)


def _last_lines(data: bytes) -> None:
    found = last_lines(decoded_end(data), ["secret-of-many"])
    assert len(found) <= CHARACTERS_MAX and found.count("\n") < LINES_MAX
    essence_of(found)


def _amount(data: bytes) -> None:
    assert isinstance(amount(data.decode(errors="replace")), float)


def _refusal(data: bytes) -> None:
    """What a daemon answers to a call that it refuses: the code, and a number for the message."""
    code, _, number = data.decode(errors="replace").partition(" ")
    fields = ((codec.ERROR_CODE_KEY, code), (codec.NEEDED_BYTES_KEY, number))
    assert codec.error_from_metadata(fields, number) is not None


def _session(data: bytes) -> None:
    SessionSeal().open(data.decode(errors="replace"))


def _text(data: bytes) -> None:
    text = data.decode(errors="replace")
    kinds: tuple[Callable[[str], Any], ...] = (parse_bytes, UnitKey.parse)
    for parse in kinds:
        try:
            parse(text)
        except InvalidJobError:
            continue


_MESSAGE = (HoldfastError, DecodeError)
"""gRPC answers a message that cannot be decoded by itself."""

TARGETS: tuple[Target, ...] = (
    Target(name="manifest", parse=_manifest, seeds=seeds.manifests, allowed=(CorruptError,)),
    Target(
        name="manifest-file",
        parse=_manifest_file,
        seeds=lambda: [seeds.manifests()[0] + b"\0" + bytes([0, 1, 2])],
        allowed=(CorruptError,),
    ),
    Target(name="layout", parse=_layout, seeds=seeds.layouts),
    Target(
        name="parity-entry",
        parse=_parity_record,
        seeds=seeds.parity_records,
        allowed=(CorruptError,),
    ),
    Target(
        name="epoch-file",
        parse=lambda data: decode_epoch(sign(data)),
        seeds=seeds.epochs,
        allowed=(CorruptError,),
    ),
    Target(name="kept-manifest", parse=fuzzing_surroundings.kept_manifest, seeds=seeds.manifests),
    Target(name="bulk-request", parse=_bulk_request, seeds=seeds.bulk_requests),
    Target(
        name="bulk-reply",
        parse=_bulk_reply,
        seeds=lambda: [protocol.encode_error(3, CorruptError("no")), *seeds.bulk_requests()],
    ),
    Target(name="report", parse=_report, seeds=seeds.reports, allowed=_MESSAGE),
    Target(name="directive", parse=_directive, seeds=seeds.directives, allowed=_MESSAGE),
    Target(name="membership", parse=_membership, seeds=seeds.memberships, allowed=_MESSAGE),
    Target(
        name="control-message",
        parse=_control_message,
        seeds=seeds.control_messages,
        allowed=_MESSAGE,
    ),
    Target(name="heartbeat", parse=_heartbeat, seeds=seeds.heartbeats, allowed=_MESSAGE),
    Target(
        name="trainer-request",
        parse=fuzzing_service.request,
        seeds=seeds.trainer_requests,
        allowed=(DecodeError,),
    ),
    Target(
        name="arena-socket", parse=fuzzing_surroundings.arena_socket, seeds=seeds.tokens, allowed=()
    ),
    Target(name="http", parse=fuzzing_surroundings.http, seeds=seeds.http_requests, allowed=()),
    Target(
        name="rank-standing",
        parse=_standing,
        seeds=seeds.standings,
        allowed=(ProtocolError,),
    ),
    Target(
        name="rank-seats",
        parse=_seats,
        seeds=lambda: [_seats_of(0)],
        allowed=(ProtocolError,),
    ),
    Target(name="job-file", parse=_job, seeds=seeds.jobs, allowed=(InvalidJobError,)),
    Target(
        name="expert-loads",
        parse=_loads,
        seeds=lambda: [b"[[120, 30], [75, 75]]", b"[[1, 2, 3, 4, 5, 6, 7, 8]]"],
        allowed=(InvalidJobError,),
    ),
    Target(
        name="expert-state",
        parse=_expert_state,
        seeds=_expert_state_seeds,
        allowed=(CorruptError,),
    ),
    Target(name="extras", parse=_extras, seeds=_extras_seeds, allowed=(CorruptError,)),
    Target(
        name="window-record",
        parse=_window_record,
        seeds=_window_record_seeds,
        allowed=(CorruptError,),
    ),
    Target(name="log-part", parse=_log_part, seeds=_log_part_seeds, allowed=(CorruptError,)),
    Target(
        name="replay-evidence",
        parse=_replay_evidence,
        seeds=_replay_evidence_seeds,
        allowed=(CorruptError,),
    ),
    Target(name="redis-record", parse=_redis, seeds=seeds.redis_records, allowed=()),
    Target(name="web-token", parse=_web_token, seeds=seeds.web_tokens, allowed=()),
    Target(name="token-claims", parse=_token_claims, seeds=seeds.token_claims, allowed=()),
    Target(name="token-review", parse=identity_in, seeds=seeds.token_reviews),
    Target(name="session", parse=_session, seeds=lambda: [b"job/1/2/" + b"0" * 32]),
    Target(
        name="certificates",
        parse=_certificates,
        seeds=lambda: [b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"],
        allowed=(ValueError,),
    ),
    Target(
        name="last-lines",
        parse=_last_lines,
        seeds=lambda: [
            b"a\x1b[1m\r\nTOKEN=abc eyJhbGciOiJSUzI1NiJ9.eyJleHAiOjE3MDB9.c2ln\nEnd: 1\n"
        ],
        allowed=(),
    ),
    Target(name="amount", parse=_amount, seeds=lambda: [b"1.5Gi", b"250m"], allowed=()),
    Target(
        name="refusal",
        parse=_refusal,
        seeds=lambda: [b"memory_budget 12", b"corrupt 1"],
        allowed=(),
    ),
    Target(name="text", parse=_text, seeds=seeds.texts, allowed=()),
)
