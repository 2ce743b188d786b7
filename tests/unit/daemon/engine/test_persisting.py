"""What the engine does about persisting, one decision at a time; the simulation has the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_core.durable.schedule import PATIENCE_S
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, encode_layout
from holdfast_core.snapshots.manifests import Inventory, Manifest, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Member, Membership, Tier
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.snapshots.stored import PersistOrder, RankFile
from holdfast_daemon.engine import persist_leader, persisting
from holdfast_daemon.engine.effects import (
    CommitSet,
    PersistRank,
    RankPersisted,
    SetCommitted,
    StopPersisting,
)
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.slots import ArenaView, Slot, SlotState
from holdfast_daemon.engine.state import JobMemory

OLD, NEW = Generation(1, 10), Generation(1, 20)
ORDER = PersistOrder(number=1, ended=False, generation=NEW)
MEMBERSHIP = Membership(
    job="job",
    epoch=1,
    members=tuple(
        Member(index=i, node=n, memory_id=n, peer_address=n, bulk_address=n)
        for i, n in enumerate("ab")
    ),
    nproc_per_node=1,
    groups=((0, 1),),
    tier=Tier(uri="file:///tier", every_steps=5),
)


def file_of(rank: int) -> RankFile:
    return RankFile(
        rank=rank,
        file=f"rank-{rank:05d}.safetensors",
        bytes=10,
        header_bytes=2,
        header_xxh3=rank,
        payload_bytes=8,
        layout_id="l",
        manifest_digest=rank,
    )


def report(
    member: int, *generations: Generation, protected: bool = True, window: bool = False
) -> MemberReport:
    snapshots = tuple(
        SnapshotEntry(
            rank=member, generation=g, manifest_digest=member, payload_bytes=8, window=window
        )
        for g in generations
    )
    other = 1 - member
    parities = tuple(
        ParityEntry(lane=0, generation=g, group=(0, 1), sources=((other, other),))
        for g in generations
    )
    return MemberReport(
        job="job",
        epoch=1,
        member=member,
        incarnation=1,
        sequence=1,
        verified=True,
        inventory=Inventory(snapshots=snapshots, parities=parities if protected else ()),
    )


@pytest.fixture
def memory() -> JobMemory:
    """The leader's, in a job whose members all have NEW."""
    found = JobMemory(job="job", node="a", memory_id="a", incarnation=1)
    found.begin_epoch(MEMBERSHIP)
    line = Line(generation=None, reason="fresh")
    found.direct(Directive(job="job", epoch=1, line=line, protected=NEW, retained=NEW))
    found.reports = {member: report(member, NEW) for member in (0, 1)}
    found.persist.watched_since = 0.0
    return found


def epoch_of(memory: JobMemory) -> Epoch:
    """The current one."""
    assert memory.current is not None
    return memory.current


def lead(memory: JobMemory, now: float = 1.0) -> Directive:
    return memory.direct(persist_leader.lead(memory, epoch_of(memory), now)).directive


def answer(memory: JobMemory, member: int, failure: str = "") -> None:
    memory.reports[member] = replace(
        memory.reports[member],
        persist=epoch_of(memory).directive.persist,
        persisted=() if failure else (file_of(member),),
        persist_failure=failure,
    )


def test_the_newest_protected_generation_is_ordered_when_it_is_due(memory: JobMemory) -> None:
    assert lead(memory).persist == ORDER
    assert lead(memory).persist == ORDER


def test_in_place_of_a_window_a_snapshot_of_one_step_is_wanted_and_then_ordered(
    memory: JobMemory,
) -> None:
    memory.reports = {member: report(member, NEW, window=True) for member in (0, 1)}
    assert (lead(memory).persist, lead(memory).whole_after) == (None, NEW)
    assert not persist_leader.is_due_soon(memory, 1.0)
    later, whole = Generation(1, 24), Generation(1, 25)
    memory.reports = {member: report(member, later, window=True) for member in (0, 1)}
    assert (lead(memory).persist, lead(memory).whole_after) == (None, later)
    memory.reports = {member: report(member, whole) for member in (0, 1)}
    directive = lead(memory)
    assert directive.persist == replace(ORDER, generation=whole)
    assert directive.whole_after == later
    assert persist_leader.is_due_soon(memory, 1.0)


def test_nothing_is_wanted_of_trainers_while_no_set_is_due(memory: JobMemory) -> None:
    memory.revise(replace(MEMBERSHIP, tier=Tier(uri="file:///tier", every_steps=21)))
    memory.reports = {member: report(member, NEW, window=True) for member in (0, 1)}
    assert lead(memory).whole_after is None


