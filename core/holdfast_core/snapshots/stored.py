"""What is known of a job's copies in the durable tier, and how daemons are told to make one."""

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
    """What a set's manifest says of one rank's file: where it is and how to know that it is it."""

    rank: int
    file: str
    """Name within the set."""
    bytes: int
    """Of the whole file: header and payload."""
    header_bytes: int
    """Of the header with its length before it: where the payload begins."""
    header_xxh3: int
    """xxh3-64 of the first `header_bytes` bytes. The header holds the digests of all pieces, so
    this one number stands for every byte of the file."""
    payload_bytes: int
    layout_id: str
    manifest_digest: int
    units: tuple[StoredUnit, ...] = ()
    """The experts that copies may leave out, by name; none where every file holds all."""


@dataclass(frozen=True, order=True, slots=True)
class PersistOrder:
    """The leader's order to write a generation to the durable tier. Of two, the greater counts."""

    number: int
    """Grows by one with each order of an epoch; so does it when a generation is tried again."""
    ended: bool
    """The set is complete, or was given up: nobody writes for it any more."""
    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedLoad:
    """A rank's snapshot in storage that its daemon cannot use."""

    rank: int
    generation: Generation
    reason: str
