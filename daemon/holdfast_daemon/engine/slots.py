"""Slots of arenas and of parity lanes, as the engine sees them: what each holds, and whether it is
free.

Plain mutable records with the questions that follow from their own fields. What changes them, and
why, is in the modules beside this one; what is on disk behind them is the adapters' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import SLOTS_PER_ARENA, Layout, encode_manifest, piece_count
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest, ParityEntry
from holdfast_core.snapshots.pieces import DIGEST_BYTES, PieceMap, choose, merge_digests
from holdfast_daemon.engine.effects import HeldSlot


class SlotState(Enum):
    """What a slot of an arena is used for."""

    FREE = "free"
    GRANTED = "granted"
    """A trainer may be writing into it; only the end of that trainer frees it."""
    SEALING = "sealing"
    SEALED = "sealed"
    REBUILDING = "rebuilding"
    LEFT = "left"
    """Freed while it was being persisted: it is free when that ends."""


@dataclass(slots=True)
class Slot:
    index: int
    state: SlotState = SlotState.FREE
    generation: Generation | None = None
    manifest: Manifest | None = None
    encoded: bytes = b""
    digest: int = 0
    verified: bool = False
    verifying: bool = False
    rebuilt_in: int = 0
    """Epoch in which this daemon rebuilt it from parity; 0 when a trainer wrote it."""
    loaded_in: int = 0
    """Epoch in which this daemon loaded it from storage; likewise."""
    places: bytes = b""
    """Where its pieces lie, or are being written; see `holdfast_core.snapshots.pieces`."""
    unchanged: bytes = b""
    """While it is granted: bit map of the pieces that are carried over."""
    base_digests: bytes = b""
    """While it is granted: the digests of the snapshot that they are carried over from."""
    older: tuple[ExpertVersion, ...] = ()
    """Once it is in storage: versions of experts that the set may give back to other ranks."""
    persisting: Generation | None = None
    """What is being written from it to the durable tier. Until that ends, which may be long after
    the set was given up, its pieces stay as they are."""

    def all_digests(self, written: bytes) -> bytes:
        """The digests of what was written, and of what is carried over. Raises CorruptError."""
        if len(written) % DIGEST_BYTES:
            raise CorruptError(
                f"{len(written)} bytes of digests: each has {DIGEST_BYTES}; save this step again"
            )
        if not self.unchanged:
            return written
        return merge_digests(written, self.base_digests, self.unchanged)

    @property
    def manifest_for_trainer(self) -> bytes:
        """The manifest, encoded, as the trainer is told it: with the older versions of experts that
        other ranks may have been given, which only storage knows."""
        if self.manifest is None or not self.older or self.manifest.older:
            return self.encoded
        return encode_manifest(replace(self.manifest, older=self.older))

    @property
    def piece_map(self) -> PieceMap:
        return PieceMap(slot=self.index, places=self.places)

    def clear(self) -> None:
        """Forget the snapshot. The slot can be used again, once nobody reads it."""
        self.state = SlotState.LEFT if self.persisting else SlotState.FREE
        self.generation = self.manifest = None
        self.encoded, self.digest = b"", 0
        self.verified = self.verifying = False
        self.rebuilt_in = self.loaded_in = 0
        self.unchanged = self.base_digests = b""
        self.older = ()
        if self.persisting is None:
            self.places = b""

    def persisted(self) -> None:
        """Nobody reads it any more."""
        self.persisting = None
        if self.state is SlotState.LEFT:
            self.clear()


@dataclass(slots=True)
class RebuildJob:
    """A rebuild under way for one rank: manifest, then arena, then bytes."""

    generation: Generation
    digest: int
    manifest: Manifest | None = None
    encoded: bytes = b""
    layout_id: str = ""
    stored: bool = False
    """It comes from storage; the digest is not known before the manifest is there."""
    held: tuple[HeldSlot, ...] = ()
    """What memory still has of the rank, to take experts from."""


@dataclass(slots=True)
class ArenaView:
    rank: int
    layout_id: str
    layout: Layout
    encoded: bytes
    ready: bool = False
    slots: list[Slot] = field(default_factory=lambda: [Slot(i) for i in range(SLOTS_PER_ARENA)])

    def free_slot(self) -> Slot | None:
        """A slot to write into; none while a trainer of an earlier daemon may write into places
        that nobody knows."""
        if self.has_unknown_writer:
            return None
        return next((s for s in self.slots if s.state is SlotState.FREE), None)

    @property
    def uses(self) -> str:
        """What the slots are used for, in words."""
        return ", ".join(f"{s.state.value} {s.generation}" for s in self.slots)

    def whole(self, generation: Generation | None) -> Slot | None:
        """The sealed snapshot of `generation`, when it was verified in this epoch."""
        return next(
            (
                s
                for s in self.slots
                if s.state is SlotState.SEALED and s.verified and s.generation == generation
            ),
            None,
        )

    @property
    def is_mixed(self) -> bool:
        """Whether snapshots may share pieces."""
        return any(slot.places for slot in self.slots)

    @property
    def has_unknown_writer(self) -> bool:
        """Whether a trainer of an earlier daemon holds the claim, for all that is known."""
        return any(s.state is SlotState.GRANTED and s.generation is None for s in self.slots)

    def places_for(self, slot: Slot, base: Slot | None = None, unchanged: bytes = b"") -> bytes:
        """Where the pieces of a snapshot in the free `slot` go; see `places.choose`."""
        return choose(
            slot.index,
            piece_count(self.layout.slot_bytes, self.layout.piece_bytes),
            [s.piece_map for s in self.slots if s is not slot and s.state is not SlotState.FREE],
            base=base.piece_map if base else None,
            unchanged=unchanged,
        )

    def begin_recovery(self, slot: Slot, job: RebuildJob, manifest: Manifest) -> None:
        """Give the free `slot` to the snapshot that `job` recovers; its bytes come next."""
        pieces = piece_count(manifest.payload_bytes, manifest.piece_bytes)
        slot.places, slot.state = self.places_for(slot)[:pieces], SlotState.REBUILDING
        slot.generation, slot.digest = job.generation, job.digest
        slot.manifest, slot.encoded = manifest, job.encoded

    @property
    def idle(self) -> bool:
        return all(slot.state is SlotState.FREE for slot in self.slots)


class ParityState(Enum):
    """What one of a lane's two parity blocks is used for."""

    FREE = "free"
    BUILDING = "building"
    READY = "ready"


@dataclass(slots=True)
class ParitySlot:
    lane: int
    index: int
    state: ParityState = ParityState.FREE
    generation: Generation | None = None
    entry: ParityEntry | None = None
    verified: bool = False
    verifying: bool = False

    def clear(self) -> None:
        self.state = ParityState.FREE
        self.generation = self.entry = None
        self.verified = self.verifying = False
