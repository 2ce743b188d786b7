"""The membership of an epoch: which members a job has, and how its snapshots are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.worlds import MemberWorld

PAST_WORLDS_MAX = 8
"""Maximum number of past worlds that a membership names."""


class Redundancy(StrEnum):
    """How committed snapshots are protected against the loss of a node."""

    NONE = "None"
    RAIM5 = "RAIM5"
    """Protection against one lost node of each parity group."""
    RAIM6 = "RAIM6"
    """Protection against any two lost nodes of each parity group."""
    REPLICATION = "Replication"
    """Protection against as many lost nodes of each parity group as there are replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Place of a member in an epoch."""

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
    """Where and how often a job's generations are persisted, and which copy the job begins from."""

    uri: str
    """Directory of any kind that fsspec reaches: `file:///…`, `s3://bucket/prefix`. The job's sets
    are in a directory of their own below it."""
    every_steps: int = 0
    """Steps from copy to copy; 0: not by steps."""
    every_s: float = 0.0
    """Seconds from copy to copy; 0: not by time. Where both are 0, the interval of REFT appendix A
    applies, computed from what copies cost and how often memory was lost."""
    keep: int = 3
    """Number of newest copies to keep."""
    keep_every: int = 0
    """Copies whose step is a multiple of this are kept for good as well; 0: none."""
    bytes_per_s: int = 0
    """Bytes that one daemon may write in a second; 0: no limit."""
    experts: int = 0
    """Number of experts of each layer that a copy writes itself; 0: all."""
    restore_from: str = ""
    """`epoch.step` of the copy that a job without generations in memory begins from; empty: the
    newest complete one."""
    persisted: str = ""
    """`epoch.step` of a copy that the control loop knows to be there; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Members of a job in one epoch, and their places.

    `revision` grows when only addresses change (a daemon came back on another port): that needs no
    fencing, because the memory behind the address is the same.
    """

    job: str
    uid: str = ""
    """Identity that the API server gave the job, so that an earlier job of the same name is not
    mistaken for it; empty outside of Kubernetes. See `are_two_jobs`."""
    epoch: int
    revision: int = 0
    members: tuple[Member, ...]
    nproc_per_node: int
    groups: tuple[tuple[int, ...], ...]
    """Parity groups of the present world; see `MemberWorld.groups`."""
    redundancy: Redundancy = Redundancy.RAIM5
    replicas: int = 1
    """Number of group members that keep a copy of a rank's whole payload; only with Replication."""
    tier: Tier | None = None
    """Durable tier; None where generations are in memory only."""
    memory_bytes: int = 0
    """Bytes that the job may take on each node, for arenas and parity; 0: all that the daemon may
    use."""
    slots: int = 0
    """Slots of each rank's arena; 0: three where they fit on the rank's node, else two."""
    protection_bytes_s: int = 0
    """Bytes that each node may fetch in a second for parity of new generations; 0: no limit."""
    restarting: frozenset[int] = frozenset()
    """Members whose workers are started again in this epoch, even if they could be kept: the causes
    of the recovery, and members that move. Agents of the others keep workers that can stay."""
    restarting_ranks: frozenset[int] = frozenset()
    """Ranks of other members whose workers are started again in this epoch: causes of the recovery
    whose agents keep the rest of their workers."""

    external: bool = False
    """Whether another controller makes the pods and starts the processes: any pod of the job's
    namespace may hold a rank, and each training world names itself."""

    since: int = 0
    """First epoch of the present world. Epochs that only restart or move members belong to it."""
    order: tuple[int, ...] = ()
    """See `MemberWorld.order`."""
    past: tuple[MemberWorld, ...] = ()
    """Worlds before the present one, oldest first: their generations can still be the recovery
    line. At most `PAST_WORLDS_MAX`; see `known_worlds`."""
    world: MemberWorld = field(init=False, repr=False, compare=False)
    """The present world."""

    def __post_init__(self) -> None:
        indices = tuple(member.index for member in self.members)
        try:
            world = MemberWorld(
                since=self.since,
                members=indices,
                nproc_per_node=self.nproc_per_node,
                groups=self.groups,
                order=self.order,
            )
        except InvalidJobError as error:
            raise InvalidJobError(f"{self.job}: {error}") from error
        object.__setattr__(self, "world", world)
        if strangers := self.restarting.difference(indices):
            raise InvalidJobError(
                f"{min(strangers)} is to be restarted but is not a member of {self.job}: "
                f"{list(indices)}"
            )
        if strange := [
            rank for rank in sorted(self.restarting_ranks) if not world.has(world.member_of(rank))
        ]:
            raise InvalidJobError(
                f"rank {strange[0]} is to be restarted but belongs to no member of {self.job}: "
                f"{list(indices)}"
            )
        begun = [past.since for past in self.past] + [self.since]
        if begun != sorted(set(begun)) or self.since > self.epoch:
            raise InvalidJobError(
                f"worlds of {self.job} must follow each other up to epoch {self.epoch}; they begin "
                f"in epochs {begun}"
            )
        for past, after in zip(self.past, begun[1:], strict=True):
            if past.until and not past.since < past.until <= after:
                raise InvalidJobError(
                    f"the world of {self.job} since epoch {past.since} cannot end in epoch "
                    f"{past.until}, as the next one begins in epoch {after}"
                )
        if len(self.past) > PAST_WORLDS_MAX:
            raise InvalidJobError(
                f"{self.job} names {len(self.past)} past worlds; the most is {PAST_WORLDS_MAX}"
            )

    @property
    def leader(self) -> int:
        """The lowest member: its daemon tracks protection and announces releases."""
        return self.members[0].index

    @property
    def world_size(self) -> int:
        return self.world.size

    def world_of(self, generation: Generation) -> MemberWorld | None:
        """The world that captured `generation`; None when it is no longer known."""
        if self.is_present(generation):
            return self.world
        world = next((w for w in reversed(self.past) if w.since <= generation.epoch), None)
        if world is not None and world.until and generation.epoch >= world.until:
            return None
        return world

    def is_present(self, generation: Generation) -> bool:
        """Whether the present world captured `generation`: each of its ranks has a snapshot of its
        own to restore."""
        return generation.epoch >= self.since

    def member(self, index: int) -> Member:
        return self.members[self.world.place(index)]

    def has(self, member: int) -> bool:
        """Whether the job has this member in this epoch."""
        return self.world.has(member)

    def member_on(self, node: str) -> int | None:
        """The member that lives on `node`, or None for a spare."""
        return next((member.index for member in self.members if member.node == node), None)

    def position(self, member: int) -> int:
        """The member's place in the order of members: its node rank in torch's world."""
        try:
            return self.world.position(member)
        except ValueError:
            raise ValueError(
                f"{member} is not a member of {self.job} in epoch {self.epoch}"
            ) from None

    def ranks_of(self, member: int) -> range:
        """The ranks of `member`, whether it is in the present world or not."""
        return self.world.ranks_of(member)

    def member_of(self, rank: int) -> int:
        return self.world.member_of(rank)

    def lane_of(self, rank: int) -> int:
        """The local rank: ranks of equal lane in a parity group protect each other."""
        return self.world.lane_of(rank)

    def parity_lane(self, lane: int, row: int) -> int:
        """The parity lane of a row of the group's code: lanes of row 0 first, then of row 1."""
        return row * self.nproc_per_node + lane

    def lane_and_row(self, parity_lane: int) -> tuple[int, int]:
        """The lane and the row that `parity_lane` combined."""
        row, lane = divmod(parity_lane, self.nproc_per_node)
        return lane, row

    def rank_at(self, member: int, lane: int) -> int:
        return self.world.rank_at(member, lane)

    def group_of(self, member: int) -> tuple[int, ...]:
        """The parity group of `member` in the present world."""
        return self.world.group_of(member)


def are_two_jobs(uid: str, other: str) -> bool:
    """Whether these are the uids of an earlier and a later job of one name. An empty one agrees
    with each: its writer knew none."""
    return bool(uid and other and uid != other)


def known_worlds(
    worlds: Sequence[MemberWorld], needed: MemberWorld | None, most: int = PAST_WORLDS_MAX
) -> tuple[MemberWorld, ...]:
    """Choose the worlds that a membership still names, at most `most`.

    Args:
        worlds: worlds that follow each other, oldest first.
        needed: that of the newest generation that was safe. It is never forgotten.

    Returns:
        The newest ones, with `needed`. What the worlds captured that are forgotten behind it
        belongs to no world any more: see `MemberWorld.until`.
    """
    kept = list(worlds)
    while len(kept) > most:
        is_needed = needed is not None and kept[0].since == needed.since
        forgotten = kept.pop(1 if is_needed else 0)
        if is_needed:
            kept[0] = replace(kept[0], until=kept[0].until or forgotten.since)
    return tuple(kept)