def test_what_is_not_due_or_not_whole_is_not_ordered(memory: JobMemory) -> None:
    memory.revise(replace(MEMBERSHIP, tier=Tier(uri="file:///tier", every_steps=21)))
    assert lead(memory).persist is None
    memory.revise(MEMBERSHIP)
    memory.reports[1] = report(1, OLD)
    assert lead(memory).persist is None


def test_what_lost_its_redundancy_is_ordered_at_once(memory: JobMemory) -> None:
    memory.revise(replace(MEMBERSHIP, tier=Tier(uri="file:///tier", every_steps=99)))
    memory.reports[1] = report(1, NEW, protected=False)
    assert lead(memory).persist == ORDER
    assert memory.out[-1].detail == "redundancy is lost"  # type: ignore[union-attr]


def test_what_came_from_storage_is_not_lost_while_it_has_no_redundancy_yet(
    memory: JobMemory,
) -> None:
    memory.revise(replace(MEMBERSHIP, tier=Tier(uri="file:///tier", every_steps=99)))
    line = Line(generation=OLD, reason="from storage")
    directive = Directive(job="job", epoch=1, line=line, persisted=OLD, retained=OLD)
    memory.direct(directive)
    memory.reports = {member: report(member, OLD, NEW, protected=False) for member in (0, 1)}
    assert lead(memory).persist is None
    memory.direct(replace(directive, protected=NEW))
    assert lead(memory).persist == ORDER


def test_a_fenced_leader_orders_nothing(memory: JobMemory) -> None:
    memory.epoch_seen = 2
    assert lead(memory).persist is None


def test_a_set_is_committed_when_all_files_are_there_and_announced_when_that_is_done(
    memory: JobMemory,
) -> None:
    lead(memory)
    answer(memory, 0)
    lead(memory)
    assert not any(isinstance(effect, CommitSet) for effect in memory.out)
    answer(memory, 1)
    assert lead(memory).persisted is None
    lead(memory)
    commits = [effect for effect in memory.out if isinstance(effect, CommitSet)]
    assert [commit.files for commit in commits] == [(file_of(0), file_of(1))]
    persist_leader.set_committed(memory, SetCommitted(epoch=1, number=1, generation=NEW))
    assert lead(memory).persisted == NEW
    assert lead(memory).persist == replace(ORDER, ended=True)


def test_a_set_that_fails_is_given_up_and_tried_again_after_a_pause(memory: JobMemory) -> None:
    lead(memory)
    answer(memory, 1, failure="no space left")
    assert lead(memory, 2.0).persist == replace(ORDER, ended=True)
    assert "no space left" in memory.persist.last_failure
    assert lead(memory, 2.5).persist == replace(ORDER, ended=True)
    assert lead(memory, 3.5).persist == replace(ORDER, number=2)


def test_a_member_that_never_reports_does_not_hold_up_a_set_for_ever(memory: JobMemory) -> None:
    lead(memory)
    answer(memory, 0)
    lead(memory, 2.0)
    assert lead(memory, PATIENCE_S).persist == ORDER
    assert lead(memory, PATIENCE_S + 10).persist == replace(ORDER, ended=True)


def test_a_leader_that_restarted_goes_on_with_the_order_that_members_report(
    memory: JobMemory,
) -> None:
    order = PersistOrder(number=7, ended=False, generation=NEW)
    for member in (0, 1):
        memory.reports[member] = replace(
            memory.reports[member], persist=order, persisted=(file_of(member),)
        )
    assert lead(memory).persist == order
    assert any(isinstance(effect, CommitSet) and effect.number == 7 for effect in memory.out)


def test_files_of_an_older_order_are_neither_reported_nor_taken(memory: JobMemory) -> None:
    lead(memory)
    persisting.write(memory, epoch_of(memory), 1.0)
    late = RankPersisted(
        epoch=1, number=0, rank=0, layout_id="l", slot=0, generation=OLD, file=file_of(0)
    )
    persisting.rank_persisted(memory, late)
    persisting.rank_persisted(memory, replace(late, epoch=0, number=1))
    assert persisting.reported(memory, epoch_of(memory))["persisted"] == ()
    persisting.rank_persisted(memory, replace(late, number=1, generation=NEW))
    assert persisting.reported(memory, epoch_of(memory))["persisted"] == (file_of(0),)
    memory.direct(replace(epoch_of(memory).directive, persist=replace(ORDER, number=2)))
    assert persisting.reported(memory, epoch_of(memory))["persisted"] == ()


def test_a_snapshot_that_is_no_longer_held_is_reported(memory: JobMemory) -> None:
    memory.direct(replace(epoch_of(memory).directive, persist=replace(ORDER, generation=OLD)))
    persisting.write(memory, epoch_of(memory), 1.0)
    assert (
        "rank 0 no longer holds 1.10"
        in persisting.reported(memory, epoch_of(memory))["persist_failure"]
    )


