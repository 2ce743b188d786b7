from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest

from holdfast_core.errors import InvalidJobError, MemoryBudgetError
from holdfast_core.protection.budget import (
    PARITY_SLOTS,
    NodeMemory,
    fits,
    inherited_ranks,
    parity_block_bytes,
    predict,
    slots_within,
    while_world_changes,
)
from holdfast_core.protection.codes import BlockId, code_for
from holdfast_core.protection.recovery import heir
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PAGE_BYTES
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_core.snapshots.worlds import MemberWorld

MIB = 1024**2


@pytest.mark.parametrize("n", range(2, 7))
@pytest.mark.parametrize("redundancy", [kind for kind in Redundancy if kind != "None"])
def test_a_parity_block_has_room_for_every_chunk_that_the_group_can_give(
    n: int, redundancy: Redundancy
) -> None:
    largest = 40960
    code = code_for(redundancy, n)
    assert code is not None
    for piece_bytes, sizes in product((512, 4096, 65536), ((0, largest), (1, 777, largest))):
        block = parity_block_bytes(largest, code, piece_bytes)
        assert block % PAGE_BYTES == 0
        for payloads in product(sizes, repeat=n):
            sizes_of = dict(enumerate(payloads))
            for owner in range(n):
                assert code.block_bytes(BlockId(owner), sizes_of, piece_bytes) <= block


def test_without_a_group_there_is_no_parity() -> None:
    assert parity_block_bytes(40960, None) == 0
    assert predict([MIB], [], 1, slots=3) == (
        NodeMemory(member=0, arena_bytes=3 * MIB, parity_bytes=0),
    )


def test_each_node_holds_its_ranks_arenas_and_two_blocks_a_lane() -> None:
    slots = [3 * MIB, 2 * MIB, MIB, MIB, 6 * MIB, MIB, MIB, MIB]
    nodes = predict(slots, [(0, 1, 2, 3)], 2, slots=3)
    assert [node.arena_bytes for node in nodes] == [15 * MIB, 6 * MIB, 21 * MIB, 6 * MIB]
    assert {node.parity_bytes for node in nodes} == {2 * PARITY_SLOTS * 2 * MIB}
    assert nodes[2].total_bytes == 29 * MIB
    assert nodes[2].settled_bytes == 25 * MIB
    assert predict(slots, [(0, 1, 2, 3)], 2, slots=2)[2].total_bytes == 22 * MIB


def test_three_slots_are_chosen_where_all_ranks_of_a_node_fit_and_else_two() -> None:
    of_two_ranks = {"slot_bytes": 10, "parity_bytes": 6, "ranks": 2}
    assert slots_within((3, 2), 72, **of_two_ranks) == 3
    assert slots_within((3, 2), 71, **of_two_ranks) == 2
    assert slots_within((3, 2), 1, **of_two_ranks) == 2  # and is refused when it is taken
    assert slots_within((3,), 1, **of_two_ranks) == 3


def test_a_smaller_group_needs_more_parity() -> None:
    nodes = predict([6 * MIB] * 5, [(0, 2, 4), (1, 3)], 1, slots=3)
    assert [node.parity_bytes // MIB for node in nodes] == [6, 12, 6, 12, 6]


@pytest.mark.parametrize("nproc_per_node", [0, 2])
def test_ranks_that_do_not_fill_members_are_refused(nproc_per_node: int) -> None:
    with pytest.raises(InvalidJobError, match=f"3 ranks do not fill members of {nproc_per_node}"):
        predict([1, 1, 1], [], nproc_per_node, slots=3)


@pytest.mark.parametrize("groups", [[(0, 1)], [(0, 1), (1, 2)], [(0, 1, 2, 3)]])
def test_groups_that_do_not_hold_each_member_once_are_refused(
    groups: list[tuple[int, ...]],
) -> None:
    with pytest.raises(InvalidJobError, match="must hold each of the members 0 to 2 once"):
        predict([1, 1, 1], groups, 1, slots=3)


def test_what_fits_exactly_is_accepted() -> None:
    fits(MIB, MIB)


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        fits(3 * 512 * MIB, 1024 * MIB, what="arenas of job a")
    assert str(caught.value).startswith(
        "arenas of job a need 1.50 GiB (1610612736 bytes), but 1.00 GiB (1073741824 bytes) are "
        "available; raise "
    )
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (1610612736, 1073741824)


@pytest.mark.parametrize(
    ("redundancy", "replicas", "of_a_payload"),
    [
        (Redundancy.NONE, 1, 0.0),
        (Redundancy.RAIM5, 1, 1 / 4),
        (Redundancy.RAIM6, 1, 2 / 3),
        (Redundancy.REPLICATION, 1, 1.0),
        (Redundancy.REPLICATION, 3, 3.0),
    ],
)
def test_what_surviving_more_losses_costs(
    redundancy: Redundancy, replicas: int, of_a_payload: float
) -> None:
    slot = 12 * MIB
    nodes = predict([slot] * 5, [range(5)], 1, slots=3, redundancy=redundancy, replicas=replicas)
    assert {node.parity_bytes for node in nodes} == {round(2 * of_a_payload * slot)}


@pytest.mark.parametrize(
    ("redundancy", "payloads"),
    [
        (Redundancy.NONE, 0),
        (Redundancy.RAIM5, 1),
        (Redundancy.RAIM6, 2),
        (Redundancy.REPLICATION, 1),
    ],
)
def test_a_mirror_takes_as_much_as_parity_needs_of_others(
    redundancy: Redundancy, payloads: int
) -> None:
    slot = 12 * MIB
    plain, mirrored = (
        predict([slot] * 10, [range(5)], 2, slots=3, redundancy=redundancy, mirrored=mirrors)[0]
        for mirrors in (False, True)
    )
    assert mirrored.arena_bytes - plain.arena_bytes == 2 * payloads * slot
    assert mirrored.parity_bytes == plain.parity_bytes


@pytest.mark.parametrize("members", range(2, 7))
@pytest.mark.parametrize("nproc", [1, 2, 3, 8])
def test_a_member_inherits_as_many_ranks_as_it_is_dealt(members: int, nproc: int) -> None:
    group = tuple(range(members))
    before = MemberWorld(since=0, members=group, nproc_per_node=nproc, groups=(group,))
    for lost in range(1, members):
        for gone in combinations(group, lost):
            left = tuple(m for m in group if m not in gone)
            membership = Membership(
                job="job",
                epoch=1,
                since=1,
                members=tuple(
                    Member(index=m, node=f"n{m}", memory_id="", peer_address="", bulk_address="")
                    for m in left
                ),
                nproc_per_node=nproc,
                groups=(left,),
                past=(before,),
            )
            ranks = [rank for member in gone for rank in before.ranks_of(member)]
            heirs = Counter(heir(membership, rank, Generation(0, 5)) for rank in ranks)
            assert max(heirs.values()) == inherited_ranks(members, lost, nproc)


def test_a_node_holds_the_arenas_of_both_worlds_and_one_parity_while_its_world_changes() -> None:
    old = NodeMemory(member=0, arena_bytes=30, parity_bytes=20)
    new = NodeMemory(member=0, arena_bytes=40, parity_bytes=12)
    found = while_world_changes(old, new, inherited_bytes=7)
    assert found == NodeMemory(member=0, arena_bytes=77, parity_bytes=20)
    assert while_world_changes(new, old).parity_bytes == 20
