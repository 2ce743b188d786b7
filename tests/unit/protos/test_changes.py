"""A membership by what differs: it arrives as it was meant, or not at all."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_protos import codec, control_pb2
from holdfast_protos.changes import change_between, changed


def member(index: int, node: str) -> Member:
    return Member(
        index=index,
        node=node,
        memory_id=f"memory of {node}",
        peer_address=f"{node}:1",
        bulk_address=f"{node}:2",
        domain="rack",
    )


BASE = Membership(
    job="default.job",
    epoch=3,
    revision=2,
    members=tuple(member(index, f"n{index}") for index in (0, 2, 5, 7)),
    nproc_per_node=2,
    groups=((0, 2), (5, 7)),
)
MOVED = replace(
    BASE, epoch=4, revision=0, members=(*BASE.members[:2], member(5, "spare"), BASE.members[3])
)


def arrive(base: Membership, change: control_pb2.MembershipChange) -> Membership | None:
    whole = changed(codec.membership_to_proto(base), change)
    return None if whole is None else codec.membership_from_proto(whole)


def test_a_new_epoch_of_the_same_places_is_small_and_arrives() -> None:
    following = replace(BASE, epoch=4, revision=0)
    change = change_between(BASE, following)
    assert change is not None and not change.members
    assert arrive(BASE, change) == following


def test_only_the_places_that_differ_are_in_it() -> None:
    change = change_between(BASE, MOVED)
    assert change is not None
    assert [each.index for each in change.members] == [5]
    assert arrive(BASE, change) == MOVED
    assert arrive(MOVED, change_between(MOVED, BASE) or change) == BASE


def test_the_members_and_ranks_that_restart_are_those_of_the_new_epoch_alone() -> None:
    recovered = replace(
        BASE,
        epoch=4,
        revision=0,
        restarting=frozenset({2, 7}),
        restarting_ranks=frozenset({BASE.ranks_of(5).start}),
    )
    again = replace(recovered, epoch=5, restarting=frozenset({0}), restarting_ranks=frozenset())
    for before, after in ((BASE, recovered), (recovered, again), (again, BASE)):
        change = change_between(before, after)
        assert change is not None and not change.members
        assert arrive(before, change) == after


def test_what_differs_in_more_is_sent_whole() -> None:
    fewer = replace(BASE, members=BASE.members[:2], groups=((0, 2),))
    regrouped = replace(BASE, groups=((0, 5), (2, 7)))
    for other in (
        fewer,
        regrouped,
        replace(BASE, nproc_per_node=1),
        replace(BASE, redundancy=Redundancy.NONE),
        replace(BASE, job="default.other"),
    ):
        assert change_between(BASE, other) is None
        assert change_between(other, BASE) is None


def test_it_is_not_applied_to_another_membership_of_the_same_version() -> None:
    change = change_between(BASE, MOVED)
    assert change is not None
    other = replace(BASE, members=(member(0, "elsewhere"), *BASE.members[1:]))
    assert arrive(other, change) is None


def test_the_base_is_left_as_it_is() -> None:
    change = change_between(BASE, MOVED)
    assert change is not None
    base = codec.membership_to_proto(BASE)
    assert changed(base, change) is not None
    assert codec.membership_from_proto(base) == BASE


def test_a_place_that_nobody_has_is_refused() -> None:
    change = change_between(BASE, MOVED)
    assert change is not None
    change.members[0].index = 6
    assert arrive(BASE, change) is None