def test_a_request_stays_until_something_as_new_is_stored(memory: JobMemory) -> None:
    persisting.request(memory)
    assert memory.persist.wanted == NEW
    for stored, wanted in ((OLD, NEW), (NEW, None)):
        memory.direct(replace(epoch_of(memory).directive, persisted=stored))
        persisting.write(memory, epoch_of(memory), 1.0)
        assert memory.persist.wanted == wanted


def test_a_job_without_a_tier_refuses_a_request(memory: JobMemory) -> None:
    memory.revise(replace(MEMBERSHIP, tier=None))
    with pytest.raises(InvalidJobError, match="no durable tier"):
        persisting.request(memory)


def test_a_slot_that_is_freed_while_it_is_read_is_free_when_that_ends() -> None:
    slot = Slot(0, state=SlotState.SEALED, generation=NEW, places=b"\1", persisting=NEW)
    slot.clear()
    assert (slot.state, slot.places) == (SlotState.LEFT, b"\1")
    slot.persisted()
    assert (slot.state, slot.places) == (SlotState.FREE, b"")


def test_writers_are_stopped_once_when_their_order_is_over(memory: JobMemory) -> None:
    lead(memory)
    persisting.write(memory, epoch_of(memory), 1.0)
    layout = Layout(
        rank=0,
        world_size=2,
        topology="dp2",
        entries=(),
        extras_offset=0,
        extras_capacity=8,
        piece_bytes=4096,
    )
    arena = ArenaView(rank=0, layout_id="l", layout=layout, encoded=encode_layout(layout))
    arena.slots = [Slot(0, state=SlotState.LEFT, persisting=NEW), Slot(1)]
    memory.arenas[0, "l"] = arena
    memory.direct(replace(epoch_of(memory).directive, persist=replace(ORDER, ended=True)))
    persisting.write(memory, epoch_of(memory), 2.0)
    persisting.write(memory, epoch_of(memory), 3.0)
    assert sum(isinstance(effect, StopPersisting) for effect in memory.out) == 1


@pytest.mark.parametrize(
    ("since", "base"), [(1, OLD), (2, None)], ids=["restarted", "as many members again"]
)
def test_a_set_names_experts_only_of_copies_of_its_own_world(
    since: int, base: Generation | None
) -> None:
    memory = JobMemory(job="job", node="a", memory_id="a", incarnation=1)
    past = (MEMBERSHIP.world,) if since > 1 else ()
    memory.begin_epoch(replace(MEMBERSHIP, epoch=2, since=since, past=past))
    generation = Generation(2, 30)
    order = PersistOrder(number=1, ended=False, generation=generation)
    line = Line(generation=OLD, reason="")
    memory.direct(Directive(job="job", epoch=2, line=line, protected=generation, persist=order))
    memory.persist.stored = OLD
    hold(memory, generation)
    persisting.write(memory, epoch_of(memory), 1.0)
    (written,) = [effect for effect in memory.out if isinstance(effect, PersistRank)]
    assert written.base == base


def test_a_sparse_window_is_never_written_whoever_orders_it(memory: JobMemory) -> None:
    hold(memory, NEW, first_step=NEW.step - 3)
    memory.direct(replace(epoch_of(memory).directive, persist=ORDER))
    persisting.write(memory, epoch_of(memory), 1.0)
    assert not [effect for effect in memory.out if isinstance(effect, PersistRank)]
    reported = persisting.reported(memory, epoch_of(memory))
    assert reported["persist_failure"] == f"rank 0 holds {NEW} as a sparse window"


def hold(memory: JobMemory, generation: Generation, first_step: int = 0) -> None:
    """Let the node hold the snapshot of its rank."""
    layout = Layout(
        rank=0,
        world_size=2,
        topology="dp2",
        entries=(),
        extras_offset=0,
        extras_capacity=8,
        piece_bytes=4096,
    )
    manifest = Manifest(
        job="job",
        rank=0,
        world_size=2,
        generation=generation,
        layout_id="l",
        payload_bytes=0,
        extras_offset=0,
        extras_bytes=0,
        piece_bytes=4096,
        digests=b"",
        first_step=first_step,
    )
    arena = ArenaView(rank=0, layout_id="l", layout=layout, encoded=encode_layout(layout))
    arena.slots = [
        Slot(
            0,
            state=SlotState.SEALED,
            generation=generation,
            verified=True,
            manifest=manifest,
        )
    ]
    memory.arenas[0, "l"] = arena
