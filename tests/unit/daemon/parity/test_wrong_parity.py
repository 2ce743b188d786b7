"""Parity that matches its digests and gives other bytes than were captured: it is given up."""

from __future__ import annotations

import pytest
from member_engines import engine_of, membership_of

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, encode_layout, layout_id
from holdfast_core.snapshots.manifests import ParityEntry
from holdfast_core.snapshots.reports import Directive
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.completions import WRONG_REBUILDS
from holdfast_daemon.engine.effects import FreeParity, Rebuilt, SendSuspect
from holdfast_daemon.engine.slots import (
    ArenaView,
    ParitySlot,
    ParityState,
    RebuildJob,
    Slot,
    SlotState,
)
from holdfast_daemon.engine.state import JobMemory

LINE, OTHER = Generation(1, 20), Generation(1, 10)
LAYOUT = Layout(
    rank=2, world_size=3, topology="raw", entries=(), extras_offset=0, extras_capacity=64
)
GROUP = (0, 1, 2)
MEMBERSHIP = membership_of(GROUP, epoch=2)


def decided_engine(member: int) -> JobEngine:
    """That of a member of one group of three, in an epoch whose line is decided."""
    engine = engine_of(MEMBERSHIP, member)
    line = Line(generation=LINE, reason="ranks [2] from parity")
    engine.memory.direct(Directive(job="job", epoch=2, line=line, retained=OTHER))
    return engine


def hold(memory: JobMemory, slot: int, generation: Generation, sources: tuple[int, ...]) -> None:
    entry = ParityEntry(
        lane=0,
        generation=generation,
        group=(0, 1, 2),
        sources=tuple((rank, 7) for rank in sources),
    )
    memory.parities[0, slot] = ParitySlot(
        lane=0,
        index=slot,
        state=ParityState.READY,
        generation=generation,
        entry=entry,
        verified=True,
    )


def rebuild_wrongly(engine: JobEngine, owner: int) -> list[SendSuspect]:
    """A rebuild of rank 2 begins, and comes out wrong of the owner's parity."""
    memory, encoded = engine.memory, encode_layout(LAYOUT)
    arena = ArenaView(
        rank=2,
        layout_id=layout_id(encoded),
        layout=LAYOUT,
        encoded=encoded,
        slots=[Slot(0), Slot(1), Slot(2)],
    )
    memory.arenas[2, arena.layout_id] = arena
    memory.rebuilds[2] = RebuildJob(generation=LINE, digest=7, layout_id=arena.layout_id)
    slot = arena.slots[0]
    slot.state, slot.generation = SlotState.REBUILDING, LINE
    event = Rebuilt(rank=2, slot=0, generation=LINE, error="wrong", damaged=owner)
    effects = engine.on_completion(event, 0.0)
    assert slot.state is SlotState.FREE
    return [effect for effect in effects if isinstance(effect, SendSuspect)]


def test_the_owner_is_suspected_when_it_happens_again_and_again() -> None:
    engine = decided_engine(2)
    suspected = [rebuild_wrongly(engine, owner=1) for _ in range(WRONG_REBUILDS)]
    assert suspected[:-1] == [[]] * (WRONG_REBUILDS - 1)
    assert suspected[-1] == [SendSuspect(to=MEMBERSHIP.member(1), rank=2, generation=LINE)]


def test_another_epoch_counts_anew() -> None:
    engine = decided_engine(2)
    for _ in range(WRONG_REBUILDS - 1):
        assert not rebuild_wrongly(engine, owner=1)
    engine.set_membership(membership_of(GROUP, epoch=3), 0.0)
    assert not rebuild_wrongly(engine, owner=1)


@pytest.mark.parametrize(
    ("epoch", "rank", "generation", "freed"),
    [
        (2, 2, LINE, [0]),
        (2, 2, OTHER, [1]),
        (2, 0, LINE, []),
        (1, 2, LINE, []),
    ],
    ids=["the line's", "an older one's", "made of others", "of another epoch"],
)
def test_the_owner_gives_up_what_was_made_from_that_snapshot(
    epoch: int, rank: int, generation: Generation, freed: list[int]
) -> None:
    engine = decided_engine(1)
    hold(engine.memory, 0, LINE, (2,))
    hold(engine.memory, 1, OTHER, (2,))
    effects = engine.on_suspect(epoch, rank, generation, 0.0)
    assert [effect.slot for effect in effects if isinstance(effect, FreeParity)] == freed
