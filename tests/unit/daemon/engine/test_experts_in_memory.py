"""Which snapshots stay in memory so that experts can be taken from them, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, encode_layout, layout_id
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Member, Membership, Tier
from holdfast_core.snapshots.reports import Directive
from holdfast_daemon.engine import loading, upkeep
from holdfast_daemon.engine.effects import FreeSlot, LoadStored, OpenStored
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.slots import ArenaView, Slot, SlotState
from holdfast_daemon.engine.state import JobMemory

LAYOUT = Layout(
    rank=0, world_size=1, topology="raw", entries=(), extras_offset=0, extras_capacity=64
)
ENCODED = encode_layout(LAYOUT)
STORED, NEXT, NEWEST = (Generation(1, step) for step in (10, 20, 30))
TIER = Tier(uri="file:///tier", experts=1)


def membership(epoch: int, tier: Tier = TIER) -> Membership:
    place = Member(index=0, node="a", memory_id="a", peer_address="a", bulk_address="a")
    return Membership(
        job="job", epoch=epoch, members=(place,), nproc_per_node=1, groups=((0,),), tier=tier
    )


def manifest_of(generation: Generation) -> Manifest:
    return Manifest(
        job="job",
        rank=0,
        world_size=1,
        generation=generation,
        layout_id=layout_id(ENCODED),
        payload_bytes=0,
        extras_offset=0,
        extras_bytes=0,
        piece_bytes=LAYOUT.piece_bytes,
        digests=b"",
    )


def seal(slot: Slot, generation: Generation) -> None:
    slot.state, slot.generation, slot.verified = SlotState.SEALED, generation, True
    slot.manifest, slot.digest = manifest_of(generation), generation.step


@pytest.fixture
def arena() -> ArenaView:
    return ArenaView(
        rank=0,
        layout_id=layout_id(ENCODED),
        layout=LAYOUT,
        encoded=ENCODED,
        slots=[Slot(index) for index in range(3)],
    )


@pytest.fixture
def memory(arena: ArenaView) -> JobMemory:
    """In the middle of an epoch: STORED is in storage, NEXT is protected."""
    found = JobMemory(job="job", node="a", memory_id="a", incarnation=1)
    found.begin_epoch(membership(1))
    line = Line(generation=None, reason="fresh")
    found.direct(Directive(job="job", epoch=1, line=line, protected=NEXT, retained=NEXT))
    found.persist.stored = STORED
    found.arenas[0, arena.layout_id] = arena
    for slot, generation in zip(arena.slots, (STORED, NEXT), strict=False):
        seal(slot, generation)
    return found


def epoch_of(memory: JobMemory) -> Epoch:
    """The current one."""
    assert memory.current is not None
    return memory.current


def test_the_newest_copy_stays_in_memory_until_its_slot_is_needed(
    memory: JobMemory, arena: ArenaView
) -> None:
    upkeep.release(memory, epoch_of(memory))
    assert [slot.generation for slot in arena.slots] == [STORED, NEXT, None]
    assert upkeep.slot_to_write(memory, epoch_of(memory), arena) is arena.slots[2], (
        "a free one goes first"
    )
    seal(arena.slots[2], NEWEST)
    memory.out.clear()
    assert upkeep.slot_to_write(memory, epoch_of(memory), arena) is arena.slots[0]
    assert memory.out == [FreeSlot(rank=0, layout_id=arena.layout_id, slot=0)]


@pytest.mark.parametrize("reason", ["it is the line", "it is being written", "a writer is unknown"])
def test_a_slot_that_serves_for_more_is_not_given_away(
    memory: JobMemory, arena: ArenaView, reason: str
) -> None:
    seal(arena.slots[2], NEWEST)
    if reason == "it is the line":
        memory.direct(replace(epoch_of(memory).directive, protected=STORED, retained=STORED))
    elif reason == "it is being written":
        arena.slots[0].persisting = STORED
    else:
        arena.slots[2].state, arena.slots[2].generation = SlotState.GRANTED, None
    assert upkeep.slot_to_write(memory, epoch_of(memory), arena) is None


def test_where_copies_hold_all_experts_nothing_is_kept_for_them(
    memory: JobMemory, arena: ArenaView
) -> None:
    memory.revise(membership(1, replace(TIER, experts=0)))
    upkeep.release(memory, epoch_of(memory))
    assert [slot.generation for slot in arena.slots] == [None, NEXT, None]


def lose_the_line(memory: JobMemory) -> None:
    """The next epoch begins, memory has no line, and the leader names STORED."""
    memory.revise(membership(2))
    memory.epoch_seen = 2
    memory.direct(Directive(job="job", epoch=2, load=STORED))


def test_a_load_takes_experts_from_the_oldest_snapshot_after_the_copy(
    memory: JobMemory, arena: ArenaView
) -> None:
    seal(arena.slots[0], Generation(1, 5))
    seal(arena.slots[2], NEWEST)
    lose_the_line(memory)
    upkeep.release(memory, epoch_of(memory))
    assert [slot.generation for slot in arena.slots] == [None, NEXT, None]
    memory.out.clear()
    loading.start(memory, epoch_of(memory), 0, STORED)
    opened = memory.out[-1]
    assert isinstance(opened, OpenStored)
    assert [(held.slot, held.manifest.generation) for held in opened.held] == [(1, NEXT)]
    job = memory.rebuilds[0]
    job.manifest, job.layout_id = manifest_of(STORED), arena.layout_id
    upkeep.release(memory, epoch_of(memory))
    loading.load_into_slot(memory, epoch_of(memory), 0, job, arena)
    load = memory.out[-1]
    assert isinstance(load, LoadStored)
    assert load.held == opened.held
    assert load.slot != 1


def load_stored(memory: JobMemory, arena: ArenaView) -> LoadStored:
    """The load of STORED, from the choice of what it reads in memory to its slot."""
    lose_the_line(memory)
    upkeep.release(memory, epoch_of(memory))
    loading.start(memory, epoch_of(memory), 0, STORED)
    job = memory.rebuilds[0]
    job.manifest, job.layout_id = manifest_of(STORED), arena.layout_id
    upkeep.release(memory, epoch_of(memory))
    loading.load_into_slot(memory, epoch_of(memory), 0, job, arena)
    load = memory.out[-1]
    assert isinstance(load, LoadStored), memory.out
    return load


@pytest.mark.parametrize("source", [0, 1])
def test_with_two_slots_a_load_leaves_the_one_alone_that_it_takes_experts_from(
    memory: JobMemory, arena: ArenaView, source: int
) -> None:
    del arena.slots[2]
    seal(arena.slots[source], NEXT)
    seal(arena.slots[1 - source], NEWEST)
    load = load_stored(memory, arena)
    assert [(held.slot, held.manifest.generation) for held in load.held] == [(source, NEXT)]
    assert load.slot == 1 - source
    assert set(load.places) <= {1 - source}
    kept = arena.slots[source]
    assert (kept.state, kept.generation) == (SlotState.SEALED, NEXT)
    freed = [each.slot for each in memory.out if isinstance(each, FreeSlot)]
    assert freed == [1 - source]


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("given_up", [False, True])
def test_with_two_slots_a_load_leaves_the_one_alone_that_is_being_persisted(
    memory: JobMemory, arena: ArenaView, written: int, given_up: bool
) -> None:
    del arena.slots[2]
    other, being_written = arena.slots[1 - written], arena.slots[written]
    seal(other, NEXT)
    seal(being_written, NEWEST)
    being_written.persisting, being_written.places = NEWEST, bytes([written])
    if given_up:
        being_written.clear()
    load = load_stored(memory, arena)
    # The one before it could serve the load, too, but then no slot would be left to load into.
    assert [held.slot for held in load.held] == ([] if given_up else [written])
    assert load.slot == other.index
    assert being_written.state is (SlotState.LEFT if given_up else SlotState.SEALED)
    assert (being_written.persisting, being_written.places) == (NEWEST, bytes([written]))
    assert FreeSlot(rank=0, layout_id=arena.layout_id, slot=written) not in memory.out


def test_a_load_begins_anew_when_what_it_counted_on_is_gone(
    memory: JobMemory, arena: ArenaView
) -> None:
    lose_the_line(memory)
    loading.start(memory, epoch_of(memory), 0, STORED)
    job = memory.rebuilds[0]
    job.manifest, job.layout_id = manifest_of(STORED), arena.layout_id
    upkeep.free_slot(memory, arena, arena.slots[1])
    memory.out.clear()
    loading.load_into_slot(memory, epoch_of(memory), 0, job, arena)
    assert memory.out == []
    assert memory.rebuilds == {}


def test_memory_in_another_layout_makes_room_once_the_copys_is_known(
    memory: JobMemory, arena: ArenaView
) -> None:
    lose_the_line(memory)
    loading.start(memory, epoch_of(memory), 0, STORED)
    memory.rebuilds[0].manifest, memory.rebuilds[0].layout_id = manifest_of(STORED), "other"
    upkeep.release(memory, epoch_of(memory))
    assert all(slot.generation != NEXT for slot in arena.slots)


def test_a_load_that_failed_has_what_it_read_of_memory_looked_at_again(
    memory: JobMemory, arena: ArenaView
) -> None:
    lose_the_line(memory)
    loading.failed(memory, 0, STORED, "memory does not match", corrupt=False, now=1.0)
    assert not arena.slots[1].verified
    arena.slots[1].verified = True
    loading.failed(memory, 0, STORED, "storage is wrong", corrupt=True, now=1.0)
    assert arena.slots[1].verified
