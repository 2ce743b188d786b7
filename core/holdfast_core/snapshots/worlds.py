"""Worlds: the members that train together, with their ranks and parity groups.

A job that continues with fewer members, or with more again, has a sequence of worlds. A generation
belongs to the world of the epoch in which it was captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberWorld:
    """Members that train together in consecutive epochs.

    A member's ranks are numbered by its index, so they keep their numbers when other members
    leave. torch counts the ranks that are present: that is a rank's *world rank*, here a number
    from 0 to `size` - 1. The two differ behind a member that is missing, and where there is an
    `order`.
    """

    since: int
    """First epoch of this world."""
    members: tuple[int, ...]
    """Member indices, ascending."""
    nproc_per_node: int
    groups: tuple[tuple[int, ...], ...]
    """Parity groups: member indices, each member in exactly one group. Constant for a world's life,
    because parity in memory was made for them."""
    order: tuple[int, ...] = ()
    """Members in the order in which torch counts them; empty where it is `members`. Only another
    controller, which numbers its pods, needs another one: a member stays where its memory is."""
    until: int = 0
    """First epoch of the world after it if that one is forgotten; 0: that of the next known one."""

    def __post_init__(self) -> None:
        if list(self.members) != sorted(set(self.members)) or not self.members:
            raise InvalidJobError(f"members must be unique and ascending: {list(self.members)}")
        if sorted(m for group in self.groups for m in group) != list(self.members):
            raise InvalidJobError(
                f"parity groups {self.groups} must hold each member of {list(self.members)} once"
            )
        if self.order and sorted(self.order) != list(self.members):
            raise InvalidJobError(
                f"order {list(self.order)} must hold each member of {list(self.members)} once"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members) * self.nproc_per_node

    @property
    def ranks(self) -> Iterator[int]:
        """All ranks, ascending."""
        return (rank for member in self.members for rank in self.ranks_of(member))

    def has(self, member: int) -> bool:
        """Whether `member` is in this world."""
        return self._place(member) is not None

    def position(self, member: int) -> int:
        """The member's place in the order of members: its node rank in torch's world.

        Raises:
            ValueError: it is no member of this world.
        """
        place = self.place(member)
        return self.order.index(member) if self.order else place

    def place(self, member: int) -> int:
        """The member's place in `members`. Raises as `position` does."""
        place = self._place(member)
        if place is None:
            raise ValueError(f"{member} is not in the world of members {list(self.members)}")
        return place

    def ranks_of(self, member: int) -> range:
        first = member * self.nproc_per_node
        return range(first, first + self.nproc_per_node)

    def member_of(self, rank: int) -> int:
        return rank // self.nproc_per_node

    def lane_of(self, rank: int) -> int:
        """The local rank: ranks of equal lane in a parity group protect each other."""
        return rank % self.nproc_per_node

    def rank_at(self, member: int, lane: int) -> int:
        return member * self.nproc_per_node + lane

    def world_rank(self, rank: int) -> int:
        """The rank's number in torch's world.

        Raises:
            ValueError: its member is not in this world.
        """
        return self.position(self.member_of(rank)) * self.nproc_per_node + self.lane_of(rank)

    def rank_of(self, world_rank: int) -> int:
        """The rank that torch numbers `world_rank`; the inverse of `world_rank`.

        Raises:
            IndexError: the world has fewer ranks.
        """
        member = (self.order or self.members)[world_rank // self.nproc_per_node]
        return self.rank_at(member, self.lane_of(world_rank))

    def group_of(self, member: int) -> tuple[int, ...]:
        return next(group for group in self.groups if member in group)

    def _place(self, member: int) -> int | None:
        place = bisect_left(self.members, member)
        is_member = place < len(self.members) and self.members[place] == member
        return place if is_member else None
