"""Effects that the engine requests, and the events that end them.

The engine consumes events and returns effects; adapters (or the simulator) carry the effects out.
Effects of one call are carried out in order. An effect *at once* is finished before the next effect
begins. A *background* effect runs on its own and always ends in the event that its docstring names.

A background effect that fails ends in the event that its `failed` builds, so its definition here
says all that the engine learns. To add one: define it here with its event and add both to the
unions, carry it out in `job.worker`, and, where no effect ended in this kind of event before, apply
the event in `completions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.durable.choice import Found
from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest, ParityEntry
from holdfast_core.snapshots.membership import Member, Membership, Tier
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.snapshots.stored import RankFile


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSnapshot:
    """A sealed snapshot on another member, as its report describes it."""

    rank: int
    position: int
    """Position of the member in the parity group."""
    member: Member
    manifest_digest: int
    payload_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSlot:
    """A sealed snapshot of a rank in this node's memory, older or newer than the one to load."""

    slot: int
    manifest: Manifest
    digest: int
    """Digest of the manifest."""
    places: bytes


class SourceCorruptError(CorruptError):
    """A source's bytes do not match its manifest, even when they are fetched again."""

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position
        """Group position of the member whose snapshot is damaged."""


class ParityCorruptError(CorruptError):
    """The result of a rebuild from parity is wrong although every source is right."""

    def __init__(self, message: str, *, owners: tuple[int, ...]) -> None:
        super().__init__(message)
        self.owners = owners
        """Group positions of the blocks' owners: one of the blocks is damaged."""


# --- effects carried out at once -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveEpoch:
    """Write epoch.json (temporary file, rename): fencing must survive a restart of the daemon."""

    membership: Membership
    line: Line | None
    retained: Generation | None
    """Generation that the leader promised to keep, a promise that must survive a restart of the
    leader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """Write a slot's manifest (temporary file, rename): the snapshot exists from here on
    → `SlotSealed`, before the next effect begins."""

    rank: int
    layout_id: str
    slot: int
    manifest: Manifest
    encoded: bytes
    places: bytes = b""
    """Where its pieces lie; see `holdfast_core.snapshots.pieces`."""

    def sealed(self, error: HoldfastError | None) -> SlotSealed:
        """The event that ends it; `error` is None when the manifest was written."""
        generation = self.manifest.generation
        return SlotSealed(rank=self.rank, slot=self.slot, generation=generation, error=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSlot:
    """Unlink a slot's manifest: the snapshot no longer exists. Pieces of it that a younger snapshot
    carried over stay."""

    rank: int
    layout_id: str
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveArena:
    """Delete an arena that holds no snapshot and is no longer used."""

    rank: int
    layout_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeParity:
    """Unlink the entry of a parity block; its memory stays reserved."""

    lane: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetPeers:
    """Delete kept manifests of other members for generations that are not in `keep`."""

    keep: frozenset[Generation]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopPersisting:
    """Ask the running writers of ranks to give up soon: their set was completed or given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Event to record in logs, metrics and the catalogue."""

    event: JobEvent
    rank: int | None = None
    generation: Generation | None = None
    detail: str = ""
    stayed: bool = False
    """Whether the rank's process is of an earlier epoch."""


