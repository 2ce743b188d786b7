"""Conversion between protocol messages and the values of `holdfast_core`, in both directions.

Adapters hand values to the engine, never messages: a malformed message is refused in one place,
and the engine runs without gRPC. A message that does not make a valid value raises `ProtocolError`.

An absent `Generation` in a message is `None` in a value. Lines are different: `has_line` is true
once there is a decision, and an absent generation within a line is a fresh start.

This module must not decide anything beyond "is this well-formed", and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from holdfast_core.errors import (
    HoldfastError,
    InvalidJobError,
    MemoryBudgetError,
    ProtocolError,
    VersionMismatchError,
    by_code,
)
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Member, Membership, Redundancy, Tier
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_protos import peer_pb2, persisting, values_pb2
from holdfast_protos.loading import failed_loads_from_proto, failed_loads_to_proto

PROTOCOL_VERSION = 1
"""Version of the protocol. It grows when an older side can no longer understand a newer one; a new
field alone does not require that."""

ERROR_CODE_KEY = "holdfast-code"
"""Trailing metadata of an aborted call: `HoldfastError.code`. The message is the status detail."""

NEEDED_BYTES_KEY = "holdfast-needed-bytes"
AVAILABLE_BYTES_KEY = "holdfast-available-bytes"


# --- versions and errors --------------------------------------------------------------------------


def check_version(theirs: int, who: str) -> None:
    """Refuse a far side that speaks another version of the protocol.

    `who` names it for a person: "the SDK of rank 3", "the daemon on node a".

    Raises:
        VersionMismatchError: with both versions and which side to upgrade.
    """
    if theirs == PROTOCOL_VERSION:
        return
    older = who if theirs < PROTOCOL_VERSION else "this side"
    raise VersionMismatchError(
        f"{who} speaks protocol version {theirs}, this side speaks version {PROTOCOL_VERSION}: "
        f"upgrade the holdfast package of {older}, so that both have the same version"
    )


def error_to_metadata(error: HoldfastError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that carries `error` across gRPC beside its message."""
    code = (ERROR_CODE_KEY, error.code)
    if isinstance(error, MemoryBudgetError):
        return (
            code,
            (NEEDED_BYTES_KEY, str(error.needed_bytes)),
            (AVAILABLE_BYTES_KEY, str(error.available_bytes)),
        )
    return (code,)


def error_from_metadata(
    metadata: Iterable[tuple[str, str | bytes]] | None, message: str
) -> HoldfastError | None:
    """The error that the far side raised, or None when the failure is not one of ours.

    `metadata` is the call's trailing metadata, `message` its status detail.
    """
    fields = {key: value for key, value in metadata or () if isinstance(value, str)}
    code = fields.get(ERROR_CODE_KEY)
    if code is None:
        return None
    if code == MemoryBudgetError.code:
        return MemoryBudgetError(
            message,
            needed_bytes=_decimal(fields.get(NEEDED_BYTES_KEY)),
            available_bytes=_decimal(fields.get(AVAILABLE_BYTES_KEY)),
        )
    return by_code(code, message)


_DIGITS_MAX = 20
"""Digits of 64 bits."""


def _decimal(text: str | None) -> int:
    if text is None or len(text) > _DIGITS_MAX or not (text.isascii() and text.isdigit()):
        return 0
    return int(text)


# --- generations and lines ------------------------------------------------------------------------


def generation_to_proto(value: Generation) -> values_pb2.Generation:
    """`value` as a message."""
    return values_pb2.Generation(epoch=value.epoch, step=value.step)


def generation_from_proto(message: values_pb2.Generation) -> Generation:
    """The generation in `message`; test `HasField` first where it may be absent."""
    return Generation(message.epoch, message.step)


def optional_generation_to_proto(value: Generation | None) -> values_pb2.Generation | None:
    """`value` for a message's constructor, where None leaves the field absent."""
    return generation_to_proto(value) if value else None


def _generation_in(message: Any, field: str) -> Generation | None:
    return generation_from_proto(getattr(message, field)) if message.HasField(field) else None


def line_to_proto(value: Line) -> values_pb2.Line:
    """`value` as a message; a fresh start has no generation."""
    return values_pb2.Line(
        generation=optional_generation_to_proto(value.generation),
        reason=value.reason,
        stored=value.stored,
    )


def line_from_proto(message: values_pb2.Line) -> Line:
    """The line in `message`; look at `has_line` first where there may be none."""
    generation = _generation_in(message, "generation")
    return Line(generation=generation, reason=message.reason, stored=message.stored)


def optional_line_to_proto(value: Line | None) -> values_pb2.Line | None:
    """`value` for a message's constructor; set `has_line` beside it."""
    return None if value is None else line_to_proto(value)


# --- places and memberships -----------------------------------------------------------------------


def member_to_proto(value: Member) -> values_pb2.Member:
    """`value` as a message."""
    return values_pb2.Member(
        index=value.index,
        node=value.node,
        memory_id=value.memory_id,
        peer_address=value.peer_address,
        bulk_address=value.bulk_address,
        domain=value.domain,
    )


