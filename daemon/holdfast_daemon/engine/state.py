"""The engine's memory of one job on this node: arenas, slots, parity blocks, sessions, reports.

Plain mutable records with the questions that follow from their own fields. What changes them, and
why, is in the modules beside this one; what is on disk behind them is the adapters' business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from holdfast_core.budget import PARITY_SLOTS
from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.layouts import SLOTS_PER_ARENA, Layout, piece_count
from holdfast_core.loss_reports import LossReport
from holdfast_core.places import DIGEST_BYTES, Lying, choose, merge_digests
from holdfast_core.recovery import Holdings
from holdfast_core.values import (
    Directive,
    Generation,
    Inventory,
    Manifest,
    Membership,
    ParityEntry,
    Report,
    SnapshotEntry,
)
from holdfast_daemon.effects import Effect, Note
from holdfast_daemon.engine.loading_state import Loading
from holdfast_daemon.engine.persist_memory import PersistMemory


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
    """Where its pieces lie, or are being written; see `holdfast_core.places`."""
    unchanged: bytes = b""
    """While it is granted: bit map of the pieces that are carried over."""
    base_digests: bytes = b""
    """While it is granted: the digests of the snapshot that they are carried over from."""
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
    def lying(self) -> Lying:
        return Lying(slot=self.index, places=self.places)

    def clear(self) -> None:
        """Forget the snapshot. The slot can be used again, once nobody reads it."""
        self.state = SlotState.LEFT if self.persisting else SlotState.FREE
        self.generation = self.manifest = None
        self.encoded, self.digest = b"", 0
        self.verified = self.verifying = False
        self.rebuilt_in = self.loaded_in = 0
        self.unchanged = self.base_digests = b""
        if self.persisting is None:
            self.places = b""

    def persisted(self) -> None:
        """Nobody reads it any more."""
        self.persisting = None
        if self.state is SlotState.LEFT:
            self.clear()


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
            [s.lying for s in self.slots if s is not slot and s.state is not SlotState.FREE],
            base=base.lying if base else None,
            unchanged=unchanged,
        )

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


@dataclass(slots=True)
class Session:
    """One trainer process's claim on a rank."""

    id: str
    rank: int
    epoch: int
    layout_id: str
    pid: int
    claimed: bool = False
    """The trainer received the arena's descriptor, and with it the lock."""
    allocated: bool = False
    error: HoldfastError | None = None


@dataclass(slots=True)
class RankRecord:
    """What the daemon knows of one of its ranks."""

    session: Session | None = None
    passed: Generation | None = None
    lost_in: int = 0
    """Epoch in which its session ended without Close."""
    exited: tuple[int, int] = (0, 0)
    """(epoch, exit code) of its worker's newest failure, in the agent's words."""
    last_step: int = 0
    last_sign: float = 0.0
    seal_error: str = ""
    skipped: int = 0
    failed: int = 0
    failure: str = ""
    """Newest cause of a failed save, in the SDK's words."""
    loss: LossReport | None = None
    """What leaving experts out of snapshots costs; None where they hold everything."""
    restored: tuple[Generation | None, str] | None = None
    """What the rank was told to restore in this epoch, and from where."""


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


@dataclass(slots=True)
class JobMemory:
    """Everything the engine knows of one job."""

    job: str
    node: str
    memory_id: str
    incarnation: int
    membership: Membership | None = None
    me: int | None = None
    epoch_seen: int = 0
    """Newest epoch heard of; larger than the membership's when this daemon is fenced."""
    directive: Directive | None = None
    reports: dict[int, Report] = field(default_factory=dict)
    sequence: int = 0
    arenas: dict[tuple[int, str], ArenaView] = field(default_factory=dict)
    parities: dict[tuple[int, int], ParitySlot] = field(default_factory=dict)
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    rebuilds: dict[int, RebuildJob] = field(default_factory=dict)
    retry_at: dict[str, float] = field(default_factory=dict)
    agent_waiting: bool = False
    dropped: bool = False
    peers_kept: frozenset[Generation] = frozenset()
    persist: PersistMemory = field(default_factory=PersistMemory)
    loading: Loading = field(default_factory=Loading)
    out: list[Effect] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return self.membership.epoch if self.membership else 0

    @property
    def fenced(self) -> bool:
        return self.epoch_seen > self.epoch

    @property
    def persisting(self) -> Generation | None:
        """The generation that is to be written to the durable tier now."""
        order = self.directive.persist if self.directive else None
        return None if order is None or order.ended else order.generation

    @property
    def leads(self) -> bool:
        return self.membership is not None and self.me == self.membership.leader

    def note(
        self,
        event: str,
        *,
        rank: int | None = None,
        generation: Generation | None = None,
        detail: str = "",
    ) -> None:
        self.out.append(Note(event=event, rank=rank, generation=generation, detail=detail))

    def my_ranks(self) -> range:
        if self.membership is None or self.me is None:
            return range(0)
        return self.membership.ranks_of(self.me)

    def rank(self, rank: int) -> RankRecord:
        return self.ranks.setdefault(rank, RankRecord())

    def lane_slots(self, lane: int) -> list[ParitySlot]:
        if (lane, 0) not in self.parities:
            for index in range(PARITY_SLOTS):
                self.parities.setdefault((lane, index), ParitySlot(lane, index))
        return [self.parities[lane, index] for index in range(PARITY_SLOTS)]

    def slots(self) -> Iterator[tuple[ArenaView, Slot]]:
        for arena in self.arenas.values():
            for slot in arena.slots:
                yield arena, slot

    def sealed(self, rank: int, generation: Generation) -> tuple[ArenaView, Slot] | None:
        """Where this daemon holds the snapshot, verified or not."""
        return next(
            (
                (arena, slot)
                for arena, slot in self.slots()
                if arena.rank == rank
                and slot.state is SlotState.SEALED
                and slot.generation == generation
            ),
            None,
        )

    @property
    def verified(self) -> bool:
        """Whether everything that the inventory lists was verified in this epoch."""
        for _, slot in self.slots():
            if slot.state is SlotState.SEALED and not slot.verified:
                return False
        return all(p.verified for p in self.parities.values() if p.state is ParityState.READY)

    def holdings(self, membership: Membership) -> Holdings:
        """What the members hold, as far as they have told this daemon."""
        inventories = {member: report.inventory for member, report in self.reports.items()}
        return Holdings.of(membership, inventories)

    def inventory(self) -> Inventory:
        """What this daemon holds, in a fixed order."""
        snapshots, writing = [], []
        for arena, slot in self.slots():
            if slot.generation is None:
                continue
            if slot.state is SlotState.SEALED and slot.verified and slot.manifest is not None:
                snapshots.append(
                    SnapshotEntry(
                        rank=arena.rank,
                        generation=slot.generation,
                        manifest_digest=slot.digest,
                        payload_bytes=slot.manifest.payload_bytes,
                    )
                )
            elif slot.state in (SlotState.GRANTED, SlotState.SEALING):
                writing.append((arena.rank, slot.generation))
        return Inventory(
            snapshots=tuple(
                sorted(snapshots, key=lambda e: (e.rank, e.generation.epoch, e.generation.step))
            ),
            parities=tuple(
                sorted(
                    (p.entry for p in self.parities.values() if p.verified and p.entry),
                    key=lambda e: (e.lane, e.generation.epoch, e.generation.step),
                )
            ),
            writing=tuple(sorted(writing)),
            passed=tuple(
                sorted((rank, r.passed) for rank, r in self.ranks.items() if r.passed is not None)
            ),
        )
