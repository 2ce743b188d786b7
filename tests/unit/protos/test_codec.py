"""Every value survives the wire, and what is not a value of ours is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import (
    HoldfastError,
    MemoryBudgetError,
    ProtocolError,
    StaleEpochError,
    VersionMismatchError,
)
from holdfast_core.experts.loss_reports import RECOVERIES_KEPT, LossReport, RecoveryLoss
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import (
    PAST_WORLDS_MAX,
    Member,
    Membership,
    Redundancy,
    Tier,
)
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.snapshots.stored import FailedLoad, PersistOrder, RankFile, StoredUnit
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_protos import codec, peer_pb2, values_pb2
from holdfast_protos.losses import (
    LAYERS_MAX,
    NUMBER_MAX,
    loss_from_proto,
    loss_to_proto,
    rank_loss_from_proto,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
# protobuf carries Unicode scalar values only: no lone surrogates
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


Value = TypeVar("Value")


def _whole(kind: type[Value], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Value]:
    """Values of `kind` with every field drawn, so that a new field cannot miss the codec."""
    assert set(fields) == {field.name for field in dataclasses.fields(cast(Any, kind))}
    return st.builds(kind, **fields)


GENERATIONS = st.builds(Generation, U64, U64)
LINES = _whole(Line, generation=st.none() | GENERATIONS, reason=TEXT, stored=st.booleans())
PLACES = _whole(
    Member,
    index=U32,
    node=TEXT,
    memory_id=TEXT,
    peer_address=TEXT,
    bulk_address=TEXT,
    domain=TEXT,
)
SNAPSHOTS = _whole(
    SnapshotEntry,
    rank=U32,
    generation=GENERATIONS,
    manifest_digest=U64,
    payload_bytes=U64,
    window=st.booleans(),
)
PARITIES = _whole(
    ParityEntry,
    lane=U32,
    generation=GENERATIONS,
    group=st.lists(U32, max_size=4).map(tuple),
    sources=st.lists(st.tuples(U32, U64), max_size=4).map(tuple),
)
RANK_GENERATIONS = st.lists(st.tuples(U32, GENERATIONS), max_size=4).map(tuple)
INVENTORIES = _whole(
    Inventory,
    snapshots=st.lists(SNAPSHOTS, max_size=4).map(tuple),
    parities=st.lists(PARITIES, max_size=3).map(tuple),
    writing=RANK_GENERATIONS,
    passed=RANK_GENERATIONS,
)
ORDERS = _whole(PersistOrder, number=U64, ended=st.booleans(), generation=GENERATIONS)
UNITS = _whole(StoredUnit, unit=TEXT, version=GENERATIONS, held_in=GENERATIONS)
FILES = _whole(
    RankFile,
    rank=U32,
    file=TEXT,
    bytes=U64,
    header_bytes=U64,
    header_xxh3=U64,
    payload_bytes=U64,
    layout_id=TEXT,
    manifest_digest=U64,
    units=st.lists(UNITS, max_size=3).map(tuple),
)
FAILED_LOADS = _whole(FailedLoad, rank=U32, generation=GENERATIONS, reason=TEXT)
REPORTS = _whole(
    MemberReport,
    job=TEXT,
    epoch=U64,
    member=U32,
    incarnation=U64,
    sequence=U64,
    verified=st.booleans(),
    inventory=INVENTORIES,
    line=st.none() | LINES,
    retained=st.none() | GENERATIONS,
    persist=st.none() | ORDERS,
    persisted=st.lists(FILES, max_size=2).map(tuple),
    persist_failure=TEXT,
    stored=st.none() | GENERATIONS,
    wanted=st.none() | GENERATIONS,
    unloadable=st.lists(FAILED_LOADS, max_size=3).map(tuple),
)
DIRECTIVES = _whole(
    Directive,
    job=TEXT,
    epoch=U64,
    line=st.none() | LINES,
    protected=st.none() | GENERATIONS,
    retained=st.none() | GENERATIONS,
    dead=st.lists(GENERATIONS, max_size=4).map(tuple),
    rendezvous=TEXT,
    store_key=TEXT,
    persist=st.none() | ORDERS,
    persisted=st.none() | GENERATIONS,
    whole_after=st.none() | GENERATIONS,
    load=st.none() | GENERATIONS,
)
PORTIONS = st.floats(0, 1)
RECOVERIES = _whole(
    RecoveryLoss,
    epoch=U64,
    step=U64,
    lost_tokens=U64,
    plt=PORTIONS,
    mlt=st.floats(0, 1000),
    k_before=U32,
    k_after=U32,
    total_tokens=U64,
    total_plt=PORTIONS,
    total_mlt=st.floats(0, 1000),
)


@st.composite
def losses(draw: st.DrawFn) -> LossReport:
    """Reports of as many numbers as layers."""
    layers = draw(st.lists(U32, max_size=4))
    tokens = st.lists(U64, min_size=len(layers), max_size=len(layers)).map(tuple)
    return draw(
        _whole(
            LossReport,
            ranks=U32,
            k=U32,
            experts_max=U32,
            limit=PORTIONS,
            layers=st.just(tuple(layers)),
            at_risk=tokens,
            routed=tokens,
            lost=tokens,
            recoveries=st.lists(RECOVERIES, max_size=3).map(tuple),
        )
    )


TIERS = st.builds(
    Tier,
    uri=TEXT,
    every_steps=U64,
    every_s=st.floats(0, 1e9),
    keep=U32,
    keep_every=U64,
    bytes_per_s=U64,
    experts=U32,
    restore_from=TEXT,
)


@st.composite
def memberships(draw: st.DrawFn) -> Membership:
    """Memberships with gaps in their indices and groups of any sizes."""
    indices = sorted(draw(st.sets(U32, min_size=1, max_size=6)))
    shuffled = draw(st.permutations(indices))
    cuts = sorted(draw(st.sets(st.integers(1, len(indices)), max_size=3)) | {0, len(indices)})
    groups = tuple(tuple(shuffled[start:end]) for start, end in itertools.pairwise(cuts))
    nproc_per_node = draw(st.integers(1, 2**32 - 1))
    *past, since, epoch = sorted(draw(st.sets(U64, min_size=2, max_size=PAST_WORLDS_MAX + 2)))
    return Membership(
        job=draw(TEXT),
        epoch=epoch,
        since=since,
        past=tuple(
            MemberWorld(
                since=begun,
                members=tuple(indices),
                nproc_per_node=nproc_per_node,
                groups=groups,
                order=draw(st.sampled_from([(), tuple(shuffled)])),
                until=draw(st.sampled_from([0, after])),
            )
            for begun, after in itertools.pairwise([*past, since])
        ),
        revision=draw(U64),
        members=tuple(
            Member(
                index=index,
                node=draw(TEXT),
                memory_id=draw(TEXT),
                peer_address=draw(TEXT),
                bulk_address=draw(TEXT),
            )
            for index in indices
        ),
        nproc_per_node=nproc_per_node,
        groups=groups,
        order=draw(st.sampled_from([(), tuple(shuffled)])),
        external=draw(st.booleans()),
        redundancy=draw(st.sampled_from(Redundancy)),
        memory_bytes=draw(U64),
        protection_bytes_s=draw(U64),
        replicas=draw(st.integers(1, 2**32 - 1)),
        tier=draw(st.none() | TIERS),
        # in the order of the wire, which repr shows
        restarting=frozenset(sorted(draw(st.sets(st.sampled_from(indices))))),
        restarting_ranks=frozenset(
            index * nproc_per_node
            for index in sorted(draw(st.sets(st.sampled_from(indices))))
            if index * nproc_per_node < 2**32
        ),
    )


ROUND_TRIPS: dict[
    str, tuple[st.SearchStrategy[Any], Callable[[Any], Message], Callable[[Any], object]]
] = {
    "generation": (GENERATIONS, codec.generation_to_proto, codec.generation_from_proto),
    "line": (LINES, codec.line_to_proto, codec.line_from_proto),
    "place": (PLACES, codec.member_to_proto, codec.member_from_proto),
    "membership": (memberships(), codec.membership_to_proto, codec.membership_from_proto),
    "snapshot": (SNAPSHOTS, codec.snapshot_entry_to_proto, codec.snapshot_entry_from_proto),
    "parity": (PARITIES, codec.parity_entry_to_proto, codec.parity_entry_from_proto),
    "inventory": (INVENTORIES, codec.inventory_to_proto, codec.inventory_from_proto),
    "report": (REPORTS, codec.report_to_proto, codec.report_from_proto),
    "directive": (DIRECTIVES, codec.directive_to_proto, codec.directive_from_proto),
    "loss": (losses(), loss_to_proto, loss_from_proto),
}


@pytest.mark.parametrize("kind", ROUND_TRIPS)
@given(data=st.data())
def test_a_value_survives_the_wire(kind: str, data: st.DataObject) -> None:
    values, to_proto, from_proto = ROUND_TRIPS[kind]
    value = data.draw(values)
    sent = to_proto(value)
    received = type(sent).FromString(sent.SerializeToString())
    # repr, because Line compares without its reason, which must survive too
    assert repr(from_proto(received)) == repr(value)
    assert from_proto(received) == value


def test_no_line_and_a_fresh_start_are_different() -> None:
    fresh = Line(generation=None, reason="no daemon holds a snapshot")
    undecided = codec.directive_to_proto(Directive(job="j", epoch=1))
    decided = codec.directive_to_proto(Directive(job="j", epoch=1, line=fresh))
    assert codec.directive_from_proto(undecided).line is None
    assert codec.directive_from_proto(decided).line == fresh


def test_the_first_generation_is_not_mistaken_for_none() -> None:
    first = Directive(job="j", epoch=0, protected=Generation(0, 0))
    sent = codec.directive_to_proto(first).SerializeToString()
    received = codec.directive_from_proto(peer_pb2.DirectiveMessage.FromString(sent))
    assert received.protected == Generation(0, 0)
    assert received.retained is None


def _membership(**changes: Any) -> values_pb2.Membership:
    fields: dict[str, Any] = {
        "job": "j",
        "members": [values_pb2.Member(index=0), values_pb2.Member(index=1)],
        "nproc_per_node": 1,
        "groups": [values_pb2.ParityGroup(members=[0, 1])],
        "redundancy": "RAIM5",
    }
    return values_pb2.Membership(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"members": []}, "unique and ascending"),
        ({"members": [values_pb2.Member(index=1)] * 2}, "unique and ascending"),
        ({"groups": [values_pb2.ParityGroup(members=[0])]}, "parity groups"),
        ({"nproc_per_node": 0}, "no ranks"),
        ({"restarting": [1, 7]}, "7 is to be restarted but is not a member"),
        ({"restarting_ranks": [0, 99]}, "rank 99 is to be restarted but belongs to no member"),
        ({"redundancy": "RAIM7"}, "RAIM7"),
    ],
)
def test_a_malformed_membership_is_refused(changes: dict[str, Any], named: str) -> None:
    assert codec.membership_from_proto(_membership()).leader == 0
    with pytest.raises(ProtocolError, match=named):
        codec.membership_from_proto(_membership(**changes))


@pytest.mark.parametrize(
    "inventory",
    [
        values_pb2.Inventory(snapshots=[values_pb2.SnapshotEntry(rank=3)]),
        values_pb2.Inventory(parities=[values_pb2.ParityEntry(lane=3)]),
        values_pb2.Inventory(writing=[values_pb2.RankGeneration(rank=3)]),
        values_pb2.Inventory(passed=[values_pb2.RankGeneration(rank=3)]),
    ],
)
def test_an_entry_without_a_generation_is_refused(inventory: values_pb2.Inventory) -> None:
    with pytest.raises(ProtocolError, match="3 in an inventory names no generation"):
        codec.report_from_proto(peer_pb2.ReportMessage(job="j", inventory=inventory))


@pytest.mark.parametrize(
    ("theirs", "upgrade"),
    [
        (codec.PROTOCOL_VERSION - 1, "package of the SDK of rank 3"),
        (codec.PROTOCOL_VERSION + 1, "package of this side"),
    ],
)
def test_another_version_is_refused_with_what_to_upgrade(theirs: int, upgrade: str) -> None:
    with pytest.raises(VersionMismatchError, match=upgrade) as caught:
        codec.check_version(theirs, "the SDK of rank 3")
    assert f"version {theirs}," in str(caught.value)
    assert f"version {codec.PROTOCOL_VERSION}:" in str(caught.value)


def test_the_same_version_is_accepted() -> None:
    codec.check_version(codec.PROTOCOL_VERSION, "the SDK of rank 3")


def test_an_error_keeps_its_kind_across_the_wire() -> None:
    error = StaleEpochError("epoch 3 has ended: this is epoch 4")
    received = codec.error_from_metadata(codec.error_to_metadata(error), str(error))
    assert type(received) is StaleEpochError
    assert str(received) == str(error)


def test_a_refused_budget_keeps_its_two_numbers() -> None:
    error = MemoryBudgetError("does not fit", needed_bytes=2**40, available_bytes=17)
    received = codec.error_from_metadata(codec.error_to_metadata(error), str(error))
    assert isinstance(received, MemoryBudgetError)
    assert (received.needed_bytes, received.available_bytes) == (2**40, 17)


def test_a_kind_of_a_newer_version_is_still_ours() -> None:
    received = codec.error_from_metadata([(codec.ERROR_CODE_KEY, "from_the_future")], "m")
    assert type(received) is HoldfastError


@pytest.mark.parametrize("metadata", [None, [], [("grpc-status-details-bin", b"\x00")]])
def test_a_failure_of_the_transport_is_not_ours(
    metadata: list[tuple[str, str | bytes]] | None,
) -> None:
    assert codec.error_from_metadata(metadata, "Socket closed") is None


def test_a_report_of_losses_whose_numbers_do_not_fit_is_refused() -> None:
    message = values_pb2.LossReport(layers=[0, 1], at_risk=[3], routed=[1, 2], lost=[0, 0])
    with pytest.raises(ProtocolError, match="2 layers, but 1, 2 and 2 numbers"):
        loss_from_proto(message)
    with pytest.raises(ProtocolError, match="limit"):
        loss_from_proto(values_pb2.LossReport(limit=2.0))


def test_no_more_recoveries_are_taken_than_are_kept() -> None:
    every = [values_pb2.RecoveryLoss(epoch=epoch) for epoch in range(RECOVERIES_KEPT + 3)]
    found = loss_from_proto(values_pb2.LossReport(recoveries=every))
    assert [each.epoch for each in found.recoveries] == list(range(3, RECOVERIES_KEPT + 3))


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 2},
        {"layers": [0], "at_risk": [0], "routed": [NUMBER_MAX + 1], "lost": [0]},
        dict.fromkeys(("layers", "at_risk", "routed", "lost"), [1] * (LAYERS_MAX + 1)),
    ],
    ids=["ranks", "number", "layers"],
)
def test_a_trainer_cannot_report_what_no_heartbeat_could_carry(change: dict[str, Any]) -> None:
    largest: dict[str, Any] = {
        "layers": [0],
        "at_risk": [NUMBER_MAX],
        "routed": [NUMBER_MAX],
        "lost": [0],
    }
    assert rank_loss_from_proto(values_pb2.LossReport(ranks=1, **largest)).ranks == 1
    with pytest.raises(ProtocolError, match="a trainer may report 1 rank"):
        rank_loss_from_proto(values_pb2.LossReport(**{"ranks": 1, **largest, **change}))


def test_an_order_to_persist_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError, match="names no generation"):
        codec.report_from_proto(
            peer_pb2.ReportMessage(job="j", persist=values_pb2.PersistOrder(number=1))
        )
