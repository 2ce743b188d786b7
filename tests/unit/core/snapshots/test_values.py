from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_core.snapshots.reports import MemberReport


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


def test_ranks_follow_the_order_of_members_not_their_indices() -> None:
    assert MEMBERSHIP.world_size == 8
    assert MEMBERSHIP.leader == 1
    assert [MEMBERSHIP.position(m) for m in (1, 4, 6, 7)] == [0, 1, 2, 3]
    assert list(MEMBERSHIP.ranks_of(6)) == [4, 5]
    for rank in range(8):
        member, lane = MEMBERSHIP.member_of(rank), MEMBERSHIP.lane_of(rank)
        assert rank in MEMBERSHIP.ranks_of(member)
        assert MEMBERSHIP.rank_at(member, lane) == rank


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
