"""The membership of an epoch: which members a job has, and how its snapshots are kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError


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
    """Experts of each layer that a copy holds anew; 0: all."""
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
    epoch: int
    revision: int = 0
    members: tuple[Member, ...]
    nproc_per_node: int
    groups: tuple[tuple[int, ...], ...]
    """Parity groups: member indices, each member in exactly one group. Constant for a job's life
    unless the number of members changes, because parity in memory was made for them."""
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
    """Members whose workers are started anew in this epoch, even if they could be kept: the causes
    of the recovery, and members that move. Agents of the others keep workers that can stay."""

    def __post_init__(self) -> None:
        indices = [member.index for member in self.members]
        if indices != sorted(set(indices)) or not indices:
            raise InvalidJobError(f"members of {self.job} must be unique and ascending: {indices}")
        if sorted(m for group in self.groups for m in group) != indices:
            raise InvalidJobError(
                f"parity groups {self.groups} of {self.job} must hold each member of {indices} once"
            )
        if strangers := self.restarting.difference(indices):
            raise InvalidJobError(
                f"{min(strangers)} is to be restarted but is not a member of {self.job}: {indices}"
            )

    @property
    def leader(self) -> int:
        """The lowest member: its daemon tracks protection and announces releases."""
        return self.members[0].index

    @property
    def world_size(self) -> int:
        return len(self.members) * self.nproc_per_node

    def member(self, index: int) -> Member:
        return self.members[self.position(index)]

    def member_on(self, node: str) -> int | None:
        """The member that lives on `node`, or None for a spare."""
        return next((member.index for member in self.members if member.node == node), None)

    def position(self, member: int) -> int:
        """The member's place in the order of members: its node rank in the training world."""
        # Members are 0, 1, 2 … unless the job has shrunk, and engines look this up all the time.
        if 0 <= member < len(self.members) and self.members[member].index == member:
            return member
        for position, candidate in enumerate(self.members):
            if candidate.index == member:
                return position
        raise ValueError(f"{member} is not a member of {self.job} in epoch {self.epoch}")

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
        """The lane and the row that `parity_lane` combined."""
        row, lane = divmod(parity_lane, self.nproc_per_node)
        return lane, row

    def rank_at(self, member: int, lane: int) -> int:
        return self.ranks_of(member)[lane]

    def group_of(self, member: int) -> tuple[int, ...]:
        return next(group for group in self.groups if member in group)
