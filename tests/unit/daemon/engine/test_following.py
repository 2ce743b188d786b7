"""Workers that stay when their world changes: which ones there are, which node can keep its own,
and whether they have arrived in the new world."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from member_engines import engine_of, membership_of

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.errors import (
    InvalidJobError,
    RankInUseError,
    StaleEpochError,
    UnreachableError,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout, encode_layout
from holdfast_core.snapshots.membership import Membership
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.answers import WorldState
from holdfast_daemon.engine.effects import Effect, Note, SendDirective

MEMBERSHIP = replace(membership_of((0, 1, 2)), nproc_per_node=2)
RANKS = (2, 3)
"""Ranks of the member under test, member 1."""
LAYOUTS = {
    rank: encode_layout(
        Layout(
            rank=rank,
            world_size=6,
            topology="raw",
            entries=(),
            extras_offset=0,
            extras_capacity=64,
        )
    )
    for rank in RANKS
}


def member(membership: Membership = MEMBERSHIP) -> JobEngine:
    return engine_of(membership, 1)


def world(engine: JobEngine) -> WorldState:
    found = engine.world_state(0)
    assert found is not None
    return found


def follow_all(engine: JobEngine) -> dict[int, int]:
    """Rank → number of its stream."""
    return {rank: engine.follows(rank, 100 + rank) for rank in RANKS}


def begin(engine: JobEngine, epoch: int, *restarting: int, ranks: Iterable[int] = ()) -> None:
    following = replace(
        MEMBERSHIP,
        epoch=epoch,
        restarting=frozenset(restarting),
        restarting_ranks=frozenset(ranks),
    )
    engine.set_membership(following, 0.0)


def moved_away(epoch: int) -> Membership:
    first, second, third = MEMBERSHIP.members
    return replace(MEMBERSHIP, epoch=epoch, members=(first, replace(second, node="n9"), third))


def follows(engine: JobEngine) -> list[bool]:
    return [rank.follows for rank in engine.overview().ranks]


def test_workers_can_be_kept_once_all_ranks_of_the_node_follow() -> None:
    engine = member()
    assert not world(engine).keep and follows(engine) == [False, False]
    engine.follows(2, 102)
    assert not world(engine).keep and follows(engine) == [True, False]
    engine.follows(3, 103)
    assert world(engine).keep and follows(engine) == [True, True]


def test_those_who_follow_still_do_in_the_next_epoch() -> None:
    engine = member()
    follow_all(engine)
    begin(engine, 2, 0)
    assert world(engine).epoch == 2 and world(engine).keep


def test_a_member_that_is_to_be_restarted_keeps_no_worker_in_that_epoch_only() -> None:
    engine = member()
    follow_all(engine)
    begin(engine, 2, 1, 2)
    assert not world(engine).keep
    begin(engine, 3)
    assert world(engine).keep


def test_a_lane_is_kept_where_its_own_worker_follows_and_nothing_of_it_restarts() -> None:
    """Enumerated: which workers follow, which ranks restart, and whether the member does."""
    subsets = [set(part) for n in range(3) for part in itertools.combinations(RANKS, n)]
    for following, ranks, whole in itertools.product(subsets, subsets, (False, True)):
        engine = member()
        for rank in following:
            engine.follows(rank, 100 + rank)
        assert engine.following_lanes == sorted(rank - RANKS[0] for rank in following)
        begin(engine, 2, *([1] if whole else []), ranks=ranks)
        kept = set() if whole else following - ranks
        assert world(engine).kept == {rank - RANKS[0] for rank in kept}
        assert world(engine).keep == (kept == set(RANKS))
        begin(engine, 3)
        assert world(engine).kept == {rank - RANKS[0] for rank in following}


def test_a_stream_that_ended_leaves_nothing_to_keep() -> None:
    engine = member()
    streams = follow_all(engine)
    engine.unfollows(3, streams[3])
    assert not world(engine).keep and follows(engine) == [True, False]


def test_the_end_of_a_replaced_stream_does_not_end_the_newer_one() -> None:
    engine = member()
    streams = follow_all(engine)
    newer = engine.follows(3, 203)
    with pytest.raises(RankInUseError, match="process 203 follows the worlds of rank 3"):
        engine.followed_world(3, streams[3])
    engine.unfollows(3, streams[3])
    assert world(engine).keep
    assert engine.followed_world(3, newer) == engine.world_state(0)
    engine.unfollows(3, newer)
    assert not world(engine).keep


def test_a_rank_of_another_node_cannot_follow_here() -> None:
    engine = member()
    with pytest.raises(InvalidJobError, match="rank 1 is not on node n1"):
        engine.follows(1, 101)


def test_a_stream_ends_when_its_rank_no_longer_lives_here() -> None:
    engine = member()
    streams = follow_all(engine)
    engine.set_membership(moved_away(epoch=2), 0.0)
    with pytest.raises(UnreachableError):
        engine.followed_world(2, streams[2])
    with pytest.raises(UnreachableError):
        engine.follows(2, 102)


def test_a_fenced_daemon_has_no_world_to_follow_until_it_learns_the_next() -> None:
    engine = member()
    streams = follow_all(engine)
    engine.on_peer_epoch(2, 0.0)
    assert engine.followed_world(2, streams[2]) is None
    begin(engine, 2)
    following = engine.followed_world(2, streams[2])
    assert following is not None and following.epoch == 2


def test_ranks_have_arrived_once_all_have_greeted_the_daemon_from_the_new_world() -> None:
    engine = member()
    engine.publish_store(1, "a:1", 0.0)
    assert not world(engine).arrived
    engine.hello(2, "a:1")
    assert not world(engine).arrived and world(engine).arrived_lanes == {0}
    engine.hello(3, "a:1")
    assert world(engine).arrived
    begin(engine, 2)
    assert not world(engine).arrived


def test_the_key_of_a_store_comes_and_goes_with_its_address() -> None:
    leading = engine_of(MEMBERSHIP, 0)
    told = [
        effect.directive
        for effect in leading.publish_store(1, "a:1", 0.0, "the-key")
        if isinstance(effect, SendDirective)
    ]
    assert {(each.rendezvous, each.store_key) for each in told} == {("a:1", "the-key")}
    assert "the-key" not in repr(told), "nothing logs a key"
    engine = member()
    engine.on_directive(told[0], 0.0)
    assert (world(engine).store_address, world(engine).store_key) == ("a:1", "the-key")
    engine.on_directive(replace(told[0], rendezvous="", store_key=""), 0.0)
    assert (world(engine).store_address, world(engine).store_key) == ("a:1", "the-key")
    begin(engine, 2)
    assert (world(engine).store_address, world(engine).store_key) == ("", "")
    engine.publish_store(2, "a:2", 0.0)
    assert (world(engine).store_address, world(engine).store_key) == ("a:2", "")


def has_stayed(engine: JobEngine, rank: int, epoch: int, pid: int) -> bool:
    """Begin a session and end it; return whether its process is noted as one that has stayed."""
    session, _ = engine.open(
        rank=rank, epoch=epoch, layout=LAYOUTS[rank], largest_slot_bytes=4096, pid=pid, now=0.0
    )
    (note,) = noted(engine.claimed(session, 0.0), JobEvent.SESSION_OPENED)
    engine.session_ended(session, clean=True, now=0.0)
    assert note.rank == rank
    return note.stayed


def noted(effects: Sequence[Effect], event: JobEvent) -> list[Note]:
    return [one for one in effects if isinstance(one, Note) and one.event is event]


def test_a_session_shows_whether_its_process_has_stayed() -> None:
    engine = member()
    follow_all(engine)
    assert not any(has_stayed(engine, rank, 1, 100 + rank) for rank in RANKS)
    begin(engine, 2)
    engine.follows(3, 203)
    assert has_stayed(engine, 2, 2, 102) and not has_stayed(engine, 3, 2, 203)
    begin(engine, 3)
    assert has_stayed(engine, 3, 3, 203) and not has_stayed(engine, 2, 3, 302)


def test_the_first_rank_that_goes_on_live_in_an_epoch_is_noted() -> None:
    engine = member()
    for epoch in (1, 2):
        begin(engine, epoch)
        (note,) = noted(engine.went_live(2, epoch, 7, None, 0.0), JobEvent.WENT_LIVE)
        assert (note.rank, note.generation) == (2, Generation(epoch, 7))
        assert noted(engine.went_live(3, epoch, 7, None, 0.0), JobEvent.WENT_LIVE) == []


def test_a_greeting_from_a_world_that_has_ended_is_no_arrival() -> None:
    engine = member()
    engine.publish_store(1, "a:1", 0.0)
    begin(engine, 2)
    for rank in RANKS:  # the new store is not known yet, so these could not be refused
        engine.hello(rank, "a:1")
    assert not world(engine).arrived
    engine.publish_store(2, "a:2", 0.0)
    with pytest.raises(StaleEpochError):
        engine.hello(2, "a:1")
    assert not world(engine).arrived
    for rank in RANKS:
        engine.hello(rank, "a:2")
    assert world(engine).arrived


def test_a_worker_without_a_store_has_arrived_when_it_greets() -> None:
    engine = member()
    for rank in RANKS:
        engine.hello(rank, "")
    assert world(engine).arrived


def test_a_session_of_the_epoch_shows_arrival_to_a_daemon_that_restarted() -> None:
    engine = member()
    for rank in RANKS:
        assert not world(engine).arrived
        engine.open(
            rank=rank, epoch=1, layout=LAYOUTS[rank], largest_slot_bytes=4096, pid=rank, now=0.0
        )
    assert world(engine).arrived


def begun_alone() -> JobEngine:
    """A member whose ranks have begun from the beginning, and hold what nobody else has."""
    engine = member()
    follow_all(engine)
    for rank in RANKS:
        engine.begins_alone(rank)
    return engine


def protect(engine: JobEngine, epoch: int) -> None:
    """Let the leader announce a generation that is kept."""
    assert engine.memory.directive is not None
    engine.memory.direct(replace(engine.memory.directive, retained=Generation(epoch, 1)))


def test_where_nothing_is_protected_or_held_elsewhere_there_is_nothing_to_keep() -> None:
    engine = begun_alone()
    assert follows(engine) == [False, False]
    begin(engine, 2, 0)
    assert not world(engine).keep


def test_what_was_protected_in_an_earlier_epoch_is_worth_staying_for() -> None:
    engine = begun_alone()
    protect(engine, 1)
    assert follows(engine) == [True, True]
    begin(engine, 2, 0)
    assert world(engine).keep
    begin(engine, 3, 0)  # nothing new is known to be protected
    assert world(engine).keep


def test_a_rank_whose_state_others_hold_stays_beside_one_whose_state_nobody_holds() -> None:
    engine = member()
    follow_all(engine)
    engine.begins_alone(2)
    assert follows(engine) == [False, True]
    assert world(engine).kept == {1}


@pytest.mark.parametrize("held_beside", [False, True])
def test_where_only_ranks_are_lost_the_state_of_a_neighbour_is_enough(held_beside: bool) -> None:
    """As in a member whose ranks are replicas of each other, before anything is protected."""
    for restarting, kept in (((), held_beside), ((0,), False)):
        engine = member()
        follow_all(engine)
        for rank in RANKS:
            engine.begins_alone(rank, held_beside=held_beside)
        begin(engine, 2, *restarting, ranks=[] if restarting else [0])
        assert world(engine).keep == kept, "the ranks of member 0 have nothing else in common"


def test_where_members_have_left_the_state_of_a_neighbour_is_not_enough() -> None:
    engine = member()
    follow_all(engine)
    for rank in RANKS:
        engine.begins_alone(rank, held_beside=True)
    fewer = replace(MEMBERSHIP, epoch=2, members=MEMBERSHIP.members[1:], groups=((1, 2),), since=2)
    engine.set_membership(fewer, 0.0)
    assert not world(engine).kept


def test_a_new_process_can_stay_until_it_has_begun() -> None:
    engine = begun_alone()
    for rank in RANKS:
        engine.follows(rank, 200 + rank)
    begin(engine, 2, 0)
    assert world(engine).keep


def test_a_stream_that_is_opened_again_changes_nothing_for_its_process() -> None:
    engine = begun_alone()
    follow_all(engine)
    assert not world(engine).keep
