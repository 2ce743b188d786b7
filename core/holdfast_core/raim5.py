"""RAIM5: which bytes protect which, for a parity group of any n ≥ 2 members of unequal size.

REFT §4.3 and figure 7, generalised. The payload of the member at position i of a group of n is cut
into n − 1 chunks; chunk j belongs to the parity block that the member at position
(i + j + 1) mod n owns. Each block therefore holds one chunk of every other member and none of its
owner's, so that the loss of any one member leaves, for each of its chunks, the block and all the
other chunks that went into it. Unequal members are zero-extended: XOR with zeros costs nothing.

Cost: L bytes sent per member; about L / (n − 1) bytes kept, against L for a replica.

This module only says which ranges; `holdfast_daemon.parity` moves and combines the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_core.layouts import round_up


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, start + nbytes) of a payload or a parity block."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """A range of the payload of the member at `position` that goes into a parity block at 0."""

    position: int
    chunk: int
    range: Range


@dataclass(frozen=True, slots=True)
class ChunkRecovery:
    """How to recover one chunk of a lost member: the owner's parity XOR the other contributions."""

    chunk: int
    range: Range
    """Where the chunk lies in the lost member's payload."""
    owner: int
    """Position of the member whose parity block holds it."""
    others: tuple[Contribution, ...]


def chunk_bytes(payload_bytes: int, n: int, piece_bytes: int) -> int:
    """Size of each of the n − 1 chunks of a payload, in whole pieces (the last may be short).

    Whole pieces, so that whoever receives a chunk can verify it with the manifest's digests.
    """
    _check_size(n)
    return round_up(-(-payload_bytes // (n - 1)), piece_bytes)


def chunk_range(payload_bytes: int, n: int, piece_bytes: int, chunk: int) -> Range:
    """Where chunk `chunk` lies in a payload; empty when the payload is too short to reach it."""
    size = chunk_bytes(payload_bytes, n, piece_bytes)
    start = min(chunk * size, payload_bytes)
    return Range(start, min(size, payload_bytes - start))


def owner_of(position: int, chunk: int, n: int) -> int:
    """Position of the member that owns the parity of chunk `chunk` of the member at `position`."""
    return (position + chunk + 1) % n


def contributions(
    owner: int, payload_bytes: Sequence[int], piece_bytes: int
) -> tuple[Contribution, ...]:
    """The ranges that the member at `owner` must XOR into its parity block, one of each other.

    `payload_bytes[i]` is the payload size of the member at position i.
    """
    n = len(payload_bytes)
    _check_size(n)
    return tuple(
        Contribution(i, chunk, chunk_range(payload_bytes[i], n, piece_bytes, chunk))
        for i in range(n)
        if i != owner
        for chunk in [(owner - i - 1) % n]
    )


def parity_bytes(owner: int, payload_bytes: Sequence[int], piece_bytes: int) -> int:
    """Size of the parity block of the member at `owner`: its longest contribution."""
    return max(c.range.nbytes for c in contributions(owner, payload_bytes, piece_bytes))


def recovery(
    lost: int, payload_bytes: Sequence[int], piece_bytes: int
) -> tuple[ChunkRecovery, ...]:
    """How to rebuild the payload of the member at `lost` from the others, chunk by chunk."""
    n = len(payload_bytes)
    _check_size(n)
    plan = []
    for chunk in range(n - 1):
        owner = owner_of(lost, chunk, n)
        others = tuple(
            c for c in contributions(owner, payload_bytes, piece_bytes) if c.position != lost
        )
        where = chunk_range(payload_bytes[lost], n, piece_bytes, chunk)
        plan.append(ChunkRecovery(chunk, where, owner, others))
    return tuple(plan)


def _check_size(n: int) -> None:
    if n < 2:
        raise ValueError(f"a RAIM5 group has at least 2 members, not {n}")
