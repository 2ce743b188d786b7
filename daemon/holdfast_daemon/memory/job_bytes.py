"""Interface to the bytes of a job that is needed to carry out its effects.

`JobStorage` keeps them in real files, the simulation on virtual disks; `worker`, `parity.group` and
`parity.changes` use only this interface. Every method raises StorageError when the file system
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from holdfast_core.protection.budget import SLOTS_AUTO
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import MirrorRun, decode_manifest, manifest_digest
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.memory.arenas import SealedSlot
from holdfast_daemon.memory.parity_blocks import ParityRecord

ReadInto = Callable[[int, memoryview], None]
"""Function that fills a view with the bytes of a payload from an offset on. Raises CorruptError,
StorageError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A sealed snapshot: its manifest, and `memory.arenas.Arena.read_into` of its payload."""

    manifest: Manifest
    read_into: ReadInto


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirror:
    """Pieces of other ranks that a trainer of this node copied from its own replicas: hints, which
    only their digests prove (`holdfast_core.protection.mirrors`)."""

    runs: tuple[MirrorRun, ...]
    piece_bytes: int
    read_into: ReadInto
    """Fills a view with the bytes of the mirror from an offset on, as they are now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OlderParity:
    """A sealed parity block that a newer one can be made from."""

    record: ParityRecord
    view: memoryview
    manifests: Mapping[int, Manifest]
    """Manifests, by rank, of the snapshots that it was made from."""


class ArenaBytes(Protocol):
    """One rank's region of shared memory."""

    @property
    def slots(self) -> int:
        """Number of its slots."""

    def read_into(self, piece_map: PieceMap, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a payload from `start` on. Raises CorruptError too."""

    def write(self, piece_map: PieceMap, start: int, data: memoryview) -> None:
        """Put `data` where the bytes of a payload from `start` on lie."""


class JobBytes(Protocol):
    """The bytes of one job on one node; see `memory.job_storage.JobStorage` for what each method
    does."""

    def save_epoch(
        self, membership: Membership, line: Line | None, retained: Generation | None = None
    ) -> None: ...

    def allocate(
        self,
        rank: int,
        layout: bytes,
        *,
        slots: tuple[int, ...] = SLOTS_AUTO,
        ranks: int = 1,
        parity_lanes: tuple[int, ...] = (),
        parity_bytes: int = 0,
    ) -> ArenaBytes: ...

    def arena(self, rank: int, layout: str) -> ArenaBytes: ...

    def seal(self, rank: int, layout: str, slot: int, sealed: SealedSlot) -> None: ...

    def free_slot(self, rank: int, layout: str, slot: int) -> None: ...

    def remove_arena(self, rank: int, layout: str) -> None: ...

    def held(self, rank: int, generation: Generation) -> Held: ...

    def mirrors(self) -> tuple[Mirror, ...]: ...

    def check_manifest_file(self, rank: int, layout: str, slot: int) -> None: ...

    def block_to_build(self, lane: int, slot: int) -> AbstractContextManager[memoryview]: ...

    def block_view(self, lane: int, slot: int) -> memoryview: ...

    def parity_record(self, lane: int, slot: int) -> ParityRecord: ...

    def older_parity(self, lane: int, slot: int) -> OlderParity | None: ...

    def seal_parity(self, slot: int, record: ParityRecord) -> None: ...

    def free_parity(self, lane: int, slot: int) -> None: ...

    def check_entry_file(self, lane: int, slot: int) -> None: ...

    def describe(self, rank: int, generation: Generation) -> tuple[bytes, bytes] | None: ...

    def keep(self, rank: int, manifest: bytes, layout: bytes) -> None: ...

    def forget(self, keep: Set[Generation]) -> None: ...


def find_older(
    records: Mapping[tuple[int, int], ParityRecord],
    kept: Callable[[int, Generation], tuple[bytes, bytes] | None],
    lane: int,
    slot: int,
) -> tuple[int, dict[int, Manifest]] | None:
    """The other slot of the lane, if a block is sealed in it and the manifests that it was made
    from are kept here, with these manifests by rank.

    Args:
        records: Sealed blocks, by (lane, slot).
        kept: Function that gives the encoded (manifest, layout) kept of a rank's generation.
    """
    for (of_lane, other), record in records.items():
        if of_lane != lane or other == slot:
            continue
        wanted = dict(record.entry.sources)
        descriptions = {rank: kept(rank, record.entry.generation) for rank in wanted}
        encoded = {rank: pair[0] for rank, pair in descriptions.items() if pair is not None}
        if {rank: manifest_digest(m) for rank, m in encoded.items()} == wanted:
            return other, {rank: decode_manifest(m) for rank, m in encoded.items()}
    return None