# --- effects carried out in the background -------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocateArena:
    """Allocate an arena and the parity blocks beside it → `ArenaReady`."""

    rank: int
    layout: bytes
    layout_id: str
    parity_lanes: tuple[int, ...] = ()
    """Parity lanes that need blocks beside it: one for each row of the group's code."""
    parity_bytes: int = 0
    """Minimum size of each of the two parity blocks of these lanes."""
    slots: tuple[int, ...]
    """Numbers of slots that the arena may have, best first: it gets the first one with which all
    ranks of this node fit."""
    ranks: int
    """Number of ranks of this node."""

    def failed(self, error: HoldfastError) -> ArenaReady:
        return ArenaReady(rank=self.rank, layout_id=self.layout_id, error=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildParity:
    """Pull one chunk from each source, verify, combine into parity block `slot` of `lane`, keep the
    sources' manifests and layouts, write the entry → `ParityBuilt`."""

    lane: int
    """Parity lane."""
    slot: int
    generation: Generation
    group: tuple[int, ...]
    code: Code
    block: BlockId
    """Identity of the block within the group; its owner is this member."""
    sources: tuple[PeerSnapshot, ...]
    """Snapshots whose chunks go into it, one per member."""

    def failed(self, error: HoldfastError) -> ParityBuilt:
        suspect = None
        if isinstance(error, SourceCorruptError):
            suspect = next(s.rank for s in self.sources if s.position == error.position)
        return ParityBuilt(
            lane=self.lane,
            slot=self.slot,
            generation=self.generation,
            entry=None,
            error=str(error),
            suspect=suspect,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchManifest:
    """Get a lost rank's manifest and layout, kept here or by a peer → `ManifestFetched`."""

    rank: int
    generation: Generation
    manifest_digest: int
    peers: tuple[Member, ...]

    def failed(self, error: HoldfastError) -> ManifestFetched:
        return ManifestFetched.failed(self.rank, self.generation, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuild:
    """Recover a snapshot from parity and the other members' chunks into a slot, verify it against
    the manifest, seal it → `Rebuilt`."""

    rank: int
    slot: int
    manifest: Manifest
    encoded: bytes
    places: bytes = b""
    """Places for its pieces."""
    own_position: int
    """Position of the rank's member in its parity group, which may be that of an earlier world."""
    code: Code
    sources: tuple[PeerSnapshot, ...]
    """Snapshots that other members of the group hold."""
    blocks: frozenset[BlockId]
    """Parity blocks of the group that still exist."""
    owners: Mapping[int, Member]
    """Present members of the group, by position: owners of its parity blocks."""

    def failed(self, error: HoldfastError) -> Rebuilt:
        return Rebuilt.failed(self.rank, self.slot, self.manifest.generation, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class FindStored:
    """Ask storage which complete sets of the job it holds → `StoredFound`."""

    epoch: int
    tier: Tier

    def failed(self, error: HoldfastError) -> StoredFound:
        return StoredFound(epoch=self.epoch, found=None, error=str(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStored:
    """Get the manifest and layout of a rank's snapshot in storage → `ManifestFetched`."""

    tier: Tier
    rank: int
    world_rank: int
    """Number of its file in the set."""
    generation: Generation
    held: tuple[HeldSlot, ...] = ()
    """Snapshots in memory. Experts are taken from them where they hold the right version, and read
    from storage otherwise."""

    def failed(self, error: HoldfastError) -> ManifestFetched:
        return ManifestFetched.failed(self.rank, self.generation, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStored:
    """Read a snapshot from storage into a slot, verify it against the manifest, seal it
    → `Rebuilt`."""

    tier: Tier
    rank: int
    slot: int
    manifest: Manifest
    encoded: bytes
    places: bytes = b""
    """Places for its pieces."""
    held: tuple[HeldSlot, ...] = ()
    """Same snapshots as in `OpenStored`; they do not change until the load ends."""

    def failed(self, error: HoldfastError) -> Rebuilt:
        return Rebuilt.failed(self.rank, self.slot, self.manifest.generation, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySnapshot:
    """Check every piece of a sealed snapshot → `SnapshotVerified`."""

    rank: int
    slot: int
    manifest: Manifest
    places: bytes = b""

    def failed(self, error: HoldfastError) -> SnapshotVerified:
        return SnapshotVerified(
            rank=self.rank,
            slot=self.slot,
            generation=self.manifest.generation,
            ok=False,
            detail=str(error),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyParity:
    """Check a parity block against its digests → `ParityVerified`."""

    lane: int
    slot: int
    generation: Generation

    def failed(self, error: HoldfastError) -> ParityVerified:
        return ParityVerified(
            lane=self.lane,
            slot=self.slot,
            generation=self.generation,
            ok=False,
            detail=str(error),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistRank:
    """Write a sealed snapshot to the durable tier, straight from its places, verified on the way
    → `RankPersisted`. Until then the slot is not used for anything else."""

    epoch: int
    number: int
    """Number of the persist order."""
    rank: int
    slot: int
    manifest: Manifest
    encoded: bytes
    layout: bytes
    """The encoded layout."""
    places: bytes
    tier: Tier
    base: Generation | None = None
    """The complete set that this one may build on, where copies leave experts out; see
    `sparse_files.may_build_on`."""

    def failed(self, error: HoldfastError) -> RankPersisted:
        return RankPersisted(
            epoch=self.epoch,
            number=self.number,
            rank=self.rank,
            layout_id=self.manifest.layout_id,
            slot=self.slot,
            generation=self.manifest.generation,
            file=None,
            error=str(error),
            corrupt=isinstance(error, CorruptError),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitSet:
    """Make the set of all ranks' files complete, then remove sets that need not be kept
    → `SetCommitted`."""

    epoch: int
    number: int
    generation: Generation
    files: tuple[RankFile, ...]
    """Files of all ranks, by world rank."""
    tier: Tier

    def failed(self, error: HoldfastError) -> SetCommitted:
        return SetCommitted(
            epoch=self.epoch, number=self.number, generation=self.generation, error=str(error)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """Send a report to a member; best effort, newest wins."""

    to: Member
    report: MemberReport


@dataclass(frozen=True, kw_only=True, slots=True)
class SendDirective:
    """Send a directive to a member; best effort, newest wins."""

    to: Member
    directive: Directive


@dataclass(frozen=True, kw_only=True, slots=True)
class SendSuspect:
    """Notify a member that the rank's bytes, read from its snapshot or rebuilt from its parity, do
    not match their manifest; best effort."""

    to: Member
    rank: int
    generation: Generation


AtOnce = SaveEpoch | Seal | FreeSlot | RemoveArena | FreeParity | ForgetPeers | StopPersisting
Send = SendReport | SendDirective | SendSuspect
Loading = FindStored | OpenStored | LoadStored
Background = (
    AllocateArena
    | BuildParity
    | FetchManifest
    | Rebuild
    | Loading
    | VerifySnapshot
    | VerifyParity
    | PersistRank
    | CommitSet
)
Effect = AtOnce | Background | Note | Send


# --- events that end effects ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSealed:
    rank: int
    slot: int
    generation: Generation
    error: HoldfastError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaReady:
    rank: int
    layout_id: str
    slots: int = 0
    """Number of slots of the arena; 0 when there is none."""
    error: HoldfastError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityBuilt:
    lane: int
    slot: int
    generation: Generation
    entry: ParityEntry | None
    error: str = ""
    suspect: int | None = None
    """Rank whose bytes did not match their manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestFetched:
    rank: int
    generation: Generation
    manifest: bytes
    """The encoded manifest; empty when no peer had it."""
    layout: bytes
    error: str = ""
    corrupt: bool = False
    """Whether the manifest or layout was damaged, so that asking again would not help."""

    @classmethod
    def failed(cls, rank: int, generation: Generation, error: HoldfastError) -> ManifestFetched:
        """The event of an effect that got no manifest because of `error`."""
        return cls(
            rank=rank,
            generation=generation,
            manifest=b"",
            layout=b"",
            error=str(error),
            corrupt=isinstance(error, CorruptError),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    rank: int
    slot: int
    generation: Generation
    error: str = ""
    """Why the rebuild failed; empty when the slot is sealed."""
    corrupt: bool = False
    """Whether bytes from storage did not match their manifest."""
    damaged: int | None = None
    """Position in the group of the owner of the damaged parity block: the result was wrong although
    every other source was right."""
    mixture: str = ""
    """Sources of the experts, in words, when there was more than one file."""

    @classmethod
    def failed(cls, rank: int, slot: int, generation: Generation, error: HoldfastError) -> Rebuilt:
        """The event of an effect that did not seal the slot because of `error`."""
        # Where several blocks went into the result, nobody knows which of them is damaged.
        owners = error.owners if isinstance(error, ParityCorruptError) else ()
        return cls(
            rank=rank,
            slot=slot,
            generation=generation,
            error=str(error),
            corrupt=isinstance(error, CorruptError),
            damaged=owners[0] if len(owners) == 1 else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFound:
    epoch: int
    found: Found | None
    """Sets that storage holds; None when it could not be read."""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotVerified:
    rank: int
    slot: int
    generation: Generation
    ok: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityVerified:
    lane: int
    slot: int
    generation: Generation
    ok: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPersisted:
    epoch: int
    number: int
    rank: int
    layout_id: str
    slot: int
    generation: Generation
    file: RankFile | None
    older: tuple[ExpertVersion, ...] = ()
    """Versions of experts that the set may restore on other ranks; see `Manifest.older`."""
    error: str = ""
    corrupt: bool = False
    """Whether the snapshot did not match its manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetCommitted:
    epoch: int
    number: int
    generation: Generation
    error: str = ""
    """Why the commit failed; empty when the set is complete."""
    left: str = ""
    """Why sets that are no longer needed could not be removed; empty when they were."""


Completion = (
    SlotSealed
    | ArenaReady
    | ParityBuilt
    | ManifestFetched
    | Rebuilt
    | StoredFound
    | SnapshotVerified
    | ParityVerified
    | RankPersisted
    | SetCommitted
)
