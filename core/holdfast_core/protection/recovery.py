"""Recovery line, protection and retention, as pure functions of the daemons' inventories.

The leader's engine in every daemon and the simulator's checker call them. The daemons' memory is
the truth (invariant 6), so nothing here keeps state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.protection.codes import BlockId, Code, code_of
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Membership


@dataclass(frozen=True, slots=True)
class Holdings:
    """All inventories of a job, indexed for the functions below."""

    snapshots: Mapping[tuple[int, Generation], SnapshotEntry]
    """(rank, generation) → entry. Of the present world, only where the rank's own member holds it;
    of a past world, wherever it is held."""
    holders: Mapping[tuple[int, Generation], int]
    """(rank, generation) → the member that holds it: the rank's own, or else the lowest."""
    parities: Mapping[tuple[int, int, Generation], ParityEntry]
    """(owner member, parity lane, generation) → entry, only for the group that the owner was in
    when the generation was captured."""

    @classmethod
    def of(cls, membership: Membership, inventories: Mapping[int, Inventory]) -> Holdings:
        snapshots: dict[tuple[int, Generation], SnapshotEntry] = {}
        holders: dict[tuple[int, Generation], int] = {}
        parities: dict[tuple[int, int, Generation], ParityEntry] = {}
        for member, inventory in sorted(inventories.items()):
            ranks = membership.ranks_of(member)
            for entry in inventory.snapshots:
                key = entry.rank, entry.generation
                if entry.rank in ranks or (
                    key not in holders and not membership.is_present(entry.generation)
                ):
                    snapshots[key], holders[key] = entry, member
            for block in inventory.parities:
                if block.group == group_of(membership, member, block.generation):
                    parities[member, block.lane, block.generation] = block
        return cls(snapshots, holders, parities)

    def of_group(
        self, membership: Membership, group: tuple[int, ...], generation: Generation
    ) -> Holdings:
        """The part that belongs to a parity group of the world that captured `generation`."""
        ranks = [rank for member in group for rank in membership.ranks_of(member)]
        keys = [(rank, generation) for rank in ranks if (rank, generation) in self.snapshots]
        code = code_of(membership, group)
        lanes = range(code.rows * membership.nproc_per_node if code is not None else 0)
        blocks = [(owner, lane, generation) for owner in group for lane in lanes]
        return Holdings(
            {key: self.snapshots[key] for key in keys},
            {key: self.holders[key] for key in keys},
            {key: self.parities[key] for key in blocks if key in self.parities},
        )

    def without(self, member: int) -> Holdings:
        """The holdings that are left when `member` is lost."""
        left = {key: holder for key, holder in self.holders.items() if holder != member}
        return Holdings(
            {key: self.snapshots[key] for key in left},
            left,
            {key: entry for key, entry in self.parities.items() if key[0] != member},
        )

    def has_window(self, generation: Generation) -> bool:
        """Whether a snapshot of `generation` is a sparse window."""
        return any(e.window for (_, known), e in self.snapshots.items() if known == generation)

    @property
    def members(self) -> set[int]:
        """Members that hold any of it."""
        return {*self.holders.values(), *(owner for owner, _, _ in self.parities)}

    def generations(self) -> list[Generation]:
        """All generations of which anything is held, newest first."""
        held = {generation for _, generation in self.snapshots}
        return sorted(held, reverse=True)


def group_of(membership: Membership, member: int, generation: Generation) -> tuple[int, ...]:
    """The member's parity group in the world that captured `generation`; empty if it was not a
    member then."""
    world = membership.world_of(generation)
    return world.group_of(member) if world is not None and member in world.members else ()


def heir(membership: Membership, rank: int, generation: Generation) -> int:
    """The member that recovers the rank's snapshot of `generation`: the rank's own member, or if
    that has left, another of its parity group in the world that captured it. The ranks that a group
    has lost are divided among its remaining members. If none remains, they are divided among all
    members: then only storage can have the snapshot."""
    own = membership.member_of(rank)
    if membership.has(own):
        return own
    group = group_of(membership, own, generation)
    left = [member for member in group if membership.has(member)] or membership.world.members
    gone = [member for member in group if not membership.has(member)]
    turn = gone.index(own) * membership.nproc_per_node + membership.lane_of(rank)
    return left[turn % len(left)]


def is_complete(membership: Membership, holdings: Holdings, generation: Generation) -> bool:
    """Whether a daemon holds the snapshot of `generation` of every rank that captured it."""
    world = membership.world_of(generation)
    return world is not None and all(
        (rank, generation) in holdings.snapshots for rank in world.ranks
    )


