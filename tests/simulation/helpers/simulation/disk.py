"""A node's tmpfs with the contents that the real storage keeps there. It outlives the daemon, but
not the node.

The daemon's own code decides, calculates and verifies: it reads and writes these bytes through
`memory.job_bytes.JobBytes`, as it does those of real files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.protection.budget import PARITY_SLOTS, SLOTS_AUTO
from holdfast_core.snapshots import layouts
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory, Manifest, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.memory.arenas import Arena, SealedSlot
from holdfast_daemon.memory.job_bytes import Held, Mirror, OlderParity, find_older
from holdfast_daemon.memory.parity_blocks import ParityRecord
from holdfast_daemon.memory.saved_epoch import SavedEpoch, decode_epoch, encode_epoch

BLOCK_BYTES = 4096


@functools.lru_cache(maxsize=4096)
def manifest_in(encoded: bytes) -> Manifest | None:
    """The manifest in a file; None when it cannot be read."""
    try:
        return layouts.decode_manifest(encoded)
    except CorruptError:
        return None


class DiskArena(Arena):
    """An arena whose file is a string of bytes."""

    def __init__(self, rank: int, encoded: bytes, slots: int) -> None:
        super().__init__(Path("virtual"), rank, encoded, layouts.decode_layout(encoded), slots)
        self._bytes = memoryview(bytearray(self.nbytes))
        self.reading: dict[int, tuple[PieceMap, int]] = {}
        """By slot, a payload that a living daemon is writing to storage: its place and length."""

    def read(self, piece_map: PieceMap, nbytes: int) -> bytes:
        """The first `nbytes` of a payload."""
        data = bytearray(nbytes)
        self.read_into(piece_map, 0, memoryview(data))
        return bytes(data)

    def read_into(self, piece_map: PieceMap, start: int, view: memoryview) -> None:
        for part in self.parts(piece_map, start, len(view)):
            at = part.offset - start
            view[at : at + part.nbytes] = self._bytes[part.at : part.at + part.nbytes]

    def write(self, piece_map: PieceMap, start: int, data: memoryview) -> None:
        for part in self.parts(piece_map, start, len(data)):
            at = part.offset - start
            self._bytes[part.at : part.at + part.nbytes] = data[at : at + part.nbytes]

    def capture(self, piece_map: PieceMap, data: bytes, skip: frozenset[int]) -> None:
        """Write the pieces of a payload to their places, all but those of `skip`."""
        self.check_free(piece_map, len(data), skip)
        size = self.layout.piece_bytes
        for piece in range(layouts.piece_count(len(data), size)):
            if piece not in skip:
                part = data[piece * size : (piece + 1) * size]
                self.write(piece_map, piece * size, memoryview(part))

    def check_free(
        self, piece_map: PieceMap, nbytes: int, skip: frozenset[int] = frozenset()
    ) -> None:
        """Check that no sealed snapshot, and none that is being persisted, has pieces where those
        of this one go."""
        pieces = layouts.piece_count(nbytes, self.layout.piece_bytes)
        for slot, sealed in self.sealed.items():
            manifest = manifest_in(sealed.encoded)
            if manifest is not None:
                there = PieceMap(slot, sealed.places)
                self._check_apart(piece_map, there, pieces, manifest.payload_bytes, skip, "sealed")
        for there, held_bytes in self.reading.values():
            self._check_apart(piece_map, there, pieces, held_bytes, skip, "persisting")

    def _check_apart(
        self,
        piece_map: PieceMap,
        there: PieceMap,
        pieces: int,
        nbytes: int,
        skip: frozenset[int],
        what: str,
    ) -> None:
        held = layouts.piece_count(nbytes, self.layout.piece_bytes)
        for piece in set(range(min(pieces, held))) - skip:
            lies = there.places[piece] if there.places else there.slot
            goes = piece_map.places[piece] if piece_map.places else piece_map.slot
            assert lies != goes, f"a {what} piece of rank {self.rank} is overwritten"

    def readable(self) -> Iterator[tuple[int, SealedSlot]]:
        """Slots that are sealed with a readable manifest, and their seals."""
        for slot, sealed in self.sealed.items():
            if manifest_in(sealed.encoded) is not None:
                yield slot, sealed

    def payload(self, slot: int) -> bytes | None:
        """The bytes of a sealed snapshot; None when they do not match their manifest."""
        sealed = self.sealed[slot]
        manifest = sealed.manifest
        data = self.read(PieceMap(slot, sealed.places), manifest.payload_bytes)
        whole = layouts.piece_digests(data, manifest.piece_bytes) == manifest.digests
        return data if whole else None


@dataclass(slots=True)
class Disk:
    """The files of docs/data-path.md for one job."""

    memory_id: str
    incarnation: int = 0
    full: bool = False
    """Whether no more files can be created."""
    epoch: bytes = b""
    """Content of epoch.json; empty where there is none."""
    arenas: dict[tuple[int, str], DiskArena] = field(default_factory=dict)
    blocks: dict[tuple[int, int], memoryview] = field(default_factory=dict)
    """Parity blocks by (lane, slot); empty ones have given their memory back."""
    records: dict[tuple[int, int], ParityRecord] = field(default_factory=dict)
    """Records that seal parity blocks, by (lane, slot)."""
    peers: dict[tuple[int, Generation], tuple[bytes, bytes]] = field(default_factory=dict)

    # --- for a daemon's code: memory.job_bytes.JobBytes -------------------------------------------

    def save_epoch(
        self, membership: Membership, line: Line | None, retained: Generation | None = None
    ) -> None:
        saved = SavedEpoch(membership=membership, line=line, retained=retained)
        self.epoch = encode_epoch(saved)

    def allocate(
        self,
        rank: int,
        layout: bytes,
        *,
        slots: tuple[int, ...] = SLOTS_AUTO,
        ranks: int = 1,
        parity_lanes: tuple[int, ...] = (),
        parity_bytes: int = 0,
    ) -> DiskArena:
        assert parity_bytes <= BLOCK_BYTES, "larger parity blocks than the simulation has"
        key = (rank, layouts.layout_id(layout))
        if key not in self.arenas:
            self.arenas[key] = DiskArena(rank, layout, slots[0])
        for lane, slot in product(parity_lanes, range(PARITY_SLOTS)):
            self.blocks.setdefault((lane, slot), memoryview(b""))
        return self.arenas[key]

    def arena(self, rank: int, layout: str) -> DiskArena:
        arena = self.arenas.get((rank, layout))
        if arena is None:
            raise StorageError(f"no arena of rank {rank} with layout {layout}")
        return arena

    def seal(self, rank: int, layout: str, slot: int, sealed: SealedSlot) -> None:
        self._check_room()
        self.arena(rank, layout).sealed[slot] = sealed

    def free_slot(self, rank: int, layout: str, slot: int) -> None:
        if (rank, layout) in self.arenas:
            self.arenas[rank, layout].sealed.pop(slot, None)

    def remove_arena(self, rank: int, layout: str) -> None:
        self.arenas.pop((rank, layout), None)

    def held(self, rank: int, generation: Generation) -> Held:
        arena, slot, sealed = self._sealed(rank, generation)
        read_into = functools.partial(arena.read_into, PieceMap(slot, sealed.places))
        return Held(manifest=sealed.manifest, read_into=read_into)

    def mirrors(self) -> tuple[Mirror, ...]:
        return ()  # simulated trainers capture nothing twice

    def check_manifest_file(self, rank: int, layout: str, slot: int) -> None:
        sealed = self.arena(rank, layout).sealed.get(slot)
        if sealed is None:
            raise StorageError(f"slot {slot} of rank {rank} is free")
        if manifest_in(sealed.encoded) is None:
            raise CorruptError(f"the manifest file of slot {slot} of rank {rank} was changed")

    @contextmanager
    def block_to_build(self, lane: int, slot: int) -> Iterator[memoryview]:
        self.free_parity(lane, slot)
        self.block_view(lane, slot)  # the lane has it
        self.blocks[lane, slot] = memoryview(bytearray(BLOCK_BYTES))
        yield self.blocks[lane, slot]

    def block_view(self, lane: int, slot: int) -> memoryview:
        if (lane, slot) not in self.blocks:
            raise StorageError(f"lane {lane} has no parity block {slot}")
        return self.blocks[lane, slot]

    def parity_record(self, lane: int, slot: int) -> ParityRecord:
        if (lane, slot) not in self.records:
            raise StorageError(f"parity block {slot} of lane {lane} is free")
        return self.records[lane, slot]

    def older_parity(self, lane: int, slot: int) -> OlderParity | None:
        found = find_older(self.records, lambda *key: self.peers.get(key), lane, slot)
        if found is None:
            return None
        other, manifests = found
        record = self.records[lane, other]
        view = self.blocks[lane, other][: record.nbytes]
        return OlderParity(record=record, view=view, manifests=manifests)

    def parity(self, lane: int, generation: Generation) -> memoryview:
        """The bytes in use of a sealed parity block."""
        for key, record in self.records.items():
            if key[0] == lane and record.entry.generation == generation:
                return self.blocks[key][: record.nbytes]
        raise StorageError(f"no parity of lane {lane} for {generation} here")

    def seal_parity(self, slot: int, record: ParityRecord) -> None:
        self._check_room()
        self.records[record.entry.lane, slot] = record

    def free_parity(self, lane: int, slot: int) -> None:
        if self.records.pop((lane, slot), None) is not None:
            self.blocks[lane, slot] = memoryview(b"")

    def check_entry_file(self, lane: int, slot: int) -> None:
        self.parity_record(lane, slot)

    def describe(self, rank: int, generation: Generation) -> tuple[bytes, bytes] | None:
        try:
            arena, _, sealed = self._sealed(rank, generation)
        except StorageError:
            return self.peers.get((rank, generation))
        return sealed.encoded, arena.encoded_layout

    def keep(self, rank: int, manifest: bytes, layout: bytes) -> None:
        self._check_room()
        decoded = layouts.decode_manifest(manifest)
        self.peers[rank, decoded.generation] = (manifest, layout)

    def forget(self, keep: Set[Generation]) -> None:
        for key in [key for key in self.peers if key[1] not in keep]:
            del self.peers[key]

    # --- for the faults and the checks ------------------------------------------------------------

    def saved_epoch(self) -> SavedEpoch | None:
        """What a daemon that starts finds in epoch.json."""
        return decode_epoch(self.epoch) if self.epoch else None

    def snapshots(self) -> Iterator[tuple[DiskArena, int, SealedSlot]]:
        """Everything sealed whose manifest can be read, whole or not."""
        for arena in self.arenas.values():
            for slot, sealed in arena.readable():
                yield arena, slot, sealed

    def whole_blocks(self) -> Iterator[tuple[ParityRecord, bytes]]:
        """The sealed parity blocks that match their digests."""
        for key, record in self.records.items():
            block = bytes(self.blocks[key][: record.nbytes])
            if layouts.piece_digests(block, record.piece_bytes) == record.digests:
                yield record, block

    def inventory(self) -> Inventory:
        """The inventory of a daemon that has verified everything."""
        snapshots = [
            SnapshotEntry(
                rank=arena.rank,
                generation=sealed.manifest.generation,
                manifest_digest=layouts.manifest_digest(sealed.encoded),
                payload_bytes=sealed.manifest.payload_bytes,
            )
            for arena, slot, sealed in self.snapshots()
            if arena.payload(slot) is not None
        ]
        parities: list[ParityEntry] = [record.entry for record, _ in self.whole_blocks()]
        return Inventory(snapshots=tuple(snapshots), parities=tuple(parities))

    def damage_manifests(self) -> None:
        """Flip a bit of each manifest."""
        for arena in self.arenas.values():
            for slot, sealed in arena.sealed.items():
                flipped = bytearray(sealed.encoded)
                flipped[len(flipped) // 2] ^= 0x04
                arena.sealed[slot] = replace(sealed, encoded=bytes(flipped))

    def remove_unreadable(self) -> None:
        """Remove unreadable manifests, as a starting daemon does: they seal nothing."""
        for arena in self.arenas.values():
            arena.sealed = dict(arena.readable())

    def _sealed(self, rank: int, generation: Generation) -> tuple[DiskArena, int, SealedSlot]:
        for arena, slot, sealed in self.snapshots():
            if arena.rank == rank and sealed.manifest.generation == generation:
                return arena, slot, sealed
        raise StorageError(f"no snapshot {generation} of rank {rank} here")

    def _check_room(self) -> None:
        if self.full:
            raise StorageError("no space left on the tmpfs")
