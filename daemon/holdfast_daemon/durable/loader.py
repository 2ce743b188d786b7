"""Carries out the engine's requests to storage when memory has no line: find, open, load.

Its calls block, and run on the daemon's worker threads. It decides nothing. The bytes go straight
into the slot that the effect names, and are verified piece by piece on the way; a snapshot is
sealed only when every piece was right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from holdfast_core.durable.choice import Found
from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import first_bad_piece, piece_count
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.engine.effects import (
    FindStored,
    LoadStored,
    ManifestFetched,
    OpenStored,
    Rebuilt,
    StoredFound,
)
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.memory.arenas import SealedSlot
from holdfast_daemon.memory.job_bytes import JobBytes, ReadInto

STRIDE_BYTES = 16 * 1024 * 1024


class RankReader(Protocol):
    """One rank's snapshot in storage."""

    @property
    def layout(self) -> bytes:
        """The encoded layout."""

    @property
    def manifest(self) -> bytes:
        """The encoded manifest."""

    @property
    def mixture(self) -> str:
        """Text that names where the experts come from; empty when one file has the whole
        snapshot."""

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Read pieces [first_piece, end) of the payload. Raises CorruptError, StorageError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPieces:
    """A sealed snapshot in memory as a source of pieces."""

    content: Manifest
    read: ReadInto
    """`memory.arenas.Arena.read_into`, bound to the snapshot's pieces."""

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Read and verify pieces [first_piece, end). Raises StorageError, never CorruptError, which
        would mean that the copy in storage is damaged."""
        size = self.content.piece_bytes
        start = first_piece * size
        try:
            self.read(start, buffer)
        except CorruptError as error:
            raise StorageError(
                f"generation {self.content.generation} in memory will be verified again: {error}"
            ) from error
        bad = first_bad_piece(buffer, self.content.digests, size, first_piece=first_piece)
        if bad is not None:
            raise StorageError(
                f"piece {bad} of generation {self.content.generation} in memory does not match its "
                f"digest; it will be verified again"
            )


class SetReader(Protocol):
    """The sets of one job in storage. Every method raises StorageError when it cannot read them."""

    def find(self) -> Found: ...

    def open_rank(
        self, generation: Generation, rank: int, memory: Sequence[SlotPieces] = ()
    ) -> RankReader:
        """Open a rank's snapshot; CorruptError when the set is not whole."""


OpenSets = Callable[[str, str], SetReader]
"""(uri, job) → the job's sets."""


class Loader:
    """Loads snapshots of one job into its arenas. Thread-safe."""

    def __init__(
        self,
        storage: JobBytes,
        job: str,
        open_sets: OpenSets,
        *,
        stride_bytes: int = STRIDE_BYTES,
    ) -> None:
        """`stride_bytes`: number of bytes between two checks that the epoch has not ended."""
        self._storage, self._job, self._open_sets = storage, job, open_sets
        self._stride_bytes = stride_bytes
        self._lock = threading.Lock()
        self._read_bytes: dict[int, int] = {}
        self._opened: dict[str, SetReader] = {}
        """URI → its sets. They are kept, because opening object storage costs more than a read."""

    def read_bytes(self, rank: int) -> int:
        """Bytes of the rank's snapshot that its current load, or else its last load, has read."""
        with self._lock:
            return self._read_bytes.get(rank, 0)

    def find(self, effect: FindStored) -> StoredFound:
        """Find the job's sets; HoldfastError when storage cannot be read."""
        sets = self._sets(effect.tier.uri).find()
        return StoredFound(epoch=effect.epoch, found=sets)

    def open(self, effect: OpenStored, scope: EpochScope) -> ManifestFetched:
        """Fetch a rank's manifest and layout. Raises HoldfastError."""
        scope.check()
        self._set_read(effect.rank, 0)
        sets = self._sets(effect.tier.uri)
        stored = sets.open_rank(effect.generation, effect.world_rank, self._memory(effect))
        return ManifestFetched(
            rank=effect.rank,
            generation=effect.generation,
            manifest=stored.manifest,
            layout=stored.layout,
        )

    def load(self, effect: LoadStored, scope: EpochScope) -> Rebuilt:
        """Load a snapshot into its slot and seal it. Raises HoldfastError, and leaves the slot
        free."""
        manifest = effect.manifest
        generation = manifest.generation
        # Free the slot: the bytes that it gets belong to no snapshot until it is sealed.
        self._storage.free_slot(effect.rank, manifest.layout_id, effect.slot)
        arena = self._storage.arena(effect.rank, manifest.layout_id)
        piece_map = PieceMap(slot=effect.slot, places=effect.places)
        # Open the same copy whose manifest the engine chose.
        sets = self._sets(effect.tier.uri)
        stored = sets.open_rank(generation, manifest.rank, self._memory(effect))
        if stored.manifest != effect.encoded:
            raise CorruptError(
                f"the copy of rank {effect.rank}, generation {generation}, changed while it was "
                f"being loaded"
            )
        # Read in strides of whole pieces, which `read_into` verifies, and give up with the epoch.
        size = manifest.piece_bytes
        stride_bytes = max(self._stride_bytes // size, 1) * size
        buffer = memoryview(bytearray(min(stride_bytes, manifest.payload_bytes)))
        for at in range(0, manifest.payload_bytes, stride_bytes):
            stride = buffer[: manifest.payload_bytes - at]
            scope.check()
            first = at // size
            stored.read_into(first, first + piece_count(len(stride), size), stride)
            arena.write(piece_map, at, stride)
            self._set_read(effect.rank, at + len(stride))
        scope.check()
        sealed = SealedSlot(manifest=manifest, encoded=effect.encoded, places=effect.places)
        self._storage.seal(effect.rank, manifest.layout_id, effect.slot, sealed)
        return Rebuilt(
            rank=effect.rank, slot=effect.slot, generation=generation, mixture=stored.mixture
        )

    def _memory(self, effect: OpenStored | LoadStored) -> list[SlotPieces]:
        sources = []
        for slot in effect.held:
            arena = self._storage.arena(effect.rank, slot.manifest.layout_id)
            read = partial(arena.read_into, PieceMap(slot=slot.slot, places=slot.places))
            sources.append(SlotPieces(content=slot.manifest, read=read))
        return sources

    def _sets(self, uri: str) -> SetReader:
        with self._lock:
            if uri not in self._opened:
                self._opened[uri] = self._open_sets(uri, self._job)
            return self._opened[uri]

    def _set_read(self, rank: int, nbytes: int) -> None:
        with self._lock:
            self._read_bytes[rank] = nbytes
