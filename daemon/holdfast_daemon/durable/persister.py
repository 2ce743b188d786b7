"""Writes ranks to the durable tier and makes sets complete: the adapter around the storage library.

It decides nothing: the effect decides what is written. Its calls block for as long as storage
takes, so they run on separate threads: storage that hangs blocks neither parity nor checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Protocol

from holdfast_core.durable.sparse_files import RankPlan
from holdfast_core.errors import HoldfastError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_core.snapshots.stored import RankFile
from holdfast_daemon.engine.effects import CommitSet, PersistRank, RankPersisted, SetCommitted
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.limits.allowance import Allowance
from holdfast_daemon.memory.job_bytes import JobBytes

PART_BYTES = 4 << 20
"""Bytes that are read, and charged to the limit of bandwidth, at a time."""


class Store(Protocol):
    """The storage operations that persisting needs; `holdfast_storage.sets.SetStore` has them."""

    def write_rank(
        self,
        generation: Generation,
        rank: int,
        *,
        layout: bytes,
        manifest: bytes,
        read: Callable[[int, int], Iterable[memoryview]],
        stop: threading.Event | None = None,
        plan: RankPlan | None = None,
    ) -> RankFile:
        """Write a rank's file, verified on the way. `read(first_byte, end)` yields that range of
        the payload.

        Raises:
            StorageError, CorruptError.
        """

    def plan_rank(
        self, layout: bytes, manifest: Manifest, experts: int, base: Generation | None
    ) -> RankPlan | None:
        """The plan of a rank's file when copies leave experts out. Raises StorageError."""

    def commit(self, generation: Generation, files: Sequence[RankFile]) -> None:
        """Make the set complete. Raises StorageError."""

    def clean(self, *, keep: int, keep_every: int) -> object:
        """Remove sets and files that need not be kept. Raises StorageError."""


class Persister:
    """Persists the snapshots of one job on one node. Its methods are for threads, except where
    noted."""

    def __init__(
        self,
        storage: JobBytes,
        *,
        open_store: Callable[[str], Store],
        executor: Executor,
        allowance: Allowance | None = None,
    ) -> None:
        """
        Args:
            open_store: opens the job's store below the tier's URI.
            executor: threads that are used for nothing else.
            allowance: limit of the job's bandwidth; by default, one that nobody has used.
        """
        self.executor = executor
        self._storage = storage
        self._open_store = open_store
        self._allowance = allowance or Allowance()
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}
        self._stop = threading.Event()
        self._progress: dict[int, tuple[int, int]] = {}
        self._written_bytes = 0

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes read so far, total bytes) of the ranks that are being written."""
        with self._lock:
            done = sum(done for done, _ in self._progress.values())
            return done, sum(total for _, total in self._progress.values())

    @property
    def written_bytes(self) -> int:
        """Bytes of all files written so far."""
        with self._lock:
            return self._written_bytes

    def stop(self) -> None:
        """Let running work give up at its next part. Called by the daemon's loop only."""
        self._stop.set()
        self._stop = threading.Event()

    def scope(self, membership: Membership | None) -> EpochScope:
        """The scope of work that is submitted now: it ends with the epoch or with `stop`, whichever
        comes first. For the daemon's loop."""
        return EpochScope(membership=membership, ended=self._stop)

    def write(self, effect: PersistRank, scope: EpochScope) -> RankPersisted:
        """Write one rank.

        Raises:
            HoldfastError: the rank was not written.
        """
        manifest, rank = effect.manifest, effect.rank
        arena = self._storage.arena(rank, manifest.layout_id)
        piece_map = PieceMap(slot=effect.slot, places=effect.places)
        limit = effect.tier.bytes_per_s

        # The payload, part by part: within the limit of bandwidth, and only while the epoch lasts.
        def read(first: int, end: int) -> Iterator[memoryview]:
            for at in range(first, end, PART_BYTES):
                nbytes = min(PART_BYTES, end - at)
                self._allowance.take(nbytes, limit, scope.ended.wait)
                scope.check()
                # A buffer of its own: a store that retries a part may keep it for a while.
                part = memoryview(bytearray(nbytes))
                arena.read_into(piece_map, at, part)
                yield part
                self._count(rank, at + nbytes, manifest.payload_bytes)

        # Plan the file where copies leave experts out, then write it, verified on the way.
        self._count(rank, 0, manifest.payload_bytes)
        try:
            scope.check()
            store = self._store(effect.tier.uri)
            plan = store.plan_rank(effect.layout, manifest, effect.tier.experts, effect.base)
            file = store.write_rank(
                manifest.generation,
                manifest.rank,
                layout=effect.layout,
                manifest=effect.encoded,
                read=read,
                stop=scope.ended,
                plan=plan,
            )
        finally:
            with self._lock:
                self._progress.pop(rank, None)
        with self._lock:
            self._written_bytes += file.bytes
        return RankPersisted(
            epoch=effect.epoch,
            number=effect.number,
            rank=rank,
            layout_id=manifest.layout_id,
            slot=effect.slot,
            generation=manifest.generation,
            file=file,
            older=plan.older if plan is not None else (),
        )

    def commit(self, effect: CommitSet, scope: EpochScope) -> SetCommitted:
        """Make a set complete, then clean up. A cleanup that fails is reported, but is no error.

        Raises:
            HoldfastError: the set is not complete.
        """
        scope.check()
        store, tier = self._store(effect.tier.uri), effect.tier
        store.commit(effect.generation, effect.files)
        left = ""
        try:
            store.clean(keep=tier.keep, keep_every=tier.keep_every)
        except (HoldfastError, OSError) as error:
            left = str(error)
        return SetCommitted(
            epoch=effect.epoch, number=effect.number, generation=effect.generation, left=left
        )

    def _store(self, uri: str) -> Store:
        with self._lock:
            if uri not in self._stores:
                self._stores[uri] = self._open_store(uri)
            return self._stores[uri]

    def _count(self, rank: int, done: int, total: int) -> None:
        with self._lock:
            self._progress[rank] = done, total
