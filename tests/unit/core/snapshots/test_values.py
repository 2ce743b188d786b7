from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.membership import PAST_WORLDS_MAX, Member, Membership, known_worlds
from holdfast_core.snapshots.reports import MemberReport
from holdfast_core.snapshots.worlds import MemberWorld


def place(index: int) -> Member:
    return Member(
        index=index,
        node=f"node-{index}",
        memory_id=f"memory-{index}",
        peer_address="127.0.0.1:1",
        bulk_address="127.0.0.1:2",
    )


MEMBERSHIP = Membership(
    job="default.a",
    epoch=3,
    members=(place(1), place(4), place(6), place(7)),
    nproc_per_node=2,
    groups=((1, 6), (4, 7)),
)


def test_generations_are_ordered_by_epoch_then_step() -> None:
    ordered = [Generation(1, 9), Generation(2, 1), Generation(2, 10), Generation(10, 0)]
    backwards = ordered[::-1]
    assert sorted(backwards) == ordered
    assert all(a < b for a, b in pairwise(ordered))


def test_text_leads_back_to_the_generation() -> None:
    assert str(Generation(12, 345)) == "12.345"
    assert Generation.parse("12.345") == Generation(12, 345)


def test_ranks_keep_their_numbers_where_members_are_missing() -> None:
    assert MEMBERSHIP.world_size == 8
    assert MEMBERSHIP.leader == 1
    assert [MEMBERSHIP.position(m) for m in (1, 4, 6, 7)] == [0, 1, 2, 3]
    assert list(MEMBERSHIP.world.ranks) == [2, 3, 8, 9, 12, 13, 14, 15]
    for world_rank, rank in enumerate(MEMBERSHIP.world.ranks):
        member, lane = MEMBERSHIP.member_of(rank), MEMBERSHIP.lane_of(rank)
        assert rank in MEMBERSHIP.ranks_of(member)
        assert MEMBERSHIP.rank_at(member, lane) == rank
        assert MEMBERSHIP.world.world_rank(rank) == world_rank
        assert MEMBERSHIP.world.rank_of(world_rank) == rank
    with pytest.raises(ValueError, match="5 is not a member"):
        MEMBERSHIP.position(5)


def test_a_generation_belongs_to_the_world_of_its_epoch() -> None:
    first = MemberWorld(
        since=0, members=(1, 4, 5, 6, 7), nproc_per_node=2, groups=((1, 4, 5, 6, 7),)
    )
    changed = replace(MEMBERSHIP, epoch=9, since=8, past=(first, replace(first, since=5)))
    assert changed.world_of(Generation(4, 90)) == first
    assert changed.world_of(Generation(7, 1)) == replace(first, since=5)
    assert changed.world_of(Generation(8, 1)) == changed.world
    assert not changed.is_present(Generation(7, 99))
    assert changed.is_present(Generation(8, 0))
    later = replace(changed, past=(replace(first, since=5),))
    assert later.world_of(Generation(4, 90)) is None


def test_the_world_that_is_needed_stays_known_and_those_behind_it_are_forgotten() -> None:
    worlds = [replace(MEMBERSHIP.world, since=since) for since in range(10, 20)]
    assert [world.since for world in known_worlds(worlds, None)] == [*range(12, 20)]
    assert known_worlds(worlds[:PAST_WORLDS_MAX], None) == tuple(worlds[:PAST_WORLDS_MAX])
    assert known_worlds(worlds, worlds[-1])[0].until == 0
    known = known_worlds(worlds, worlds[0])
    assert [(world.since, world.until) for world in known] == [
        (10, 11),
        *((since, 0) for since in range(13, 20)),
    ]
    again = known_worlds([*known, replace(worlds[0], since=20)], worlds[0])
    assert [world.since for world in again] == [10, *range(14, 21)] and again[0].until == 11
    membership = replace(MEMBERSHIP, epoch=21, since=20, past=known)
    assert membership.world_of(Generation(10, 90)) == known[0]
    for epoch in (11, 12):
        assert membership.world_of(Generation(epoch, 90)) is None
    assert membership.world_of(Generation(13, 1)) == known[1]
    for until in (10, 14):
        with pytest.raises(InvalidJobError, match=f"since epoch 10 cannot end in epoch {until}"):
            replace(membership, past=(replace(known[0], until=until), *known[1:]))


@pytest.mark.parametrize(("since", "past"), [(10, ()), (8, (8,)), (8, (5, 4)), (9, (9, 3))])
def test_worlds_that_do_not_follow_each_other_are_refused(
    since: int, past: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidJobError, match="must follow each other"):
        replace(
            MEMBERSHIP,
            epoch=9,
            since=since,
            past=tuple(replace(MEMBERSHIP.world, since=begun) for begun in past),
        )


def test_torch_may_count_members_in_an_order_of_its_own() -> None:
    turned = replace(MEMBERSHIP, order=(6, 1, 7, 4))
    world = turned.world
    assert [turned.position(member) for member in (1, 4, 6, 7)] == [1, 3, 0, 2]
    assert [world.world_rank(rank) for rank in (12, 13, 2, 8)] == [0, 1, 2, 6]
    assert [world.rank_of(number) for number in range(8)] == [12, 13, 2, 3, 14, 15, 8, 9]
    assert turned.member(7).node == "node-7" and turned.leader == 1
    with pytest.raises(InvalidJobError, match="must hold each member"):
        replace(MEMBERSHIP, order=(6, 1, 7))


def test_members_are_found_by_node_and_groups_by_member() -> None:
    assert MEMBERSHIP.member_on("node-4") == 4
    assert MEMBERSHIP.member_on("spare") is None
    assert MEMBERSHIP.member(7).node == "node-7"
    assert MEMBERSHIP.group_of(6) == (1, 6)


@pytest.mark.parametrize("members", [(), (place(1), place(1)), (place(4), place(1))])
def test_members_that_are_not_unique_and_ascending_are_refused(
    members: tuple[Member, ...],
) -> None:
    with pytest.raises(InvalidJobError, match="must be unique and ascending"):
        replace(MEMBERSHIP, members=members)


@pytest.mark.parametrize("groups", [(), ((1, 4),), ((1, 4), (4, 6, 7)), ((1, 4, 6, 7, 8),)])
def test_groups_that_do_not_hold_each_member_once_are_refused(
    groups: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(InvalidJobError, match="must hold each member of"):
        replace(MEMBERSHIP, groups=groups)


def test_reports_are_ordered_by_incarnation_then_sequence() -> None:
    report = MemberReport(
        job="default.a",
        epoch=3,
        member=1,
        incarnation=1,
        sequence=100,
        verified=True,
        inventory=Inventory(),
    )
    assert report.order < replace(report, incarnation=2, sequence=0).order
    assert report.order < replace(report, sequence=101).order


def test_lines_are_the_same_decision_whatever_their_reason() -> None:
    assert Line(generation=None, reason="a") == Line(generation=None, reason="b")
    assert Line(generation=Generation(1, 1), reason="a") != Line(generation=None, reason="a")
