"""A node's tmpfs, as the real storage keeps it: outlives the daemon, not the node."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core import layouts
from holdfast_core.errors import CorruptError
from holdfast_core.layouts import SLOTS_PER_ARENA, Layout
from holdfast_core.values import Generation, Inventory, Line, Membership, ParityEntry, SnapshotEntry


@dataclass(slots=True)
class DiskArena:
    layout: Layout
    encoded: bytes
    slots: list[bytearray]
    manifests: dict[int, bytes] = field(default_factory=dict)


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
        data = bytes(arena.slots[slot][: manifest.payload_bytes])
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
                data = bytes(arena.slots[slot][: manifest.payload_bytes])
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
