"""Recovery line, protection and retention, as pure functions of the daemons' inventories.

Who calls this: the leader's engine in every daemon, and the simulator's checker. The daemons'
memory is the truth (invariant 6), so nothing here remembers anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.values import (
    Generation,
    Inventory,
    Line,
    Membership,
    ParityEntry,
    Redundancy,
    SnapshotEntry,
)


@dataclass(frozen=True, slots=True)
class Holdings:
    """All inventories of a job, indexed for the questions below."""

    snapshots: Mapping[tuple[int, Generation], SnapshotEntry]
    """(rank, generation) → entry, only where the rank's own member holds it."""
    parities: Mapping[tuple[int, int, Generation], ParityEntry]
    """(owner member, lane, generation) → entry, only for the group the owner is in now."""

    @classmethod
    def of(cls, membership: Membership, inventories: Mapping[int, Inventory]) -> Holdings:
        snapshots: dict[tuple[int, Generation], SnapshotEntry] = {}
        parities: dict[tuple[int, int, Generation], ParityEntry] = {}
        for member, inventory in inventories.items():
            ranks, group = membership.ranks_of(member), membership.group_of(member)
            for entry in inventory.snapshots:
                if entry.rank in ranks:
                    snapshots[entry.rank, entry.generation] = entry
            for block in inventory.parities:
                if block.group == group:
                    parities[member, block.lane, block.generation] = block
        return cls(snapshots, parities)

    def generations(self) -> list[Generation]:
        """All generations of which anything is held, newest first."""
        held = {generation for _, generation in self.snapshots}
        return sorted(held, reverse=True)


def is_complete(membership: Membership, holdings: Holdings, generation: Generation) -> bool:
    """Whether every rank's own daemon holds its snapshot of `generation`."""
    return all((rank, generation) in holdings.snapshots for rank in range(membership.world_size))


def is_protected(membership: Membership, holdings: Holdings, generation: Generation) -> bool:
    """Whether `generation` survives the loss of one node of each parity group."""
    return (
        membership.redundancy is Redundancy.RAIM5
        and is_complete(membership, holdings, generation)
        and all(
            _parity_of(membership, holdings, owner, lane, generation, lost_rank=None) is not None
            for owner in (place.index for place in membership.members)
            for lane in range(membership.nproc_per_node)
        )
    )


def rebuildable(
    membership: Membership, holdings: Holdings, rank: int, generation: Generation
) -> bool:
    """Whether the other members of the rank's parity group, all of which hold their own snapshots,
    can rebuild its snapshot."""
    if membership.redundancy is not Redundancy.RAIM5:
        return False
    member, lane = membership.member_of(rank), membership.lane_of(rank)
    others = [m for m in membership.group_of(member) if m != member]
    if any((membership.rank_at(m, lane), generation) not in holdings.snapshots for m in others):
        return False
    blocks = [
        _parity_of(membership, holdings, owner, lane, generation, lost_rank=rank)
        for owner in others
    ]
    if any(block is None for block in blocks):
        return False
    lost_digests = {dict(b.sources).get(rank) for b in blocks if b is not None}
    return len(lost_digests) == 1 and None not in lost_digests


def recovery_line(membership: Membership, inventories: Mapping[int, Inventory]) -> Line:
    """The newest generation that every rank can be restored from.

    `inventories` has one entry for each member; a member on a fresh node has an empty one.
    """
    holdings = Holdings.of(membership, inventories)
    rejected: list[str] = []
    for generation in holdings.generations():
        missing = [
            rank
            for rank in range(membership.world_size)
            if (rank, generation) not in holdings.snapshots
        ]
        lost = [rank for rank in missing if not rebuildable(membership, holdings, rank, generation)]
        if not lost:
            how = f"ranks {missing} from parity" if missing else "all ranks in local memory"
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
    """The newest generation, at most `not_after`, that every rank can be restored from and still
    could be after the loss of one node of each parity group that has lost none."""
    return next(
        (
            generation
            for generation in holdings.generations()
            if generation <= not_after
            and all(
                _group_survives(membership, holdings, group, generation)
                for group in membership.groups
            )
        ),
        None,
    )


def _group_survives(
    membership: Membership, holdings: Holdings, group: tuple[int, ...], generation: Generation
) -> bool:
    missing = [
        rank
        for member in group
        for rank in membership.ranks_of(member)
        if (rank, generation) not in holdings.snapshots
    ]
    if missing:
        return all(rebuildable(membership, holdings, rank, generation) for rank in missing)
    return membership.redundancy is Redundancy.RAIM5 and all(
        _parity_of(membership, holdings, owner, lane, generation, lost_rank=None) is not None
        for owner in group
        for lane in range(membership.nproc_per_node)
    )


def newest_complete(membership: Membership, holdings: Holdings) -> Generation | None:
    """The newest generation that every rank's own daemon holds."""
    return next((g for g in holdings.generations() if is_complete(membership, holdings, g)), None)


def dead_generations(
    membership: Membership, inventories: Mapping[int, Inventory]
) -> tuple[Generation, ...]:
    """Generations of which something is held but that some rank will never complete.

    A rank never completes a generation of the current epoch that it has passed without holding or
    writing it. Generations of older epochs are settled by the line, not here.
    """
    passed: dict[int, Generation] = {}
    pending: dict[Generation, set[int]] = {}
    for inventory in inventories.values():
        passed.update(inventory.passed)
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


def kept_after_line(line: Line, protected: Generation | None) -> frozenset[Generation]:
    """What a daemon keeps when an epoch's line is decided: the line, and the newest protected
    generation before it, which stays until something newer is protected (invariant 2)."""
    return frozenset(g for g in (line.generation, protected) if g is not None)


def _parity_of(
    membership: Membership,
    holdings: Holdings,
    owner: int,
    lane: int,
    generation: Generation,
    *,
    lost_rank: int | None,
) -> ParityEntry | None:
    """The owner's block if it was made from exactly the snapshots that the members hold now.

    `lost_rank` need not be held: it is what the block is to recover.
    """
    block = holdings.parities.get((owner, lane, generation))
    if block is None:
        return None
    expected = {membership.rank_at(m, lane) for m in block.group if m != owner}
    if {rank for rank, _ in block.sources} != expected:
        return None
    for rank, digest in block.sources:
        if rank == lost_rank:
            continue
        entry = holdings.snapshots.get((rank, generation))
        if entry is None or entry.manifest_digest != digest:
            return None
    return block
