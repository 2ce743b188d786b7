"""Worlds that the control loop forms, one after another, as members leave and come.

A schedule draws these decisions from a generator of its own, so that those in which the world stays
as it is are the same as ever.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

from simulation.options import Options

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership, known_worlds
from holdfast_core.snapshots.worlds import MemberWorld


class WorldChanges:
    """Decides when the world changes, and into which.

    Args:
        members: number of members that the job wants.
        nproc: number of ranks on each.
        group_size: members of a parity group, at most.
    """

    def __init__(self, options: Options, *, members: int, nproc: int, group_size: int) -> None:
        self.rng = random.Random(options.seed)
        self._members, self._nproc, self._group_size = members, nproc, group_size
        self._fewest = options.losses + 1
        """Members of the smallest world: fewer could not protect each other."""
        self._enabled = options.changes_worlds
        self._leave_rate = self.rng.choice((0.5, 0.8, 1.0))
        self._grow_rate = self.rng.choice((0.005, 0.02, 0.1))
        self._forget_rate = self.rng.choice((0.0, 0.5))
        self._known_most = random.Random(f"{options.seed}, known worlds").choice((1, 2, 8))

    def members_at_first(self) -> int:
        """Number of members of the first world."""
        few = self._enabled and self.rng.random() < 0.3
        return self.rng.randint(self._fewest, self._members) if few else self._members

    def is_time_to_grow(self, membership: Membership) -> bool:
        """Whether an epoch begins only because there are nodes for missing members."""
        return (
            self._enabled
            and len(membership.members) < self._members
            and self.rng.random() < self._grow_rate
        )

    def leaves(self, membership: Membership, members: int) -> bool:
        """Whether a lost member leaves instead of moving to another node; `members` are there with
        it."""
        enough = self._enabled and members > self._fewest
        return enough and self.rng.random() < self._leave_rate

    def newcomers(self, membership: Membership, present: Collection[int]) -> Iterator[int]:
        """Missing members that come in an epoch that begins: the lowest first."""
        if not self._enabled:
            return
        for index in range(self._members):
            if index not in present:
                if self.rng.random() < 0.5:
                    return
                yield index

    def worlds(
        self,
        before: Membership | None,
        epoch: int,
        members: tuple[int, ...],
        protected: Generation | None,
    ) -> tuple[MemberWorld, tuple[MemberWorld, ...]]:
        """The world of the epoch, and those before it.

        Args:
            before: the newest membership; None for the job's first.
            protected: the newest generation that is known to be protected.
        """
        if before is not None and before.world.members == members:
            return before.world, before.past
        since = 0 if before is None else epoch
        world = MemberWorld(
            since=since, members=members, nproc_per_node=self._nproc, groups=self._groups(members)
        )
        if before is None:
            return world, ()
        past = (*before.past, before.world)
        needed = before.world_of(protected) if protected is not None else None
        if self.rng.random() < self._forget_rate and needed is not None:
            past = tuple(w for w in past if w.since >= needed.since)
        return world, known_worlds(past, needed, self._known_most)

    def _groups(self, members: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        size = min(self._group_size, len(members))
        groups = tuple(members[i : i + size] for i in range(0, len(members), size))
        if len(groups[-1]) < self._fewest:
            groups = (*groups[:-2], groups[-2] + groups[-1])
        return groups