def member_from_proto(message: values_pb2.Member) -> Member:
    """The member in `message`."""
    return Member(
        index=message.index,
        node=message.node,
        memory_id=message.memory_id,
        peer_address=message.peer_address,
        bulk_address=message.bulk_address,
        domain=message.domain,
    )


def membership_to_proto(value: Membership) -> values_pb2.Membership:
    """`value` as a message."""
    return values_pb2.Membership(
        job=value.job,
        uid=value.uid,
        epoch=value.epoch,
        revision=value.revision,
        members=[member_to_proto(place) for place in value.members],
        nproc_per_node=value.nproc_per_node,
        groups=[values_pb2.ParityGroup(members=group) for group in value.groups],
        redundancy=value.redundancy.value,
        replicas=value.replicas,
        tier=None if value.tier is None else values_pb2.Tier(**asdict(value.tier)),
        memory_bytes=value.memory_bytes,
        slots=value.slots,
        protection_bytes_s=value.protection_bytes_s,
        restarting=sorted(value.restarting),
        restarting_ranks=sorted(value.restarting_ranks),
        since=value.since,
        external=value.external,
        order=value.order,
        past=[
            values_pb2.PastWorld(
                since=world.since,
                members=world.members,
                groups=[values_pb2.ParityGroup(members=group) for group in world.groups],
                order=world.order,
                until=world.until,
            )
            for world in value.past
        ],
    )


def membership_from_proto(message: values_pb2.Membership) -> Membership:
    """The membership in `message`.

    Raises:
        ProtocolError: when members, groups, ranks or redundancy contradict themselves.
    """
    if message.nproc_per_node < 1:
        raise ProtocolError(f"membership of job {message.job!r} has no ranks on its members")
    try:
        return Membership(
            job=message.job,
            uid=message.uid,
            epoch=message.epoch,
            revision=message.revision,
            members=tuple(member_from_proto(place) for place in message.members),
            nproc_per_node=message.nproc_per_node,
            groups=tuple(tuple(group.members) for group in message.groups),
            redundancy=Redundancy(message.redundancy),
            replicas=message.replicas or 1,  # older peers do not send it
            external=message.external,
            order=tuple(message.order),
            tier=_tier(message.tier) if message.HasField("tier") else None,
            memory_bytes=message.memory_bytes,
            slots=message.slots,
            protection_bytes_s=message.protection_bytes_s,
            restarting=frozenset(message.restarting),
            restarting_ranks=frozenset(message.restarting_ranks),
            since=message.since,
            past=tuple(_past_world(world, message.nproc_per_node) for world in message.past),
        )
    except (InvalidJobError, ValueError) as error:
        raise ProtocolError(f"membership of job {message.job!r} is malformed: {error}") from error


def _past_world(message: values_pb2.PastWorld, nproc_per_node: int) -> MemberWorld:
    return MemberWorld(
        since=message.since,
        members=tuple(message.members),
        nproc_per_node=nproc_per_node,
        groups=tuple(tuple(group.members) for group in message.groups),
        order=tuple(message.order),
        until=message.until,
    )


def _tier(message: values_pb2.Tier) -> Tier:
    return Tier(**{field.name: getattr(message, field.name) for field in fields(Tier)})


# --- inventories ----------------------------------------------------------------------------------


def snapshot_entry_to_proto(value: SnapshotEntry) -> values_pb2.SnapshotEntry:
    """`value` as a message."""
    return values_pb2.SnapshotEntry(
        rank=value.rank,
        generation=generation_to_proto(value.generation),
        manifest_digest=value.manifest_digest,
        payload_bytes=value.payload_bytes,
        window=value.window,
    )


def snapshot_entry_from_proto(message: values_pb2.SnapshotEntry) -> SnapshotEntry:
    """The entry in `message`.

    Raises:
        ProtocolError: when it names no generation.
    """
    return SnapshotEntry(
        rank=message.rank,
        generation=_required_generation(message, f"snapshot of rank {message.rank}"),
        manifest_digest=message.manifest_digest,
        payload_bytes=message.payload_bytes,
        window=message.window,
    )


def parity_entry_to_proto(value: ParityEntry) -> values_pb2.ParityEntry:
    """`value` as a message."""
    return values_pb2.ParityEntry(
        lane=value.lane,
        generation=generation_to_proto(value.generation),
        group=value.group,
        sources=[
            values_pb2.ParitySource(rank=rank, manifest_digest=digest)
            for rank, digest in value.sources
        ],
    )


def parity_entry_from_proto(message: values_pb2.ParityEntry) -> ParityEntry:
    """The entry in `message`.

    Raises:
        ProtocolError: when it names no generation.
    """
    return ParityEntry(
        lane=message.lane,
        generation=_required_generation(message, f"parity block of lane {message.lane}"),
        group=tuple(message.group),
        sources=tuple((source.rank, source.manifest_digest) for source in message.sources),
    )


