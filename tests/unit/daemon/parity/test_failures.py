"""Parity that cannot be made, for want of room for one: the daemon reports it until it can again.

Slots wait for the parity of what they hold, so that saves are skipped and none fails: nothing else
says that protection stands still.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from member_engines import engine_of, membership_of

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import ParityEntry
from holdfast_core.snapshots.reports import Directive
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.effects import ParityBuilt
from holdfast_daemon.engine.overview import problem
from holdfast_daemon.engine.slots import ParityState

FIRST, SECOND = Generation(1, 10), Generation(1, 20)
WHY = "storing a peer's manifest for job job failed: No space left on device"
MEMBERSHIP = membership_of((0, 1, 2))


@pytest.fixture
def engine() -> JobEngine:
    """That of a member of a group of three with a protected generation."""
    engine = engine_of(MEMBERSHIP, 0)
    line = Line(generation=None, reason="a fresh start")
    engine.memory.direct(Directive(job="job", epoch=1, line=line, protected=FIRST))
    return engine


def finish(engine: JobEngine, generation: Generation, error: str = "") -> None:
    """The making of a parity block of it ends."""
    parity = engine.memory.lane_slots(0)[0]
    parity.state, parity.generation = ParityState.BUILDING, generation
    entry = ParityEntry(lane=0, generation=generation, group=(0, 1, 2), sources=((1, 7), (2, 7)))
    event = ParityBuilt(
        lane=0, slot=0, generation=generation, entry=None if error else entry, error=error
    )
    engine.on_completion(event, 0.0)


def test_it_is_reported_with_its_cause(engine: JobEngine) -> None:
    assert problem(engine.memory).text == ""
    finish(engine, SECOND, WHY)
    assert problem(engine.memory).text == f"the newest snapshots have no parity: {WHY}"


def test_it_is_over_once_a_block_can_be_made(engine: JobEngine) -> None:
    finish(engine, SECOND, WHY)
    finish(engine, SECOND)
    assert problem(engine.memory).text == ""


def test_it_is_over_in_another_epoch(engine: JobEngine) -> None:
    finish(engine, SECOND, WHY)
    engine.set_membership(replace(MEMBERSHIP, epoch=2), 0.0)
    assert "parity" not in problem(engine.memory).text
