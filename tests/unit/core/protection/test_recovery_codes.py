"""Lines, protection and survival with codes that are made for more than one loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from holdfast_core.protection.codes import BlockId, code_of
from holdfast_core.protection.recovery import (
    Holdings,
    is_protected,
    newest_survivable,
    rebuild_sources,
    rebuildable,
    recovery_line,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Member, Membership, Redundancy

NOW = Generation(1, 6)
KINDS = [(Redundancy.RAIM5, 1), (Redundancy.RAIM6, 1), (Redundancy.REPLICATION, 2)]
MEMBERS, LANES = 5, 2

Inventories = dict[int, Inventory]


def membership_of(redundancy: Redundancy, replicas: int) -> Membership:
    return Membership(
        job="default.a",
        epoch=1,
        members=tuple(
            Member(index=i, node=f"n{i}", memory_id="", peer_address="", bulk_address="")
            for i in range(MEMBERS)
        ),
        nproc_per_node=LANES,
        groups=(tuple(range(MEMBERS)),),
        redundancy=redundancy,
        replicas=replicas,
    )


def losses_of(membership: Membership) -> int:
    code = code_of(membership, membership.groups[0])
    assert code is not None
    return code.rows


def everything(membership: Membership) -> Inventories:
    """All that the members hold of a protected generation; digests are 100 + the rank."""
    (group,) = membership.groups
    code = code_of(membership, group)
    assert code is not None
    found = {}
    for member in group:
        snapshots = tuple(
            SnapshotEntry(rank=r, generation=NOW, manifest_digest=100 + r, payload_bytes=9)
            for r in membership.ranks_of(member)
        )
        parities = tuple(
            ParityEntry(
                lane=membership.parity_lane(lane, row),
                generation=NOW,
                group=group,
                sources=tuple(
                    (rank, 100 + rank)
                    for position in sorted(code.sources_of(BlockId(member, row)))
                    for rank in [membership.rank_at(position, lane)]
                ),
            )
            for row in range(code.rows)
            for lane in range(LANES)
        )
        found[member] = Inventory(snapshots=snapshots, parities=parities)
    return found


def without(held: Inventories, *gone: int) -> Inventories:
    return {m: Inventory() if m in gone else inventory for m, inventory in held.items()}


@pytest.fixture(params=KINDS, ids=[kind for kind, _ in KINDS])
def membership(request: pytest.FixtureRequest) -> Iterator[Membership]:
    yield membership_of(*request.param)


def test_what_the_code_is_made_for_leaves_a_line_and_one_loss_more_does_not(
    membership: Membership,
) -> None:
    held = everything(membership)
    assert is_protected(membership, Holdings.of(membership, held), NOW)
    for count in range(1, MEMBERS):
        for gone in combinations(range(MEMBERS), count):
            left = without(held, *gone)
            assert (recovery_line(membership, left).generation == NOW) == (
                count <= losses_of(membership)
            )
            assert not is_protected(membership, Holdings.of(membership, left), NOW)


def test_a_generation_is_not_protected_without_any_one_of_the_blocks(
    membership: Membership,
) -> None:
    held = everything(membership)
    for member, inventory in held.items():
        for missing in inventory.parities:
            rest = tuple(entry for entry in inventory.parities if entry is not missing)
            left = {**held, member: replace(inventory, parities=rest)}
            assert not is_protected(membership, Holdings.of(membership, left), NOW)


def test_a_group_that_can_bear_one_more_loss_needs_all_blocks_of_the_rest(
    membership: Membership,
) -> None:
    held = without(everything(membership), 1)
    holdings = Holdings.of(membership, held)
    assert newest_survivable(membership, holdings, not_after=NOW) == NOW
    poorer = {**held, 3: replace(held[3], parities=held[3].parities[:-1])}
    holdings = Holdings.of(membership, poorer)
    # With a single row the group has no more losses to bear, but every block of the rest is needed.
    assert newest_survivable(membership, holdings, not_after=NOW) is None


def test_rebuild_sources_list_what_is_left_and_identify_the_lost_snapshot(
    membership: Membership,
) -> None:
    gone = tuple(range(losses_of(membership)))
    holdings = Holdings.of(membership, without(everything(membership), *gone))
    for rank in (r for member in gone for r in membership.ranks_of(member)):
        found = rebuild_sources(membership, holdings, rank, NOW)
        assert found is not None
        assert found.manifest_digest == 100 + rank
        assert found.positions == set(range(MEMBERS)) - set(gone)
        assert {block.owner for block in found.blocks} == found.positions


def test_blocks_that_disagree_on_what_was_lost_rebuild_nothing(membership: Membership) -> None:
    held = without(everything(membership), 0)
    odd = next(
        m for m, inventory in held.items() if any(_speaks_of_0(e) for e in inventory.parities)
    )
    parities = tuple(
        replace(e, sources=tuple((r, 7 if r == 0 else d) for r, d in e.sources))
        for e in held[odd].parities
    )
    holdings = Holdings.of(membership, {**held, odd: replace(held[odd], parities=parities)})
    assert not rebuildable(membership, holdings, 0, NOW)


def _speaks_of_0(entry: ParityEntry) -> bool:
    return 0 in dict(entry.sources)
