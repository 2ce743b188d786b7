"""Slots of arenas and of parity lanes, as the engine sees them: what each holds, and whether it is
free.

Plain mutable records, with the properties that follow from their own fields. The modules beside
this one change them; the adapters manage the files behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from holdfast_core.errors import CorruptError
from holdfast_core.experts.recompute import state_bytes
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    encode_manifest,
    manifest_digest,
    piece_count,
)
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest, ParityEntry
from holdfast_core.snapshots.pieces import DIGEST_BYTES, PieceMap, choose, merge_digests
from holdfast_daemon.engine.effects import HeldSlot


class SlotState(Enum):
    """Use of a slot of an arena."""

    FREE = "free"
    GRANTED = "granted"
    """A trainer may be writing into it, until it commits, gives the slot back or ends."""
    SEALING = "sealing"
    SEALED = "sealed"
    REBUILDING = "rebuilding"
    LEFT = "left"
    """Freed while it was being persisted: it becomes free when that ends."""


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
    """Epoch in which this daemon rebuilt it from parity; 0 when it did not."""
    loaded_in: int = 0
    """Epoch in which this daemon loaded it from storage; 0 when it did not."""
    places: bytes = b""
    """Where its pieces lie, or are being written; see `holdfast_core.snapshots.pieces`."""
    first_step: int = 0
    """First step of the sparse window for which it is granted; 0 for a snapshot of one step."""
    unchanged: bytes = b""
    """Bit map of the pieces that are carried over, while the slot is granted."""
    base_digests: bytes = b""
    """Digests of the snapshot that pieces are carried over from, while the slot is granted."""
    older: tuple[ExpertVersion, ...] = ()
    """Versions of experts that the stored set may restore on other ranks; empty until it is in
    storage."""
    persisting: Generation | None = None
    """Generation being written from it to the durable tier. Until that ends, which may be long
    after the set was given up, its pieces stay as they are."""

    def all_digests(self, written: bytes) -> bytes:
        """Digests of all pieces, `written` ones and those carried over. Raises CorruptError."""
        if len(written) % DIGEST_BYTES:
            raise CorruptError(
                f"{len(written)} bytes of digests: each has {DIGEST_BYTES}; save this step again"
            )
        if not self.unchanged:
            return written
        return merge_digests(written, self.base_digests, self.unchanged)

    @property
    def manifest_for_trainer(self) -> bytes:
        """The encoded manifest for the trainer: with the older versions of experts that other ranks
        may have been given, which only the stored set records."""
        if self.manifest is None or not self.older or self.manifest.older:
            return self.encoded
        return encode_manifest(replace(self.manifest, older=self.older))

    @property
    def piece_map(self) -> PieceMap:
        return PieceMap(slot=self.index, places=self.places)

    def filled(self, manifest: Manifest) -> None:
        """Note that a trainer has filled it with the snapshot of `manifest`, to be sealed."""
        self.state, self.manifest = SlotState.SEALING, manifest
        self.encoded = encode_manifest(manifest)
        self.digest = manifest_digest(self.encoded)

    def clear(self) -> None:
        """Forget the snapshot. The slot can be used again, once it is no longer being persisted."""
        self.state = SlotState.LEFT if self.persisting else SlotState.FREE
        self.generation = self.manifest = None
        self.encoded, self.digest = b"", 0
        self.verified = self.verifying = False
        self.rebuilt_in = self.loaded_in = self.first_step = 0
        self.unchanged = self.base_digests = b""
        self.older = ()
        if self.persisting is None:
            self.places = b""

    def persisted(self) -> None:
        """Note that persisting has ended: a slot that was left meanwhile becomes free."""
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
    """Whether it comes from storage; its digest is then not known before the manifest is there."""
    held: tuple[HeldSlot, ...] = ()
    """Snapshots of the rank still in memory, to take experts from."""


@dataclass(slots=True)
class ArenaView:
    rank: int
    layout_id: str
    layout: Layout
    encoded: bytes
    slots: list[Slot] = field(default_factory=list)
    """Its slots; empty until it is allocated."""
    _state_bytes: tuple[int, int] | None = None

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of training state in its layout: of experts, and of everything else."""
        if self._state_bytes is None:
            self._state_bytes = state_bytes(self.layout)
        return self._state_bytes

    @property
    def ready(self) -> bool:
        """Whether it is allocated."""
        return bool(self.slots)

    def allocated(self, slots: int) -> None:
        """Record that it is allocated, with so many slots."""
        if not self.slots:
            self.slots = [Slot(index) for index in range(slots)]

    def free_slot(self) -> Slot | None:
        """A slot to write into; None while a trainer of an earlier daemon may write into unknown
        places."""
        if self.has_unknown_writer:
            return None
        return next((s for s in self.slots if s.state is SlotState.FREE), None)

    @property
    def uses(self) -> str:
        """Uses of the slots, in words."""
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
        """Whether a trainer of an earlier daemon may still hold the claim."""
        return any(s.state is SlotState.GRANTED and s.generation is None for s in self.slots)

    def places_for(self, slot: Slot, base: Slot | None = None, unchanged: bytes = b"") -> bytes:
        """Places for the pieces of a snapshot in the free `slot`; see `snapshots.pieces.choose`."""
        return choose(
            slot.index,
            piece_count(self.layout.slot_bytes, self.layout.piece_bytes),
            [s.piece_map for s in self.slots if s is not slot and s.state is not SlotState.FREE],
            slots=len(self.slots),
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
    """Use of one of a lane's two parity blocks."""

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
