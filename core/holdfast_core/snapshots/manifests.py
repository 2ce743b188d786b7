"""Manifests of snapshots and of parity blocks, and a daemon's inventory of both."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertVersion:
    """A captured version of an expert, as recorded by one rank."""

    unit: str
    """`str(UnitKey)`."""
    generation: Generation
    number: int
    """Number of the snapshot in the job's life, from 0."""
    tokens: int
    """Tokens that the rank had routed to the expert when it was captured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of a sealed snapshot: enough to find, verify and restore every byte.

    The payload is the slot's bytes [0, payload_bytes): the tensors at the offsets that the layout
    gives, then the extras. It is checksummed in pieces on a fixed grid, so that any range that
    starts on the grid can be verified alone: by a parity owner, a rebuilt member, a restoring rank.
    """

    job: str
    rank: int
    world_size: int
    generation: Generation
    layout_id: str
    payload_bytes: int
    extras_offset: int
    extras_bytes: int
    piece_bytes: int
    digests: bytes
    """xxh3-64 of each piece, ceil(payload_bytes / piece_bytes) of them, 8 bytes little-endian."""
    nan_units: tuple[str, ...] = ()
    """Units that held a NaN when they were captured (captured faithfully, counted)."""
    experts: tuple[ExpertVersion, ...] = ()
    """Versions of experts, where snapshots leave some out: for each expert in the snapshot the
    version that it holds, and for each expert of other ranks the newest that this rank knows."""
    older: tuple[ExpertVersion, ...] = ()
    """Versions older than those in `experts` that other ranks may have restored; only for a
    snapshot from durable storage. They determine what this rank's tokens lost by it."""
    first_step: int = 0
    """First step of the sparse window that ends with the generation; 0 where all is of one step."""

    def __post_init__(self) -> None:
        if self.piece_bytes < 1 or self.payload_bytes < 0:
            raise InvalidJobError(
                f"manifest of rank {self.rank} generation {self.generation}: {self.payload_bytes} "
                f"bytes in pieces of {self.piece_bytes}"
            )
        pieces = -(-self.payload_bytes // self.piece_bytes)
        if len(self.digests) != 8 * pieces:
            raise InvalidJobError(
                f"manifest of rank {self.rank} generation {self.generation}: {len(self.digests)} "
                f"bytes of digests for {pieces} pieces"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotEntry:
    """One sealed snapshot in an inventory."""

    rank: int
    generation: Generation
    manifest_digest: int
    """xxh3-64 of the encoded manifest: two entries with equal digests hold equal bytes."""
    payload_bytes: int
    window: bool = False
    """Whether it is a sparse window, whose units are of different steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityEntry:
    """One finished parity block in an inventory, with the manifests that it was made from."""

    lane: int
    """Parity lane: see `Membership.parity_lane`."""
    generation: Generation
    group: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]
    """(rank, manifest_digest) of every snapshot that went into the block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Report of what one daemon holds for one job; it is the truth (invariant 6)."""

    snapshots: tuple[SnapshotEntry, ...] = ()
    parities: tuple[ParityEntry, ...] = ()
    writing: tuple[tuple[int, Generation], ...] = ()
    """(rank, generation) of granted slots that are not sealed yet."""
    passed: tuple[tuple[int, Generation], ...] = ()
    """(rank, newest generation that the rank has asked to save): the rank will never complete a
    generation up to this one that is neither held nor being written."""
