"""Prediction of the memory that a job's snapshots take on each node, before anything is allocated.

Invariant 5: memory is bounded and known beforehand. The daemon allocates by these numbers, and
`holdfast plan` shows them. Small files beside the snapshots (layouts, manifests) are not counted;
they are far below the 2 % that a prediction may be off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError, MemoryBudgetError
from holdfast_core.protection.codes import Code, code_for
from holdfast_core.protection.mirrors import mirror_bytes_max
from holdfast_core.quantities import format_bytes
from holdfast_core.snapshots.layouts import PAGE_BYTES, PIECE_BYTES, SLOTS_MAX, SLOTS_MIN, round_up
from holdfast_core.snapshots.membership import Redundancy

PARITY_SLOTS = 2
"""Parity blocks of a parity lane: one protects the newest protected generation while the other is
built. Room is reserved for both; the one that protects nothing has no memory until it is built."""

SLOTS_AUTO = (SLOTS_MAX, SLOTS_MIN)
"""Numbers of slots to try where the job leaves the choice to its memory: first the one with fewer
skipped saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMemory:
    """Bytes that one job takes on one member's node."""

    member: int
    arena_bytes: int
    parity_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes to reserve: what the node holds while every lane's parity is being built."""
        return self.arena_bytes + self.parity_bytes

    @property
    def settled_bytes(self) -> int:
        """Bytes that the node holds while no parity is being built."""
        return self.arena_bytes + self.parity_bytes // PARITY_SLOTS


def parity_block_bytes(
    largest_slot_bytes: int, code: Code | None, piece_bytes: int = PIECE_BYTES
) -> int:
    """Bytes to reserve for one parity block, in whole pages; 0 for a member without a group.

    Enough for whatever the members of the group capture: no payload is longer than its slot, and a
    block is as long as the longest chunk in it (`Code.block_bytes`). A member has one for each lane
    and row of the code, twice (`PARITY_SLOTS`).

    Args:
        largest_slot_bytes: the largest slot of all ranks of the job.
        code: the code of the member's parity group; None without redundancy.
    """
    if code is None:
        return 0
    return round_up(code.chunk_bytes(largest_slot_bytes, piece_bytes), PAGE_BYTES)


def predict(
    slot_bytes_by_rank: Sequence[int],
    groups: Sequence[Sequence[int]],
    nproc_per_node: int,
    *,
    slots: int,
    redundancy: Redundancy = Redundancy.RAIM5,
    replicas: int = 1,
    piece_bytes: int = PIECE_BYTES,
    mirrored: bool = False,
) -> tuple[NodeMemory, ...]:
    """The memory that a job takes on each member's node, by member.

    Args:
        slot_bytes_by_rank: `Layout.slot_bytes` of each rank; ranks follow members.
        groups: parity groups of member indices 0, 1, …; none at all without redundancy.
        nproc_per_node: ranks, and so lanes, of each member.
        slots: number of slots of each rank.
        redundancy, replicas: how the members of a group protect each other.
        mirrored: whether ranks mirror replicas; counted as if they held all that parity needs.

    Raises:
        InvalidJobError: when the ranks do not fill whole members, or the groups do not hold each
            member once.
    """
    if nproc_per_node < 1 or len(slot_bytes_by_rank) % nproc_per_node:
        raise InvalidJobError(
            f"{len(slot_bytes_by_rank)} ranks do not fill members of {nproc_per_node} ranks each"
        )
    members = range(len(slot_bytes_by_rank) // nproc_per_node)
    size_of = {member: len(group) for group in groups for member in group}
    if groups and sorted(m for group in groups for m in group) != list(members):
        raise InvalidJobError(
            f"parity groups {[list(group) for group in groups]} must hold each of the members 0 to "
            f"{len(members) - 1} once"
        )
    largest = max(slot_bytes_by_rank, default=0)
    return tuple(
        NodeMemory(
            member=member,
            arena_bytes=slots * sum(slot_bytes_by_rank[rank] for rank in ranks)
            + nproc_per_node * (mirror_bytes_max(code, largest, piece_bytes) if mirrored else 0),
            parity_bytes=nproc_per_node
            * PARITY_SLOTS
            * (code.rows if code else 0)
            * parity_block_bytes(largest, code, piece_bytes),
        )
        for member in members
        for code in [code_for(redundancy, size_of.get(member, 1), replicas)]
        for ranks in [range(member * nproc_per_node, (member + 1) * nproc_per_node)]
    )


def inherited_ranks(group_members: int, lost: int, nproc_per_node: int) -> int:
    """The most ranks of lost members whose snapshots one member rebuilds.

    The members that are left of a parity group rebuild, between them, one snapshot of each rank of
    the members that it has lost.

    Args:
        group_members: members of the group before the loss.
        lost: members of the group that are lost, fewer than all.
    """
    return -(-lost * nproc_per_node // (group_members - lost))


def while_world_changes(
    before: NodeMemory, after: NodeMemory, *, inherited_bytes: int = 0
) -> NodeMemory:
    """The most that a member's node holds from the change of the world until a generation of the
    new one is protected.

    The old arenas hold the recovery line until then, while ranks write to the new ones, which are
    larger where fewer ranks share the state. Parity blocks are the same for both, and grow.

    Args:
        before, after: its memory in the old world and in the new one.
        inherited_bytes: the slots of snapshots that it rebuilds for members that are gone.
    """
    return NodeMemory(
        member=after.member,
        arena_bytes=before.arena_bytes + after.arena_bytes + inherited_bytes,
        parity_bytes=max(before.parity_bytes, after.parity_bytes),
    )


def slots_within(
    choices: Sequence[int], room_bytes: int, *, slot_bytes: int, parity_bytes: int, ranks: int
) -> int:
    """The first of `choices` with which all ranks of a node fit, or else the last.

    Every rank of a job chooses by the same figures, so that those of equal nodes choose alike.

    Args:
        choices: numbers of slots, best first.
        room_bytes: memory that the job may take on the node.
        slot_bytes: the largest slot of any rank.
        parity_bytes: bytes of one rank's parity blocks.
        ranks: ranks of the node.
    """
    return next(
        (slots for slots in choices if ranks * (slots * slot_bytes + parity_bytes) <= room_bytes),
        choices[-1],
    )


def fits(needed_bytes: int, available_bytes: int, *, what: str = "snapshots in memory") -> None:
    """Refuse what would not fit, before anything is allocated.

    Raises:
        MemoryBudgetError: when more is needed than available, with both numbers.
    """
    if needed_bytes > available_bytes:
        raise MemoryBudgetError(
            f"{what} need {format_bytes(needed_bytes)}, but {format_bytes(available_bytes)} are "
            f"available; raise the daemon's budget or spec.snapshot.memoryPerNode, or spread the "
            f"state over more ranks",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )
