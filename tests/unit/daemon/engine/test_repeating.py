"""Messages between daemons: to whom they go, and their repetition, since any may be lost."""

from __future__ import annotations

import pytest
from member_engines import engine_of, membership_of

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import ParityEntry
from holdfast_core.snapshots.reports import Directive
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.effects import Effect, SendDirective, SendReport
from holdfast_daemon.engine.slots import ParityState

MEMBERSHIP = membership_of((0, 1), (2, 3))
SETTINGS = EngineSettings()
BETWEEN_SAVES_S = SETTINGS.resend_s / 5


def directed_engine(member: int) -> JobEngine:
    """The engine of a member of one of two groups of two, in an epoch whose line is decided."""
    engine = engine_of(MEMBERSHIP, member)
    line = Line(generation=None, reason="a fresh start")
    engine.memory.direct(Directive(job="job", epoch=1, line=line))
    engine.tick(0.0)
    return engine


def save(engine: JobEngine, step: int, now: float) -> list[Effect]:
    """A trainer asks for a slot: only the leader has a use for it."""
    engine.memory.rank(engine.memory.my_ranks()[0]).passed = Generation(1, step)
    return engine.tick(now)


def reported_to(effects: list[Effect]) -> list[int]:
    return [effect.to.index for effect in effects if isinstance(effect, SendReport)]


def test_a_save_that_begins_is_reported_to_the_leader_alone() -> None:
    engine = directed_engine(3)
    assert reported_to(save(engine, 1, BETWEEN_SAVES_S)) == [0]


def test_what_is_held_is_reported_to_the_group_too() -> None:
    engine = directed_engine(3)
    parity = engine.memory.lane_slots(0)[0]
    parity.state, parity.generation, parity.verified = ParityState.READY, Generation(1, 1), True
    parity.entry = ParityEntry(lane=0, generation=Generation(1, 1), group=(2, 3), sources=((2, 7),))
    effects = engine.tick(BETWEEN_SAVES_S)
    assert reported_to(effects) == [0, 2]


@pytest.mark.parametrize("member", [0, 3])
def test_saves_in_quick_succession_put_no_repetition_off(member: int) -> None:
    engine = directed_engine(member)
    group = 1 if member == 0 else 2
    reports = directives = 0
    turns = int(3 * SETTINGS.idle_resend_s / BETWEEN_SAVES_S)
    for step in range(1, turns + 1):
        effects = save(engine, step, step * BETWEEN_SAVES_S)
        reports += group in reported_to(effects)
        directives += any(isinstance(effect, SendDirective) for effect in effects)
    assert reports >= 2
    assert directives >= (2 if member == 0 else 0)
