"""A job's copies in the durable tier, and the order to make one."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.snapshots.generations import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredUnit:
    """An expert that copies may leave out, and where storage has it."""

    unit: str
    """`str(UnitKey)`."""
    version: Generation
    held_in: Generation
    """The set whose file of the same rank holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """One rank's file as a set's manifest lists it: where it is, and how to recognise it."""

    rank: int
    file: str
    """Name of the file within the set."""
    bytes: int
    """Bytes of the whole file: header and payload."""
    header_bytes: int
    """Bytes of the header and of the length before it: the payload begins there."""
    header_xxh3: int
    """xxh3-64 of the first `header_bytes` bytes. The header holds the digests of all pieces, so
    this one number covers every byte of the file."""
    payload_bytes: int
    layout_id: str
    manifest_digest: int
    units: tuple[StoredUnit, ...] = ()
    """Experts that copies may leave out, sorted by name; empty where every file holds all."""


@dataclass(frozen=True, order=True, slots=True)
class PersistOrder:
    """The leader's order to write a generation to the durable tier. Of two orders, the greater
    counts."""

    number: int
    """Number of the order: grows by one with each order of an epoch, also when a generation is
    tried again."""
    ended: bool
    """Whether the set is complete or was given up: no daemon writes to it any more."""
    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedLoad:
    """A rank's snapshot in storage that its daemon cannot use."""

    rank: int
    generation: Generation
    reason: str