def inventory_to_proto(value: Inventory) -> values_pb2.Inventory:
    """`value` as a message."""
    return values_pb2.Inventory(
        snapshots=[snapshot_entry_to_proto(entry) for entry in value.snapshots],
        parities=[parity_entry_to_proto(entry) for entry in value.parities],
        writing=_rank_generations_to_proto(value.writing),
        passed=_rank_generations_to_proto(value.passed),
    )


def inventory_from_proto(message: values_pb2.Inventory) -> Inventory:
    """The inventory in `message`, in the order it was sent.

    Raises:
        ProtocolError: when an entry names no generation.
    """
    return Inventory(
        snapshots=tuple(snapshot_entry_from_proto(entry) for entry in message.snapshots),
        parities=tuple(parity_entry_from_proto(entry) for entry in message.parities),
        writing=_rank_generations_from_proto(message.writing),
        passed=_rank_generations_from_proto(message.passed),
    )


def _rank_generations_to_proto(
    pairs: Iterable[tuple[int, Generation]],
) -> list[values_pb2.RankGeneration]:
    return [
        values_pb2.RankGeneration(rank=rank, generation=generation_to_proto(generation))
        for rank, generation in pairs
    ]


def _rank_generations_from_proto(
    messages: Iterable[values_pb2.RankGeneration],
) -> tuple[tuple[int, Generation], ...]:
    return tuple(
        (message.rank, _required_generation(message, f"entry of rank {message.rank}"))
        for message in messages
    )


def _required_generation(
    message: values_pb2.SnapshotEntry | values_pb2.ParityEntry | values_pb2.RankGeneration,
    what: str,
) -> Generation:
    if not message.HasField("generation"):
        raise ProtocolError(f"{what} in an inventory names no generation")
    return generation_from_proto(message.generation)


# --- reports and directives -----------------------------------------------------------------------


def report_to_proto(value: MemberReport) -> peer_pb2.ReportMessage:
    """`value` as a message."""
    return peer_pb2.ReportMessage(
        job=value.job,
        epoch=value.epoch,
        member=value.member,
        incarnation=value.incarnation,
        sequence=value.sequence,
        verified=value.verified,
        inventory=inventory_to_proto(value.inventory),
        line=optional_line_to_proto(value.line),
        has_line=value.line is not None,
        retained=optional_generation_to_proto(value.retained),
        persist=persisting.optional_order_to_proto(value.persist),
        persisted=[persisting.file_to_proto(file) for file in value.persisted],
        persist_failure=value.persist_failure,
        stored=optional_generation_to_proto(value.stored),
        wanted=optional_generation_to_proto(value.wanted),
        unloadable=failed_loads_to_proto(value.unloadable),
    )


def report_from_proto(message: peer_pb2.ReportMessage) -> MemberReport:
    """The report in `message`.

    Raises:
        ProtocolError: when its inventory is malformed.
    """
    return MemberReport(
        job=message.job,
        epoch=message.epoch,
        member=message.member,
        incarnation=message.incarnation,
        sequence=message.sequence,
        verified=message.verified,
        inventory=inventory_from_proto(message.inventory),
        line=line_from_proto(message.line) if message.has_line else None,
        retained=_generation_in(message, "retained"),
        persist=persisting.order_from_proto(message.persist)
        if message.HasField("persist")
        else None,
        persisted=tuple(persisting.file_from_proto(file) for file in message.persisted),
        persist_failure=message.persist_failure,
        stored=_generation_in(message, "stored"),
        wanted=_generation_in(message, "wanted"),
        unloadable=failed_loads_from_proto(message.unloadable),
    )


def directive_to_proto(value: Directive) -> peer_pb2.DirectiveMessage:
    """`value` as a message."""
    return peer_pb2.DirectiveMessage(
        job=value.job,
        epoch=value.epoch,
        has_line=value.line is not None,
        line=optional_line_to_proto(value.line),
        protected=optional_generation_to_proto(value.protected),
        retained=optional_generation_to_proto(value.retained),
        dead=[generation_to_proto(generation) for generation in value.dead],
        rendezvous=value.rendezvous,
        store_key=value.store_key,
        persist=persisting.optional_order_to_proto(value.persist),
        persisted=optional_generation_to_proto(value.persisted),
        whole_after=optional_generation_to_proto(value.whole_after),
        load=optional_generation_to_proto(value.load),
    )


def directive_from_proto(message: peer_pb2.DirectiveMessage) -> Directive:
    """The directive in `message`."""
    return Directive(
        job=message.job,
        epoch=message.epoch,
        line=line_from_proto(message.line) if message.has_line else None,
        protected=_generation_in(message, "protected"),
        retained=_generation_in(message, "retained"),
        dead=tuple(generation_from_proto(generation) for generation in message.dead),
        rendezvous=message.rendezvous,
        store_key=message.store_key,
        persist=persisting.order_from_proto(message.persist)
        if message.HasField("persist")
        else None,
        persisted=_generation_in(message, "persisted"),
        whole_after=_generation_in(message, "whole_after"),
        load=_generation_in(message, "load"),
    )
