"""A node's tmpfs, as the real storage keeps it: outlives the daemon, not the node."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core import layouts
from holdfast_core.errors import CorruptError
from holdfast_core.layouts import SLOTS_PER_ARENA, Layout
from holdfast_core.places import Lying, runs
from holdfast_core.values import Generation, Inventory, Line, Membership, ParityEntry, SnapshotEntry


@dataclass(slots=True)
class DiskArena:
    layout: Layout
    encoded: bytes
    slots: list[bytearray]
    manifests: dict[int, bytes] = field(default_factory=dict)
    places: dict[int, bytes] = field(default_factory=dict)
    """By slot, of what is sealed in it; see `holdfast_core.places`."""

    def seal(self, slot: int, encoded: bytes, places: bytes) -> None:
        self.manifests[slot], self.places[slot] = encoded, places

    def read(self, slot: int, places: bytes, nbytes: int) -> bytes:
        """The first `nbytes` of a payload."""
        size = self.layout.piece_bytes
        found = b"".join(
            self.slots[run.slot][run.first * size : run.end * size]
            for run in runs(Lying(slot, places), 0, layouts.piece_count(nbytes, size))
        )
        return found[:nbytes]

    def write(self, slot: int, places: bytes, data: bytes, skip: frozenset[int]) -> None:
        """Put a payload where its pieces go, all but those of `skip`."""
        size = self.layout.piece_bytes
        for run in runs(Lying(slot, places), 0, layouts.piece_count(len(data), size)):
            for piece in range(run.first, run.end):
                if piece not in skip:
                    assert not self._is_held(run.slot, piece), "a sealed piece was overwritten"
                    part = data[piece * size : (piece + 1) * size]
                    self.slots[run.slot][piece * size : piece * size + len(part)] = part

    def _is_held(self, slot: int, piece: int) -> bool:
        """Whether a sealed snapshot has its piece there."""
        for sealed, encoded in self.manifests.items():
            try:
                manifest, places = layouts.decode_manifest(encoded), self.places[sealed]
            except CorruptError:
                continue
            held = layouts.piece_count(manifest.payload_bytes, manifest.piece_bytes)
            if piece < held and (places[piece] if places else sealed) == slot:
                return True
        return False


@dataclass(slots=True)
class DiskParity:
    block: bytearray = field(default_factory=bytearray)
    digest: bytes = b""
    entry: ParityEntry | None = None


@dataclass(slots=True)
class Disk:
    """The files of docs/architecture.md §4 for one job."""

    memory_id: str
    incarnation: int = 0
    epoch: tuple[Membership, Line | None, Generation | None] | None = None
    arenas: dict[tuple[int, str], DiskArena] = field(default_factory=dict)
    parities: dict[tuple[int, int], DiskParity] = field(default_factory=dict)
    peers: dict[tuple[int, Generation], tuple[bytes, bytes]] = field(default_factory=dict)

    def allocate(self, rank: int, encoded: bytes) -> None:
        layout = layouts.decode_layout(encoded)
        key = (rank, layouts.layout_id(encoded))
        if key not in self.arenas:
            slots = [bytearray(layout.slot_bytes) for _ in range(SLOTS_PER_ARENA)]
            self.arenas[key] = DiskArena(layout, encoded, slots)

    def find(self, rank: int, generation: Generation) -> tuple[DiskArena, int, bytes] | None:
        """(arena, slot, encoded manifest) of a sealed snapshot, whole or not."""
        for (held, _), arena in self.arenas.items():
            if held != rank:
                continue
            for slot, encoded in arena.manifests.items():
                try:
                    manifest = layouts.decode_manifest(encoded)
                except CorruptError:
                    continue
                if manifest.generation == generation:
                    return arena, slot, encoded
        return None

    def payload(self, rank: int, generation: Generation) -> bytes | None:
        """The bytes of a sealed snapshot when they match their manifest."""
        found = self.find(rank, generation)
        if found is None:
            return None
        arena, slot, encoded = found
        manifest = layouts.decode_manifest(encoded)
        data = arena.read(slot, arena.places[slot], manifest.payload_bytes)
        whole = layouts.piece_digests(data, manifest.piece_bytes) == manifest.digests
        return data if whole else None

    def inventory(self) -> Inventory:
        """What an honest daemon would find here after verifying everything."""
        snapshots, parities = [], []
        for (rank, _), arena in self.arenas.items():
            for slot, encoded in arena.manifests.items():
                try:
                    manifest = layouts.decode_manifest(encoded)
                except CorruptError:
                    continue
                data = arena.read(slot, arena.places[slot], manifest.payload_bytes)
                if layouts.piece_digests(data, manifest.piece_bytes) == manifest.digests:
                    snapshots.append(
                        SnapshotEntry(
                            rank=rank,
                            generation=manifest.generation,
                            manifest_digest=layouts.manifest_digest(encoded),
                            payload_bytes=manifest.payload_bytes,
                        )
                    )
        for parity in self.parities.values():
            if parity.entry and layouts.piece_digests(bytes(parity.block), 64) == parity.digest:
                parities.append(parity.entry)
        return Inventory(snapshots=tuple(snapshots), parities=tuple(parities))