def is_protected(membership: Membership, holdings: Holdings, generation: Generation) -> bool:
    """Whether `generation` survives the loss of as many nodes of each parity group as the job's
    redundancy allows for."""
    world = membership.world_of(generation)
    return (
        world is not None
        and is_complete(membership, holdings, generation)
        and all(
            _has_all_blocks(membership, holdings, group, group, generation)
            for group in world.groups
        )
    )


@dataclass(frozen=True, slots=True)
class RebuildSources:
    """The snapshots and parity blocks from which a lost snapshot can be rebuilt."""

    manifest_digest: int
    """Manifest digest of the lost snapshot."""
    positions: frozenset[int]
    """Positions of the other members of the group that hold their snapshot of its lane."""
    blocks: frozenset[BlockId]
    """Parity blocks of its lane in the group that were made from exactly these snapshots and the
    lost one."""


def rebuild_sources(
    membership: Membership, holdings: Holdings, rank: int, generation: Generation
) -> RebuildSources | None:
    """The sources in its parity group from which the rank's snapshot can be rebuilt; None if they
    do not suffice."""
    member, lane = membership.member_of(rank), membership.lane_of(rank)
    group = group_of(membership, member, generation)
    code = code_of(membership, group)
    if code is None:
        return None
    lost = group.index(member)
    held = frozenset(
        position
        for position, other in enumerate(group)
        if position != lost and (membership.rank_at(other, lane), generation) in holdings.snapshots
    )
    blocks = {
        block: entry
        for owner in range(code.n)
        if owner != lost
        for row in range(code.rows)
        for block in [BlockId(owner, row)]
        for entry in [
            _parity_of(membership, holdings, group, code, block, lane, generation, spare=lost)
        ]
        if entry is not None
    }
    # Some stripes of some codes happen to survive more losses than all do: do not rely on it.
    if code.n - len(held) > code.rows or not code.solvable(lost, held, blocks.keys()):
        return None
    # All blocks must have the same digest of what is gone, or they do not belong together.
    gone: dict[int, int] = {}
    for entry in blocks.values():
        for source, digest in entry.sources:
            known = (source, generation) in holdings.snapshots and source != rank
            if not known and gone.setdefault(source, digest) != digest:
                return None
    return RebuildSources(gone[rank], held, frozenset(blocks))


def rebuildable(
    membership: Membership, holdings: Holdings, rank: int, generation: Generation
) -> bool:
    """Whether the other members of the rank's parity group hold enough to rebuild its snapshot."""
    return rebuild_sources(membership, holdings, rank, generation) is not None


def recovery_line(membership: Membership, inventories: Mapping[int, Inventory]) -> Line:
    """The newest generation from which every rank can be restored.

    `inventories` has one entry for each member; a member on a fresh node has an empty one.
    """
    holdings = Holdings.of(membership, inventories)
    rejected: list[str] = []
    for generation in holdings.generations():
        world = membership.world_of(generation)
        if world is None:
            rejected.append(f"{generation} is of a world that is no longer known")
            continue
        missing = [rank for rank in world.ranks if (rank, generation) not in holdings.snapshots]
        lost = [rank for rank in missing if not rebuildable(membership, holdings, rank, generation)]
        if not lost:
            own = "local" if membership.is_present(generation) else "daemons'"
            how = f"ranks {missing} from parity" if missing else f"all ranks in {own} memory"
            return Line(generation=generation, reason=f"generation {generation}: {how}")
        rejected.append(f"{generation} lacks ranks {lost}")
    why = "; ".join(rejected) if rejected else "no daemon holds a snapshot"
    return Line(generation=None, reason=f"no generation in memory covers every rank: {why}")


def newest_protected(
    membership: Membership, holdings: Holdings, *, not_after: Generation | None = None
) -> Generation | None:
    """The newest protected generation, at most `not_after` when that is given."""
    return next(
        (
            generation
            for generation in holdings.generations()
            if (not_after is None or generation <= not_after)
            and is_protected(membership, holdings, generation)
        ),
        None,
    )


def newest_survivable(
    membership: Membership, holdings: Holdings, *, not_after: Generation
) -> Generation | None:
    """The newest generation, at most `not_after`, from which every rank can be restored, and still
    could be after one more lost node in each parity group that has lost fewer than its redundancy
    allows for."""
    return next(
        (
            generation
            for generation in holdings.generations()
            if generation <= not_after
            and (world := membership.world_of(generation)) is not None
            and all(
                _group_survives(membership, holdings, group, generation) for group in world.groups
            )
        ),
        None,
    )


def most_survivable(
    membership: Membership, holdings: Holdings, *, not_after: Generation
) -> Generation | None:
    """The newest generation, at most `not_after`, that beside `not_after` itself covers the loss of
    the most members, any one at a time. It is the best choice if `newest_survivable` finds none,
    because lost parity of an earlier world is never rebuilt. None if no loss could be survived."""
    line = _bearable(membership, holdings, not_after)
    best, most = None, 0
    for generation in holdings.generations():
        if generation > not_after:
            continue
        covered = len(line | _bearable(membership, holdings, generation))
        if covered > most:
            best, most = generation, covered
    return best


