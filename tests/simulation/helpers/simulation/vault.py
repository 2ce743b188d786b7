"""Durable storage in the simulation, with sets that are whole, damaged, or out of reach.

It models the promises of the storage library: a set that is listed was whole once, and a piece that
does not match its digest is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast_core.durable.choice import Found, StoredCopy
from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.durable.loader import SlotPieces

URI = "sim://storage"


@dataclass(slots=True)
class StoredSnapshot:
    """A rank's file."""

    layout: bytes
    manifest: bytes
    content: Manifest
    payload: bytearray


@dataclass(slots=True)
class Vault:
    """The storage of one simulated cluster. It survives everything."""

    sets: dict[Generation, dict[int, StoredSnapshot]] = field(default_factory=dict)
    reachable: bool = True

    def damage(self, generation: Generation, rank: int, at: int) -> None:
        """Flip a bit of a payload."""
        payload = self.sets[generation][rank].payload
        payload[at % len(payload)] ^= 0x04

    def damaged(self, generation: Generation) -> bool:
        """Whether any rank's payload differs from what was stored."""
        return any(
            piece_digests(bytes(one.payload), one.content.piece_bytes) != one.content.digests
            for one in self.sets[generation].values()
        )

    def usable(self) -> list[Generation]:
        """Sets that every rank can be restored from, newest first."""
        return sorted((g for g in self.sets if not self.damaged(g)), reverse=True)

    def check(self) -> None:
        if not self.reachable:
            raise StorageError(f"{URI} does not answer")


@dataclass(frozen=True, slots=True)
class VaultSets:
    """The `durable.loader.SetReader` of one daemon."""

    vault: Vault
    wait: Callable[[], None]
    """Called where a read waits; faults may strike there."""

    def find(self) -> Found:
        self.vault.check()
        return Found(
            copies=tuple(
                StoredCopy(generation=generation, world_size=len(ranks))
                for generation, ranks in self.vault.sets.items()
            )
        )

    def open_rank(
        self, generation: Generation, rank: int, memory: Sequence[SlotPieces] = ()
    ) -> VaultRank:
        self.vault.check()
        return VaultRank(self, self.vault.sets[generation][rank])


@dataclass(frozen=True, slots=True)
class VaultRank:
    """A `durable.loader.RankReader`."""

    sets: VaultSets
    stored: StoredSnapshot

    @property
    def layout(self) -> bytes:
        return self.stored.layout

    @property
    def manifest(self) -> bytes:
        return self.stored.manifest

    @property
    def mixture(self) -> str:
        return ""

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        self.sets.wait()
        self.sets.vault.check()
        content = self.stored.content
        size = content.piece_bytes
        part = bytes(self.stored.payload[first_piece * size : end * size])
        buffer[:] = part
        if piece_digests(part, size) != content.digests[8 * first_piece : 8 * end]:
            raise CorruptError(f"piece {first_piece} or later does not match its digest")
