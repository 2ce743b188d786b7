"""Everything that one job keeps on this node.

`JobStorage` joins arenas, parity blocks, kept manifests and the newest membership, and accounts for
their memory. It carries out what the engine decided and decides nothing; for the bulk server it
locates bytes. Thread-safe: short steps share one lock, allocations another, so that allocating
gigabytes never delays a seal or a transfer.

`adopt` must be called once, before anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    MemoryBudgetError,
    StorageError,
)
from holdfast_core.protection.budget import PARITY_SLOTS, SLOTS_AUTO, slots_within
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, decode_layout, layout_id
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.memory.arenas import AdoptedArena, Arena, ArenaFiles, SealedSlot
from holdfast_daemon.memory.files import replace, storage_errors
from holdfast_daemon.memory.grants import LEFT_MAX
from holdfast_daemon.memory.job_bytes import Held, Mirror, OlderParity, find_older
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.memory.parity_blocks import ParityBlocks, ParityRecord, encode_record
from holdfast_daemon.memory.peer_manifests import PeerManifests
from holdfast_daemon.memory.reserve import FULL
from holdfast_daemon.memory.saved_epoch import EPOCH_FILE, SavedEpoch, decode_epoch, encode_epoch
from holdfast_daemon.transport.protocol import Located


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedParity:
    """A sealed parity block that a starting daemon found."""

    lane: int
    slot: int
    record: ParityRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedJob:
    """Everything that a starting daemon found of a job; not verified yet."""

    membership: Membership | None
    """The newest membership; None when there is none, or none that can be read."""
    line: Line | None
    retained: Generation | None
    arenas: tuple[AdoptedArena, ...]
    parities: tuple[AdoptedParity, ...]
    problems: tuple[str, ...]
    """Damage found and removed, in words."""


class JobStorage:
    """The files of one job, below `<root>/jobs/<job>`."""

    def __init__(self, node: NodeStorage, job: str) -> None:
        self.job = job
        self.directory = node.job_directory(job)
        self._node = node
        self._files = node.files
        self._arenas: dict[tuple[int, str], Arena] = {}
        self._needs: dict[tuple[int, str], dict[int, int]] = {}
        """Bytes that a parity block has to have for each arena, by lane; unknown of an arena that
        was adopted, until it is asked for."""
        self._arena_files = ArenaFiles(self.directory / "arenas", job, self._files, node.grants)
        self._blocks = ParityBlocks(self.directory / "parity", self._files)
        self._kept = PeerManifests(self.directory / "peers", self._files)
        self._lock = threading.RLock()
        self._allocating = threading.Lock()
        self._dropped = False
        self._quota_bytes = 0
        """Limit of the job's memory from its newest membership; 0: only the node's budget limits
        it."""

    @property
    def arena_bytes(self) -> int:
        """Memory that the arenas take."""
        with self._lock:
            return sum(arena.nbytes for arena in self._arenas.values())

    @property
    def parity_bytes(self) -> int:
        """Memory that the parity blocks take now."""
        with self._lock:
            return self._blocks.held_bytes

    @property
    def reserved_bytes(self) -> int:
        """Memory that is kept for the job: its arenas, and both blocks of every parity lane."""
        with self._lock:
            return self.arena_bytes + self._blocks.nbytes

    # --- the start of a daemon -------------------------------------------------------------------

    def adopt(self) -> AdoptedJob:
        """Take over the whole files of an earlier daemon, and remove all others."""
        with self._lock, storage_errors(f"adopting job {self.job}"):
            arenas, problems = self._arena_files.adopt()
            self._arenas = {(arena.rank, arena.layout_id): arena for arena in arenas}
            problems += self._blocks.adopt()
            self._kept.adopt()
            self._node.budget.adopt(self.reserved_bytes)
            saved = self._load_epoch(problems)
            self._quota_bytes = saved.membership.memory_bytes if saved else 0
            return AdoptedJob(
                membership=saved.membership if saved else None,
                line=saved.line if saved else None,
                retained=saved.retained if saved else None,
                arenas=tuple(
                    AdoptedArena(
                        rank=arena.rank,
                        layout=arena.layout,
                        layout_id=arena.layout_id,
                        slots=arena.slots,
                        sealed=dict(arena.sealed),
                    )
                    for arena in arenas
                ),
                parities=tuple(
                    AdoptedParity(lane=lane, slot=slot, record=record)
                    for (lane, slot), record in sorted(self._blocks.records.items())
                ),
                problems=tuple(problems),
            )

    def save_epoch(
        self, membership: Membership, line: Line | None, retained: Generation | None = None
    ) -> None:
        saved = SavedEpoch(membership=membership, line=line, retained=retained)
        self._quota_bytes = membership.memory_bytes
        with self._lock, storage_errors(f"saving epoch {membership.epoch} of job {self.job}"):
            self._files.mkdir(self.directory)
            replace(self._node.essential, self.directory / EPOCH_FILE, encode_epoch(saved))

    # --- arenas ----------------------------------------------------------------------------------

    def allocate(
        self,
        rank: int,
        layout: bytes,
        *,
        slots: tuple[int, ...] = SLOTS_AUTO,
        ranks: int = 1,
        parity_lanes: tuple[int, ...] = (),
        parity_bytes: int = 0,
    ) -> Arena:
        """Return the arena of `rank` for `layout`, made when there is none. Each of
        `parity_lanes` then has its two parity blocks, with at least `parity_bytes` each.

        Args:
            slots: Numbers of slots that a new arena may have, best first.
            ranks: Number of ranks of this node, which are all to fit.

        Raises:
            MemoryBudgetError: it exceeds the job's quota or the node's budget, or the file system
                is full; nothing is kept then.
            CorruptError, LayoutMismatchError: `layout` is not a layout of `rank`.
            StorageError: the job was dropped, or the file system failed.
        """
        with self._allocating:
            self._check_kept()
            decoded = decode_layout(layout)
            with self._lock:
                existing = self._arenas.get((rank, layout_id(layout)))
                needed = self._blocks.missing_bytes(parity_lanes, parity_bytes)
            chosen = self._choose_slots(
                rank, slots, ranks, decoded, PARITY_SLOTS * len(parity_lanes) * parity_bytes
            )
            needed += 0 if existing else decoded.arena_bytes(chosen)
            self._check_left(rank)
            self._check_quota(needed, rank)
            self._node.budget.reserve(needed, f"rank {rank} of job {self.job}")
            try:
                return self._allocate(existing, rank, layout, chosen, parity_lanes, parity_bytes)
            except BaseException:
                self._node.budget.release(needed)
                raise

    def arena(self, rank: int, layout: str) -> Arena:
        """The arena of `rank` with layout id `layout`; StorageError when there is none."""
        with self._lock:
            arena = self._arenas.get((rank, layout))
        if arena is None:
            raise StorageError(f"job {self.job} has no arena of rank {rank} with layout {layout}")
        return arena

    def seal(self, rank: int, layout: str, slot: int, sealed: SealedSlot) -> None:
        """Seal the slot: from here on the snapshot exists."""
        with self._lock, storage_errors(f"sealing slot {slot} of rank {rank} of job {self.job}"):
            self._arena_files.seal(self.arena(rank, layout), slot, sealed)

    def free_slot(self, rank: int, layout: str, slot: int) -> None:
        """Free the slot: from here on the snapshot no longer exists. Harmless when there is
        none."""
        with self._lock, storage_errors(f"freeing slot {slot} of rank {rank} of job {self.job}"):
            arena = self._arenas.get((rank, layout))
            if arena is not None:
                self._arena_files.free(arena, slot)

    def remove_arena(self, rank: int, layout: str) -> None:
        """Delete the arena and all that is in it. Harmless when there is none."""
        with self._lock, storage_errors(f"removing an arena of rank {rank} of job {self.job}"):
            arena = self._arenas.get((rank, layout))
            if arena is not None:
                self._arena_files.remove(arena)
                del self._arenas[rank, layout]
                self._needs.pop((rank, layout), None)
                self._node.budget.release(arena.nbytes)

    # --- parity ----------------------------------------------------------------------------------

    @contextmanager
    def block_to_build(self, lane: int, slot: int) -> Iterator[memoryview]:
        """All bytes of a free parity block, which has memory until the context ends, and from then
        on while it is sealed.

        Raises:
            StorageError: the lane has no such block, or the file system has no memory for it.
        """
        with self._lock:
            self._blocks.begin(lane, slot)
        try:
            self.free_parity(lane, slot)
            with storage_errors(f"taking memory for parity {slot} of lane {lane} of {self.job}"):
                self._trim(lane, slot)
                with self._allocating:  # no other thread gives the file another size meanwhile
                    self._blocks.fill(lane, slot)
            yield self.block_view(lane, slot)
        finally:
            with self._lock:
                self._blocks.end(lane, slot)

    def give_back(self) -> None:
        """Give back the memory of parity blocks that have held nothing since the last call. Their
        room stays reserved: building one takes its memory again. Raises StorageError."""
        with storage_errors(f"giving back parity blocks of job {self.job}"):
            with self._lock:
                given = self._blocks.empty_idle()
            del given  # outside of the lock: freeing gigabytes takes a while

    def _trim(self, lane: int, slot: int) -> None:
        """Give back the room that no arena needs any more of a block about to be built."""
        if not self._allocating.acquire(blocking=False):
            return  # it is about to change what is needed; the next build looks again
        try:
            with self._lock:
                if self._arenas.keys() == self._needs.keys():
                    needed = max((need.get(lane, 0) for need in self._needs.values()), default=0)
                    if needed:
                        self._node.budget.release(self._blocks.trim(lane, slot, needed))
        finally:
            self._allocating.release()

    def block_view(self, lane: int, slot: int) -> memoryview:
        """All bytes of a parity block; StorageError when there is none."""
        with self._lock:
            return self._blocks.view(lane, slot)

    def parity_record(self, lane: int, slot: int) -> ParityRecord:
        """The record of a sealed parity block; StorageError when the block is not sealed."""
        with self._lock:
            record = self._blocks.records.get((lane, slot))
        if record is None:
            raise StorageError(f"parity block {slot} of lane {lane} of job {self.job} is free")
        return record

    def sealed_parity_bytes(self, lane: int, slot: int) -> int:
        """Bytes in use of a sealed parity block; 0 when it is not sealed."""
        with self._lock:
            record = self._blocks.records.get((lane, slot))
        return 0 if record is None else record.nbytes

    def seal_parity(self, slot: int, record: ParityRecord) -> None:
        """Seal the parity block: from here on it exists."""
        lane = record.entry.lane
        with self._lock, storage_errors(f"sealing parity {slot} of lane {lane} of {self.job}"):
            self._check_kept()
            self._blocks.seal(slot, record)

    def free_parity(self, lane: int, slot: int) -> None:
        """Free the parity block: from here on it does not exist; its room stays reserved."""
        with self._lock, storage_errors(f"freeing parity {slot} of lane {lane} of {self.job}"):
            self._blocks.free(lane, slot)

    # --- what others ask for ---------------------------------------------------------------------

    def locate_snapshot(
        self, rank: int, generation: Generation, start: int, nbytes: int
    ) -> Located:
        """Location of the bytes [start, start + nbytes) of a sealed snapshot's payload, as far as
        they exist. Raises StorageError when the snapshot is not held."""
        arena, slot, sealed = self._sealed(rank, generation)
        nbytes = min(nbytes, max(sealed.manifest.payload_bytes - start, 0))
        piece_map = PieceMap(slot=slot, places=sealed.places)
        parts = tuple((part.at, part.nbytes) for part in arena.parts(piece_map, start, nbytes))
        return Located(path=arena.path, parts=parts)

    def held(self, rank: int, generation: Generation) -> Held:
        """A sealed snapshot and its bytes; StorageError when it is not held."""
        arena, slot, sealed = self._sealed(rank, generation)
        read_into = partial(arena.read_into, PieceMap(slot, sealed.places))
        return Held(manifest=sealed.manifest, read_into=read_into)

    def mirrors(self) -> tuple[Mirror, ...]:
        """The mirrors of all arenas here."""
        with self._lock:
            arenas = [arena for arena in self._arenas.values() if arena.layout.mirror]
        return tuple(
            Mirror(
                runs=arena.layout.mirror,
                piece_bytes=arena.layout.piece_bytes,
                read_into=arena.read_mirror_into,
            )
            for arena in arenas
        )

    def older_parity(self, lane: int, slot: int) -> OlderParity | None:
        """The other block of the lane, if it is sealed and the manifests that it was made from are
        kept here."""
        with self._lock:
            older = find_older(self._blocks.records, self._kept.get, lane, slot)
            if older is None:
                return None
            other, manifests = older
            record = self._blocks.records[lane, other]
            view = self._blocks.view(lane, other)[: record.nbytes]
            return OlderParity(record=record, view=view, manifests=manifests)

    def locate_parity(self, lane: int, generation: Generation, start: int, nbytes: int) -> Located:
        """Location of the bytes [start, start + nbytes) of a sealed parity block, as far as they
        exist. Raises StorageError when the block is not held."""
        with self._lock:
            for (at_lane, slot), record in self._blocks.records.items():
                if at_lane == lane and record.entry.generation == generation:
                    nbytes = min(nbytes, max(record.nbytes - start, 0))
                    return Located(path=self._blocks.path(lane, slot), parts=((start, nbytes),))
        raise StorageError(f"job {self.job} has no parity of lane {lane} for {generation} here")

    def describe(self, rank: int, generation: Generation) -> tuple[bytes, bytes] | None:
        """(manifest, layout), encoded, of a snapshot that is held or kept here; None otherwise."""
        try:
            arena, _, sealed = self._sealed(rank, generation)
        except StorageError:
            with self._lock:
                return self._kept.get(rank, generation)
        return sealed.encoded, arena.encoded_layout

    def keep(self, rank: int, manifest: bytes, layout: bytes) -> None:
        """Keep another member's manifest and layout, so that the member can get them back."""
        with self._lock, storage_errors(f"storing a peer's manifest for job {self.job}"):
            self._check_kept()
            self._kept.keep(rank, manifest, layout)

    def forget(self, keep: Set[Generation]) -> None:
        """Delete kept manifests of generations that are not in `keep`."""
        with self._lock, storage_errors(f"removing peers' manifests of job {self.job}"):
            self._kept.forget(keep)

    def check_manifest_file(self, rank: int, layout: str, slot: int) -> None:
        """Check that the slot is sealed and its file unchanged.

        Raises:
            StorageError: nothing is sealed there.
            CorruptError: the file is not what was sealed.
        """
        with self._lock, storage_errors(f"reading the manifest of slot {slot} of rank {rank}"):
            arena = self.arena(rank, layout)
            sealed = arena.sealed.get(slot)
            if sealed is None:
                raise StorageError(f"slot {slot} of rank {rank} of job {self.job} is free")
            if arena.manifest_path(slot).read_bytes() != sealed.file_bytes:
                raise CorruptError(f"the manifest file of slot {slot} of rank {rank} was changed")

    def check_entry_file(self, lane: int, slot: int) -> None:
        """Check that the parity block is sealed and its entry file unchanged; raises as
        `check_manifest_file` does."""
        with self._lock, storage_errors(f"reading the entry of parity {slot} of lane {lane}"):
            record = self.parity_record(lane, slot)
            if self._blocks.entry_path(lane, slot).read_bytes() != encode_record(record):
                raise CorruptError(f"the entry file of parity {slot} of lane {lane} was changed")

    def drop(self) -> None:
        """Free everything that the job holds: sealed slots and blocks first, the epoch last. What
        other threads still do for the job takes no memory and seals nothing from then on. May be
        repeated.

        Raises:
            StorageError: the file system failed; the rest stays until the next call.
        """
        with self._allocating, self._lock, storage_errors(f"dropping job {self.job}"):
            self._dropped = True
            for rank, layout in sorted(self._arenas):
                self.remove_arena(rank, layout)
            for lane, slot in sorted(self._blocks.records):
                self._blocks.free(lane, slot)
            freed = self._blocks.nbytes
            self._files.remove_tree(self.directory / "parity")
            self._files.remove_tree(self.directory / "peers")
            self._node.budget.release(freed)
            self._blocks = ParityBlocks(self.directory / "parity", self._files)
            self._files.remove_tree(self.directory)

    def overgrown(self) -> dict[Path, int]:
        """Bytes cut off since the last call, by arena file. Raises StorageError."""
        with storage_errors(f"cutting back the arenas of job {self.job}"):
            self._node.grants.cut_back(self.job)
        return self._node.grants.take_overgrown(self.job)

    # --- inside ----------------------------------------------------------------------------------

    def _check_kept(self) -> None:
        if self._dropped:
            raise StorageError(f"job {self.job} was dropped from this node")

    def _check_left(self, rank: int) -> None:
        left = self._node.grants.left_of(self.job)
        if left >= LEFT_MAX:
            raise StorageError(
                f"rank {rank} of job {self.job} gets no arena: its processes still have {left} "
                f"removed ones open; end those that no longer train"
            )

    def _choose_slots(
        self, rank: int, choices: tuple[int, ...], ranks: int, layout: Layout, parity_bytes: int
    ) -> int:
        others = self._node.budget.reserved_bytes - self.reserved_bytes
        room_bytes = self._node.budget.total_bytes - others
        if self._quota_bytes:
            room_bytes = min(room_bytes, self._quota_bytes)
        return slots_within(
            choices,
            room_bytes - self._staying_bytes(rank, layout),
            slot_bytes=max(layout.largest_slot_bytes, layout.slot_bytes),
            parity_bytes=parity_bytes + layout.mirror_bytes,
            ranks=ranks,
        )

    def _staying_bytes(self, rank: int, layout: Layout) -> int:
        """Memory of arenas that an arena of `rank` for `layout` does not replace at once: those of
        other worlds, and those of the rank for other layouts."""
        with self._lock:
            return sum(
                arena.nbytes
                for arena in self._arenas.values()
                if arena.layout.since != layout.since
                or (arena.rank == rank and arena.layout != layout)
            )

    def _check_quota(self, needed: int, rank: int) -> None:
        """Refuse memory beyond the quota; memory already held stays, even beyond a quota that was
        lowered."""
        reserved = self.reserved_bytes
        if needed and 0 < self._quota_bytes < reserved + needed:
            left = max(self._quota_bytes - reserved, 0)
            raise MemoryBudgetError(
                f"rank {rank} of job {self.job} needs {needed} bytes for its arena and parity, but "
                f"of the job's {self._quota_bytes} bytes on each node only {left} are left: raise "
                f"spec.snapshot.memoryPerNode, give spec.snapshot.slots: 2, or shard the state "
                f"over more ranks",
                needed_bytes=needed,
                available_bytes=left,
            )

    def _allocate(
        self,
        known: Arena | None,
        rank: int,
        layout: bytes,
        slots: int,
        lanes: tuple[int, ...],
        parity_bytes: int,
    ) -> Arena:
        arena = known
        try:
            if arena is None:
                arena = self._arena_files.allocate(rank, layout, slots)
            self._blocks.grow(lanes, parity_bytes)
        except OSError as error:
            if arena is not None and known is None:
                with suppress(OSError):
                    self._arena_files.remove(arena)
            needed = decode_layout(layout).arena_bytes(slots)
            self._raise_full(error, rank, needed + PARITY_SLOTS * len(lanes) * parity_bytes)
        with self._lock:
            self._arenas[rank, arena.layout_id] = arena
            self._needs[rank, arena.layout_id] = dict.fromkeys(lanes, parity_bytes)
        return arena

    def _raise_full(self, error: OSError, rank: int, needed: int) -> NoReturn:
        what = f"allocating the arena of rank {rank} of job {self.job}"
        if error.errno not in FULL:
            raise StorageError(f"{what} failed: {error.strerror}") from error
        free = self._node.free_bytes()
        raise MemoryBudgetError(
            f"{what} needs {needed} bytes with its parity, but {self._node.root} has only {free} "
            f"left, although the budget allows more: mount a larger tmpfs or lower the budget",
            needed_bytes=needed,
            available_bytes=free,
        ) from error

    def _sealed(self, rank: int, generation: Generation) -> tuple[Arena, int, SealedSlot]:
        with self._lock:
            for arena in self._arenas.values():
                if arena.rank == rank:
                    for slot, sealed in arena.sealed.items():
                        if sealed.manifest.generation == generation:
                            return arena, slot, sealed
        raise StorageError(f"job {self.job} has no snapshot {generation} of rank {rank} here")

    def _load_epoch(self, problems: list[str]) -> SavedEpoch | None:
        path = self.directory / EPOCH_FILE
        self._files.unlink(path.with_name(f"{EPOCH_FILE}.tmp"))
        try:
            return decode_epoch(path.read_bytes())
        except FileNotFoundError:
            return None
        except (HoldfastError, OSError) as error:
            problems.append(f"{EPOCH_FILE} ignored: {error}")
            return None
