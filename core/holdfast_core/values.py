"""The values that parts exchange: generations, places, memberships, inventories.

All are frozen and hashable. They carry no behaviour beyond what follows from their own fields;
whatever decides lives in the modules beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from holdfast_core.errors import InvalidJobError

if TYPE_CHECKING:
    from holdfast_core.persisted import RankFile


@dataclass(frozen=True, order=True, slots=True)
class Generation:
    """The snapshots of all ranks for one step, captured in one epoch.

    The epoch is part of the identity because a step that is executed again after a recovery belongs
    to another timeline: bytes of the two must never be mixed. Order is by epoch, then step: what is
    captured after a recovery is newer than everything that was captured before it.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Generation:
        """The generation that `str()` wrote as `epoch.step`."""
        epoch, _, step = text.partition(".")
        return cls(int(epoch), int(step))


class Redundancy(StrEnum):
    """How committed snapshots are protected against the loss of a node."""

    NONE = "None"
    RAIM5 = "RAIM5"
    """One lost node of each parity group."""
    RAIM6 = "RAIM6"
    """Any two lost nodes of each parity group."""
    REPLICATION = "Replication"
    """As many lost nodes of each parity group as there are replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberPlace:
    """Where a member lives in an epoch."""

    index: int
    node: str
    memory_id: str
    """Identity of the node's tmpfs. A reboot changes it, so a node that lost its memory is not
    mistaken for one that kept it."""
    peer_address: str
    """`host:port` of the daemon's peer service (gRPC)."""
    bulk_address: str
    """`host:port` of the daemon's bulk service (zero-copy TCP)."""
    domain: str = ""
    """Failure domain (rack, zone); the node itself when empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Where and how often a job's generations are persisted, and where it begins."""

    uri: str
    """A directory of any kind that fsspec reaches: `file:///…`, `s3://bucket/prefix`. The job's
    sets lie in a directory of its own below it."""
    every_steps: int = 0
    """Steps from copy to copy; 0: not by steps."""
    every_s: float = 0.0
    """Seconds from copy to copy; 0: not by time. Without steps and time, as REFT appendix A
    computes it from what copies cost and how often memory was lost."""
    keep: int = 3
    """Newest copies to keep."""
    keep_every: int = 0
    """Besides, copies whose step is a multiple of this are kept for good; 0: none."""
    bytes_per_s: int = 0
    """What one daemon may write in a second; 0: as fast as it can."""
    experts: int = 0
    """Of each layer, the experts that a copy holds anew; 0: all."""
    restore_from: str = ""
    """`epoch.step` of the copy that a job without generations in memory begins from; empty: the
    newest whole one."""
    persisted: str = ""
    """`epoch.step` of a copy that the control loop knows was put there; empty: it knows of none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Who takes part in a job in one epoch, and where.

    `revision` grows when only addresses change (a daemon came back on another port): that needs no
    fencing, because the memory behind the address is the same.
    """

    job: str
    epoch: int
    revision: int = 0
    members: tuple[MemberPlace, ...]
    nproc_per_node: int
    groups: tuple[tuple[int, ...], ...]
    """Parity groups: member indices, each member in exactly one group. Constant for a job's life
    unless the number of members changes, because parity in memory was made for them."""
    redundancy: Redundancy = Redundancy.RAIM5
    replicas: int = 1
    """Members of its group that keep a rank's whole payload; only with Replication."""
    tier: Tier | None = None
    """None: generations are in memory only."""
    memory_bytes: int = 0
    """What the job may take on each node, arenas and parity; 0: all that the daemon may use."""
    protection_bytes_s: int = 0
    """What each node may fetch for parity of new generations in a second; 0: no limit."""

    def __post_init__(self) -> None:
        indices = [place.index for place in self.members]
        if indices != sorted(set(indices)) or not indices:
            raise InvalidJobError(f"members of {self.job} must be unique and ascending: {indices}")
        if sorted(m for group in self.groups for m in group) != indices:
            raise InvalidJobError(
                f"parity groups {self.groups} of {self.job} must hold each member of {indices} once"
            )

    @property
    def leader(self) -> int:
        """The lowest member: its daemon tracks protection and announces releases."""
        return self.members[0].index

    @property
    def world_size(self) -> int:
        return len(self.members) * self.nproc_per_node

    def place(self, member: int) -> MemberPlace:
        return self.members[self.position(member)]

    def member_on(self, node: str) -> int | None:
        """The member that lives on `node`, or None for a spare."""
        return next((place.index for place in self.members if place.node == node), None)

    def position(self, member: int) -> int:
        """The member's place in the order of members: its node rank in the training world."""
        # Members are 0, 1, 2 … unless the job has shrunk, and engines ask this all the time.
        if 0 <= member < len(self.members) and self.members[member].index == member:
            return member
        for position, place in enumerate(self.members):
            if place.index == member:
                return position
        raise ValueError(f"{member} is no member of {self.job} in epoch {self.epoch}")

    def ranks_of(self, member: int) -> range:
        first = self.position(member) * self.nproc_per_node
        return range(first, first + self.nproc_per_node)

    def member_of(self, rank: int) -> int:
        return self.members[rank // self.nproc_per_node].index

    def lane_of(self, rank: int) -> int:
        """The local rank: ranks of equal lane in a parity group protect each other."""
        return rank % self.nproc_per_node

    def parity_lane(self, lane: int, row: int) -> int:
        """The parity lane of a row of the group's code: lanes of row 0 first, then of row 1."""
        return row * self.nproc_per_node + lane

    def lane_and_row(self, parity_lane: int) -> tuple[int, int]:
        """What `parity_lane` joined."""
        row, lane = divmod(parity_lane, self.nproc_per_node)
        return lane, row

    def rank_at(self, member: int, lane: int) -> int:
        return self.ranks_of(member)[lane]

    def group_of(self, member: int) -> tuple[int, ...]:
        return next(group for group in self.groups if member in group)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertVersion:
    """A captured version of an expert, as one rank knows it."""

    unit: str
    """`str(UnitKey)`."""
    generation: Generation
    number: int
    """Of the snapshot in the job's life, from 0."""
    tokens: int
    """That the rank had routed to the expert when it was captured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a sealed snapshot contains: enough to find, verify and restore every byte.

    The payload is the slot's bytes [0, payload_bytes): the tensors at the offsets that the layout
    gives, then the extras. It is checksummed in pieces on a fixed grid, so that any range that
    starts on the grid can be verified alone: by a parity owner, a rebuilt member, a restoring rank.
    """

    job: str
    rank: int
    world_size: int
    generation: Generation
    layout_id: str
    payload_bytes: int
    extras_offset: int
    extras_bytes: int
    piece_bytes: int
    digests: bytes
    """xxh3-64 of each piece, ceil(payload_bytes / piece_bytes) of them, 8 bytes little-endian."""
    nan_units: tuple[str, ...] = ()
    """Units that held a NaN when they were captured (captured faithfully, counted)."""
    experts: tuple[ExpertVersion, ...] = ()
    """Where snapshots leave experts out: the version of each expert that the snapshot holds, and of
    the experts of other ranks the newest that this rank knows."""
    older: tuple[ExpertVersion, ...] = ()
    """Of a snapshot from durable storage: versions that other ranks may have been given, older than
    those in `experts`. They say what this rank's tokens lost by that."""

    def __post_init__(self) -> None:
        if self.piece_bytes < 1 or self.payload_bytes < 0:
            raise InvalidJobError(
                f"manifest of rank {self.rank} generation {self.generation}: {self.payload_bytes} "
                f"bytes in pieces of {self.piece_bytes}"
            )
        pieces = -(-self.payload_bytes // self.piece_bytes)
        if len(self.digests) != 8 * pieces:
            raise InvalidJobError(
                f"manifest of rank {self.rank} generation {self.generation}: {len(self.digests)} "
                f"bytes of digests for {pieces} pieces"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotEntry:
    """One sealed snapshot in an inventory."""

    rank: int
    generation: Generation
    manifest_digest: int
    """xxh3-64 of the encoded manifest: two entries with equal digests hold equal bytes."""
    payload_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityEntry:
    """One finished parity block in an inventory, with the manifests that it was made from."""

    lane: int
    """Parity lane: see `Membership.parity_lane`."""
    generation: Generation
    group: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]
    """(rank, manifest_digest) of every snapshot that went into the block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What one daemon holds for one job, as it says itself. The truth (invariant 6)."""

    snapshots: tuple[SnapshotEntry, ...] = ()
    parities: tuple[ParityEntry, ...] = ()
    writing: tuple[tuple[int, Generation], ...] = ()
    """(rank, generation) of granted slots that are not sealed yet."""
    passed: tuple[tuple[int, Generation], ...] = ()
    """(rank, newest generation that the rank has asked to save): a generation up to this one that
    is neither held nor being written will never be completed by that rank."""


@dataclass(frozen=True, order=True, slots=True)
class PersistOrder:
    """The leader's order to write a generation to the durable tier. Of two, the greater counts."""

    number: int
    """Grows by one with each order of an epoch; so does it when a generation is tried again."""
    ended: bool
    """The set is complete, or was given up: nobody writes for it any more."""
    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedLoad:
    """A rank's snapshot in storage that its daemon cannot use."""

    rank: int
    generation: Generation
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A daemon's periodic word to its leader and its parity group. Newest wins, so loss, delay and
    reordering of reports are harmless."""

    job: str
    epoch: int
    member: int
    incarnation: int
    """Grows with every start of the daemon on this memory."""
    sequence: int
    verified: bool
    """False until everything the inventory lists was verified after the epoch began."""
    inventory: Inventory
    line: Line | None = None
    """The line this daemon was told in this epoch: a leader that restarted keeps its word."""
    retained: Generation | None = None
    """What this daemon was told to retain in this epoch, for the same reason."""
    persist: PersistOrder | None = None
    """The newest order that it heard in this epoch, for the same reason. What follows is of it."""
    persisted: tuple[RankFile, ...] = ()
    """Its ranks' files that are in storage."""
    persist_failure: str = ""
    """Why it cannot write the others; empty when it can."""
    stored: Generation | None = None
    """The newest complete set in storage that it has heard of, in any epoch."""
    wanted: Generation | None = None
    """It asks that this generation, or a newer one, be persisted soon."""
    unloadable: tuple[FailedLoad, ...] = ()
    """What it could not load from storage lately, because the bytes there are not right."""

    @property
    def order(self) -> tuple[int, int]:
        return (self.incarnation, self.sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The decision where an epoch starts: a generation, or None for a fresh start."""

    generation: Generation | None
    reason: str = field(compare=False)
    stored: bool = field(default=False, compare=False)
    """Memory had no line: the generation was loaded from storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Directive:
    """The leader's word to all members. Every field only ever grows within an epoch, so directives
    can be lost, repeated and reordered."""

    job: str
    epoch: int
    line: Line | None = None
    """None while undecided."""
    protected: Generation | None = None
    """The newest generation that survives the loss of as many nodes per parity group as the job's
    redundancy is made for."""
    retained: Generation | None = None
    """Generations older than this one may be freed."""
    dead: tuple[Generation, ...] = ()
    """Generations that some rank will never complete; their slots may be reused."""
    rendezvous: str = ""
    """`host:port` of the training world's store, from the member that serves it."""
    persist: PersistOrder | None = None
    """What is being written to the durable tier, or was last."""
    persisted: Generation | None = None
    """The newest generation of which the durable tier has a complete set."""
    load: Generation | None = None
    """Before there is a line: memory has none, and every daemon is to load its ranks' snapshots of
    this generation from storage. It changes when they cannot be used. Once all are in memory, the
    line is this generation."""
