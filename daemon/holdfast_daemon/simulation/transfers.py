"""What simulated daemons pull from each other: real parity over the virtual disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast_core import layouts, raim5
from holdfast_core.values import Generation, Manifest, ParityEntry
from holdfast_daemon.effects import (
    BuildParity,
    FetchManifest,
    ManifestFetched,
    ParityBuilt,
    Rebuild,
    Rebuilt,
)
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.simulation.disk import Disk, DiskParity

if TYPE_CHECKING:
    from holdfast_daemon.simulation.cluster import Cluster


def xor(a: bytes, b: bytes) -> bytes:
    """XOR of two byte strings, the shorter one extended with zeros."""
    n = max(len(a), len(b))
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(n, "little")


class Transfers:
    """The part of a simulated daemon that moves bytes between disks."""

    cluster: Cluster
    node: str
    disk: Disk
    engine: JobEngine

    def _build(self, effect: BuildParity) -> ParityBuilt:
        block, suspect, error = b"", None, ""
        sizes = [0] * len(effect.group)
        for source in effect.sources:
            sizes[source.position] = source.payload_bytes
        kept = {}
        for source in effect.sources:
            held = self._pull(source.place.node, source.rank, effect.generation)
            if held is None:
                error = f"rank {source.rank} is not reachable"
                break
            data, manifest, layout = held
            if layouts.manifest_digest(manifest) != source.manifest_digest:
                error = f"rank {source.rank} holds another snapshot"
                break
            piece = layouts.decode_manifest(manifest)
            chunk = next(
                c
                for c in raim5.contributions(effect.own_position, sizes, piece.piece_bytes)
                if c.position == source.position
            )
            part = data[chunk.range.start : chunk.range.start + chunk.range.nbytes]
            first = chunk.range.start // piece.piece_bytes
            if self.cluster.wire_flips() or (
                layouts.first_bad_piece(
                    memoryview(part), piece.digests, piece.piece_bytes, first_piece=first
                )
                is not None
            ):
                error, suspect = "bytes do not match their manifest", source.rank
                break
            block = xor(block, part)
            kept[(source.rank, effect.generation)] = (manifest, layout)
        if error:
            return ParityBuilt(
                lane=effect.lane,
                slot=effect.slot,
                generation=effect.generation,
                entry=None,
                error=error,
                suspect=suspect,
            )
        entry = ParityEntry(
            lane=effect.lane,
            generation=effect.generation,
            group=effect.group,
            sources=tuple(sorted((s.rank, s.manifest_digest) for s in effect.sources)),
        )
        self.disk.peers.update(kept)
        self.disk.parities[(effect.lane, effect.slot)] = DiskParity(
            bytearray(block), layouts.piece_digests(block, 64), entry
        )
        return ParityBuilt(
            lane=effect.lane, slot=effect.slot, generation=effect.generation, entry=entry
        )

    def _fetch_manifest(self, effect: FetchManifest) -> ManifestFetched:
        for place in effect.peers:
            daemon = self.cluster.reachable_daemon(self.node, place.node)
            held = daemon.disk.peers.get((effect.rank, effect.generation)) if daemon else None
            if held and layouts.manifest_digest(held[0]) == effect.manifest_digest:
                return ManifestFetched(
                    rank=effect.rank,
                    generation=effect.generation,
                    manifest=held[0],
                    layout=held[1],
                )
        return ManifestFetched(
            rank=effect.rank,
            generation=effect.generation,
            manifest=b"",
            layout=b"",
            error="no peer keeps the manifest",
        )

    def _rebuild(self, effect: Rebuild) -> Rebuilt:
        manifest = effect.manifest
        sizes = [0] * (len(effect.sources) + 1)
        sizes[effect.own_position] = manifest.payload_bytes
        by_position = {source.position: source for source in effect.sources}
        for source in effect.sources:
            sizes[source.position] = source.payload_bytes
        payload = bytearray(manifest.payload_bytes)
        error = ""
        for chunk in raim5.recovery(effect.own_position, sizes, manifest.piece_bytes):
            owner = by_position[chunk.owner]
            part = self._pull_parity(owner.place.node, manifest, effect)
            for other in chunk.others:
                source = by_position[other.position]
                held = self._pull(source.place.node, source.rank, manifest.generation)
                if held is None or part is None:
                    error = f"rank {source.rank} is not reachable"
                    break
                start = other.range.start
                part = xor(part, held[0][start : start + other.range.nbytes])
            if part is None or error:
                error = error or "a parity block is not reachable"
                break
            where = chunk.range
            payload[where.start : where.start + where.nbytes] = part[: where.nbytes]
        if not error and (
            self.cluster.wire_flips()
            or layouts.piece_digests(bytes(payload), manifest.piece_bytes) != manifest.digests
        ):
            error = "rebuilt bytes do not match the manifest"
        if not error:
            arena = self.disk.arenas[(effect.rank, manifest.layout_id)]
            assert effect.slot not in arena.manifests, "a sealed slot was overwritten"
            arena.write(effect.slot, effect.places, bytes(payload), frozenset())
            arena.seal(effect.slot, effect.encoded, effect.places)
        return Rebuilt(
            rank=effect.rank, slot=effect.slot, generation=manifest.generation, error=error
        )

    def _pull_parity(self, node: str, manifest: Manifest, effect: Rebuild) -> bytes | None:
        daemon = self.cluster.reachable_daemon(self.node, node)
        if daemon is None:
            return None
        lane = self.cluster.lane_of(effect.rank)
        for (held, _), parity in daemon.disk.parities.items():
            if held == lane and parity.entry and parity.entry.generation == manifest.generation:
                return bytes(parity.block)
        return None

    def _pull(
        self, node: str, rank: int, generation: Generation
    ) -> tuple[bytes, bytes, bytes] | None:
        """(payload, manifest, layout) over the bulk path, as they are on the peer's disk."""
        daemon = self.cluster.reachable_daemon(self.node, node)
        if daemon is None or daemon.engine.memory.epoch > self.engine.memory.epoch:
            return None
        found = daemon.disk.find(rank, generation)
        if found is None:
            return None
        arena, slot, encoded = found
        size = layouts.decode_manifest(encoded).payload_bytes
        return arena.read(slot, arena.places[slot], size), encoded, arena.encoded
