"""Carries out what the engine asks of storage when memory has no line: find, open, load.

Blocking, on the daemon's worker threads. It decides nothing. What it reads goes straight into the
slot that it was told, and is verified piece by piece on the way; a snapshot is sealed only when
every piece was right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.layouts import piece_count
from holdfast_core.places import Lying
from holdfast_core.stored_line import Found
from holdfast_core.values import Generation
from holdfast_daemon.arenas import Sealed
from holdfast_daemon.effects import (
    FindStored,
    LoadStored,
    ManifestFetched,
    OpenStored,
    Rebuilt,
    StoredFound,
)
from holdfast_daemon.group import EpochScope
from holdfast_daemon.holding import Holding

STRIDE_BYTES = 16 * 1024 * 1024


class StoredRank(Protocol):
    """One rank's snapshot in storage."""

    @property
    def layout(self) -> bytes:
        """Encoded."""

    @property
    def manifest(self) -> bytes:
        """Encoded."""

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Pieces [first_piece, end) of the payload. Raises CorruptError, StorageError."""


class StoredSets(Protocol):
    """What storage holds of a job. Every method raises StorageError when it cannot be read."""

    def find(self) -> Found: ...

    def open_rank(self, generation: Generation, rank: int) -> StoredRank:
        """Raises CorruptError when what is there is not what a whole set has."""


OpenSets = Callable[[str, str], StoredSets]
"""(uri, job) → its sets."""


class Loader:
    """Loads snapshots of one job into its arenas. Thread-safe."""

    def __init__(
        self,
        storage: Holding,
        job: str,
        open_sets: OpenSets,
        *,
        stride_bytes: int = STRIDE_BYTES,
    ) -> None:
        """`stride_bytes`: how much is read between two looks at whether the epoch still lasts."""
        self._storage, self._job, self._open_sets = storage, job, open_sets
        self._stride_bytes = stride_bytes
        self._lock = threading.Lock()
        self._read_bytes: dict[int, int] = {}

    def read_bytes(self, rank: int) -> int:
        """How much of the rank's snapshot the load that runs, or ran last, has read."""
        with self._lock:
            return self._read_bytes.get(rank, 0)

    def find(self, effect: FindStored) -> StoredFound:
        """Raises HoldfastError when storage cannot be read."""
        found = self._open_sets(effect.tier.uri, self._job).find()
        return StoredFound(epoch=effect.epoch, found=found)

    def open(self, effect: OpenStored, scope: EpochScope) -> ManifestFetched:
        """Raises HoldfastError."""
        scope.check()
        self._set_read(effect.rank, 0)
        sets = self._open_sets(effect.tier.uri, self._job)
        stored = sets.open_rank(effect.generation, effect.rank)
        return ManifestFetched(
            rank=effect.rank,
            generation=effect.generation,
            manifest=stored.manifest,
            layout=stored.layout,
        )

    def load(self, effect: LoadStored, scope: EpochScope) -> Rebuilt:
        """Raises HoldfastError; the slot is free then."""
        manifest = effect.manifest
        generation = manifest.generation
        self._storage.free_slot(effect.rank, manifest.layout_id, effect.slot)
        arena = self._storage.arena(effect.rank, manifest.layout_id)
        lying = Lying(slot=effect.slot, places=effect.places)
        sets = self._open_sets(effect.tier.uri, self._job)
        stored = sets.open_rank(generation, effect.rank)
        if stored.manifest != effect.encoded:
            raise CorruptError(
                f"the copy of rank {effect.rank}, generation {generation}, changed while it was "
                f"being loaded"
            )
        size = manifest.piece_bytes
        stride_bytes = max(self._stride_bytes // size, 1) * size
        for offset, part in arena.views(lying, 0, manifest.payload_bytes):
            for at in range(0, len(part), stride_bytes):
                stride = part[at : at + stride_bytes]
                scope.check()
                first = (offset + at) // size
                stored.read_into(first, first + piece_count(len(stride), size), stride)
                self._set_read(effect.rank, offset + at + len(stride))
        scope.check()
        sealed = Sealed(manifest=manifest, encoded=effect.encoded, places=effect.places)
        self._storage.seal(effect.rank, manifest.layout_id, effect.slot, sealed)
        return Rebuilt(rank=effect.rank, slot=effect.slot, generation=generation)

    def _set_read(self, rank: int, nbytes: int) -> None:
        with self._lock:
            self._read_bytes[rank] = nbytes


def load_failure(
    effect: FindStored | OpenStored | LoadStored, error: HoldfastError
) -> StoredFound | ManifestFetched | Rebuilt:
    """The completion event of `effect` that says that it failed, and why."""
    corrupt, why = isinstance(error, CorruptError), str(error)
    match effect:
        case FindStored():
            return StoredFound(epoch=effect.epoch, found=None, error=why)
        case OpenStored():
            return ManifestFetched(
                rank=effect.rank,
                generation=effect.generation,
                manifest=b"",
                layout=b"",
                error=why,
                corrupt=corrupt,
            )
        case LoadStored():
            return Rebuilt(
                rank=effect.rank,
                slot=effect.slot,
                generation=effect.manifest.generation,
                error=why,
                corrupt=corrupt,
            )
