"""Worlds with a protected generation, of which members are lost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from holdfast_core.protection.codes import BlockId, code_of
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Member, Membership, Redundancy


def first_world(*groups: tuple[int, ...], redundancy: Redundancy, lanes: int = 2) -> Membership:
    """Epoch 1 of a job with these parity groups, and `lanes` ranks on each member."""
    return Membership(
        job="default.a",
        epoch=1,
        members=tuple(_place(index) for index in sorted(m for group in groups for m in group)),
        nproc_per_node=lanes,
        groups=groups,
        redundancy=redundancy,
    )


def _place(index: int) -> Member:
    return Member(index=index, node=f"n{index}", memory_id="m", peer_address="", bulk_address="")


def with_members(before: Membership, indices: Collection[int]) -> Membership:
    """The next epoch of `before`, with these members in one parity group."""
    epoch = before.epoch + 1
    return replace(
        before,
        epoch=epoch,
        since=epoch,
        past=(*before.past, before.world),
        members=tuple(_place(index) for index in sorted(indices)),
        groups=(tuple(sorted(indices)),),
    )


def held(membership: Membership, generation: Generation) -> dict[int, Inventory]:
    """Inventories of all members after `generation` was protected in their world."""
    found = {}
    for member in membership.world.members:
        group = membership.group_of(member)
        code = code_of(membership, group)
        assert code is not None
        found[member] = Inventory(
            snapshots=tuple(entry(rank, generation) for rank in membership.ranks_of(member)),
            parities=tuple(
                ParityEntry(
                    lane=membership.parity_lane(lane, row),
                    generation=generation,
                    group=group,
                    sources=tuple(
                        (rank, entry(rank, generation).manifest_digest)
                        for position in code.sources_of(BlockId(group.index(member), row))
                        for rank in [membership.rank_at(group[position], lane)]
                    ),
                )
                for lane in range(membership.nproc_per_node)
                for row in range(code.rows)
            ),
        )
    return found


def entry(rank: int, generation: Generation) -> SnapshotEntry:
    """Snapshot of a rank."""
    digest = 1000 * generation.step + rank
    return SnapshotEntry(
        rank=rank, generation=generation, manifest_digest=digest, payload_bytes=100
    )