def _bearable(membership: Membership, holdings: Holdings, generation: Generation) -> set[int]:
    """Members of which any one may be lost without losing `generation`."""
    world = membership.world_of(generation)
    if world is None:
        return set()
    bearable = {member.index for member in membership.members}
    for group in world.groups:
        # The ranks of a group depend on what is held for it, so nothing else has to be looked at.
        of_group = holdings.of_group(membership, group, generation)
        if not _is_restorable(membership, of_group, group, generation):
            return set()
        bearable -= {
            member
            for member in of_group.members
            if not _is_restorable(membership, of_group.without(member), group, generation)
        }
    return bearable


def _is_restorable(
    membership: Membership, holdings: Holdings, group: tuple[int, ...], generation: Generation
) -> bool:
    """Whether the group's snapshots of `generation` are all held or can be rebuilt."""
    return all(
        (rank, generation) in holdings.snapshots
        or rebuildable(membership, holdings, rank, generation)
        for member in group
        for rank in membership.ranks_of(member)
    )


def _group_survives(
    membership: Membership, holdings: Holdings, group: tuple[int, ...], generation: Generation
) -> bool:
    code = code_of(membership, group)
    missing = {
        rank
        for member in group
        for rank in membership.ranks_of(member)
        if (rank, generation) not in holdings.snapshots
    }
    if code is None or not all(rebuildable(membership, holdings, r, generation) for r in missing):
        return False
    short = {membership.member_of(rank) for rank in missing}
    if len(short) >= code.rows:
        return True
    rest = tuple(member for member in group if member not in short)
    return _has_all_blocks(membership, holdings, group, rest, generation)


def _has_all_blocks(
    membership: Membership,
    holdings: Holdings,
    group: tuple[int, ...],
    owners: tuple[int, ...],
    generation: Generation,
) -> bool:
    """Whether `owners` hold all blocks of the group that are theirs, made from the snapshots held
    now. For a snapshot that is not held, the block's own record counts."""
    code = code_of(membership, group)
    return code is not None and all(
        _parity_of(
            membership, holdings, group, code, BlockId(group.index(owner), row), lane, generation
        )
        is not None
        for owner in owners
        for row in range(code.rows)
        for lane in range(membership.nproc_per_node)
    )


def dead_generations(
    membership: Membership, inventories: Mapping[int, Inventory]
) -> tuple[Generation, ...]:
    """Generations that are held in part, and that some rank will never complete.

    A rank never completes a generation of the current epoch that it has passed without holding or
    writing it. Generations of older epochs are settled by the line, not here.
    """
    passed: dict[int, Generation] = {}
    pending: dict[Generation, set[int]] = {}
    for member, inventory in inventories.items():
        # Of a rank that has another member now, its former node only remembers old saves.
        mine = membership.ranks_of(member)
        passed.update((rank, last) for rank, last in inventory.passed if rank in mine)
        for entry in inventory.snapshots:
            if entry.generation.epoch == membership.epoch:
                pending.setdefault(entry.generation, set()).add(entry.rank)
        for block in inventory.parities:
            if block.generation.epoch == membership.epoch:
                pending.setdefault(block.generation, set())
    for inventory in inventories.values():
        for rank, generation in inventory.writing:
            if generation in pending:
                pending[generation].add(rank)
    return tuple(
        generation
        for generation, ranks in sorted(pending.items(), key=lambda item: item[0])
        if any(rank not in ranks and generation <= last for rank, last in passed.items())
    )


def _parity_of(
    membership: Membership,
    holdings: Holdings,
    group: tuple[int, ...],
    code: Code,
    block: BlockId,
    lane: int,
    generation: Generation,
    *,
    spare: int | None = None,
) -> ParityEntry | None:
    """A block of a lane if it was made from exactly the snapshots that the members hold now.

    A snapshot that is not held is not compared, and neither is the snapshot of position `spare`,
    which the block is to recover.
    """
    parity_lane = membership.parity_lane(lane, block.row)
    entry = holdings.parities.get((group[block.owner], parity_lane, generation))
    if entry is None:
        return None
    ranks = {membership.rank_at(group[p], lane): p for p in code.sources_of(block)}
    if {rank for rank, _ in entry.sources} != ranks.keys():
        return None
    for rank, digest in entry.sources:
        held = holdings.snapshots.get((rank, generation))
        if held is not None and ranks[rank] != spare and held.manifest_digest != digest:
            return None
    return entry
