"""What adapters may ask an engine, and what they give it beside requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from member_engines import engine_of, membership_of
from msgspec import structs

from holdfast_core.corruption import Compared, Divergence, Proof
from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.errors import ProtocolError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, encode_layout
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_core.snapshots.reports import Directive
from holdfast_core.states import RestorePhase, RestoreSource
from holdfast_daemon.engine import JobEngine, RestoreState
from holdfast_daemon.engine.effects import ArenaReady
from holdfast_daemon.engine.slots import ArenaView, Slot

MEMBERSHIP = membership_of((0, 1, 2))
LINE = Line(generation=None, reason="a fresh start")
OLD, NEW = Generation(1, 10), Generation(1, 20)
LAYOUT = Layout(
    rank=1, world_size=3, topology="raw", entries=(), extras_offset=0, extras_capacity=64
)


def open_session(engine: JobEngine, epoch: int = 1) -> str:
    session, _ = engine.open(
        rank=1,
        epoch=epoch,
        layout=encode_layout(LAYOUT),
        largest_slot_bytes=4096,
        pid=1,
        now=0.0,
    )
    return session


def directed(membership: Membership) -> tuple[JobEngine, str]:
    """A member whose leader retains NEW and calls OLD protected, and a session of its rank."""
    engine = engine_of(membership, 1)
    session = open_session(engine)
    engine.on_directive(
        Directive(job="job", epoch=1, line=LINE, protected=OLD, retained=NEW, persisted=OLD), 0.0
    )
    return engine, session


@pytest.mark.parametrize(
    ("redundancy", "newest"), [(Redundancy.RAIM5, OLD), (Redundancy.NONE, NEW)]
)
def test_a_session_learns_the_furthest_stage_of_a_generation(
    redundancy: Redundancy, newest: Generation
) -> None:
    engine, session = directed(replace(MEMBERSHIP, redundancy=redundancy))
    watched = engine.watched(session)
    assert watched is not None and watched.epoch_ended == 0
    assert (watched.redundant, watched.newest) == (redundancy is Redundancy.RAIM5, newest)
    assert watched.persisted == OLD


def test_a_session_learns_of_the_epoch_that_ends_its_own() -> None:
    engine, session = directed(MEMBERSHIP)
    engine.set_membership(replace(MEMBERSHIP, epoch=2), 0.0)
    watched = engine.watched(session)
    assert watched is not None and watched.epoch_ended == 2


def test_steps_of_a_session_whose_epoch_has_ended_are_no_progress() -> None:
    engine, session = directed(MEMBERSHIP)
    engine.progress(session, step=8, now=1.0)
    engine.set_membership(replace(MEMBERSHIP, epoch=2), 2.0)
    engine.progress(session, step=9, now=3.0, failure="no slot")
    (rank,) = engine.overview().ranks
    assert (rank.step, rank.last_sign) == (0, 2.0)


def test_an_expert_plan_of_a_later_epoch_than_its_session_is_refused() -> None:
    """The newest plan is shown: this one would hide all plans to come."""
    engine, session = directed(MEMBERSHIP)
    plan = PlanReport(
        epoch=1,
        step=200,
        cause=PlanCause.LOADS,
        ranks=3,
        rank_seats=2,
        layers=1,
        experts=3,
        least_nodes=2,
        busiest_node=1.0,
    )
    engine.progress(session, step=8, now=1.0, plan=plan)
    with pytest.raises(ProtocolError, match="plan of epoch 2 in a session of epoch 1"):
        engine.progress(session, step=9, now=2.0, plan=replace(plan, epoch=2))
    assert engine.overview().plan == plan


DIVERGED = Divergence(
    step=20, unit="layer0/gate", ranks=(0, 1), compared_all=True, history=(Compared(20, 1, 2),)
)


@pytest.mark.parametrize(
    ("known", "since"), [(False, 0), (False, 1), (True, 0), (False, 2)], ids=str
)
def test_the_session_of_the_next_epoch_gets_its_ranks_report_of_an_open_divergence(
    known: bool, since: int
) -> None:
    """But not that of another world, whose ranks and sums are others."""
    engine, session = directed(MEMBERSHIP)
    named = structs.replace(DIVERGED, wrong=(1,), proof=Proof.MAJORITY)
    told = named if known else DIVERGED
    engine.progress(session, step=20, now=1.0, divergence=told)
    assert [rank.divergence for rank in engine.overview().ranks] == [told]
    engine.set_membership(replace(MEMBERSHIP, epoch=2, since=since), 2.0)
    assert [rank.divergence for rank in engine.overview().ranks] == [None]
    later = open_session(engine, epoch=2)
    engine.progress(later, step=10, now=3.0)
    for rank, identity in list(engine.memory.arenas):
        engine.on_completion(ArenaReady(rank=rank, layout_id=identity, slots=3), 4.0)
    opened = engine.opened(later)
    assert opened is not None and opened.earlier == (None if known or since == 2 else DIVERGED)


def test_of_replicas_that_are_equal_again_nothing_is_left() -> None:
    engine, session = directed(MEMBERSHIP)
    engine.progress(session, step=20, now=1.0, divergence=DIVERGED)
    before = engine.evidence()
    engine.progress(session, step=21, now=1.0)
    assert [rank.divergence for rank in engine.overview().ranks] == [None]
    assert engine.evidence() != before, "the control loop learns of it at once"


def test_a_session_learns_of_an_epoch_without_its_node() -> None:
    engine, session = directed(MEMBERSHIP)
    engine.set_membership(membership_elsewhere(epoch=3), 0.0)
    watched = engine.watched(session)
    assert watched is not None and watched.epoch_ended == 3
    assert not engine.takes_part and engine.epoch == 3 and list(engine.ranks) == []


def membership_elsewhere(epoch: int) -> Membership:
    """The same members, the second of which lives on another node."""
    first, second, third = MEMBERSHIP.members
    return replace(MEMBERSHIP, epoch=epoch, members=(first, replace(second, node="spare"), third))


def test_a_session_that_ended_gets_no_events() -> None:
    engine, session = directed(MEMBERSHIP)
    assert engine.has_session(session)
    engine.session_ended(session, clean=True, now=0.0)
    assert engine.watched(session) is None and not engine.has_session(session)


def test_a_waiting_agent_is_reported_at_once_but_once_in_an_epoch() -> None:
    engine = engine_of(MEMBERSHIP, 1)
    assert [engine.agent_waits(epoch) for epoch in (0, 1, 1)] == [False, True, False]
    assert engine.overview().agent_waiting
    engine.set_membership(replace(MEMBERSHIP, epoch=2), 0.0)
    assert not engine.overview().agent_waiting


def test_what_a_rank_was_given_to_restore_is_shown_until_the_epoch_ends() -> None:
    engine = engine_of(MEMBERSHIP, 1)
    arena = ArenaView(rank=1, layout_id="l", layout=LAYOUT, encoded=b"")
    state = RestoreState(
        phase=RestorePhase.READY,
        detail="",
        line=Line(generation=OLD, reason=""),
        arena=arena,
        slot=Slot(0),
        source=RestoreSource.PARITY,
    )
    engine.restore_given(1, state)
    assert engine.overview().ranks[0].restored == (OLD, RestoreSource.PARITY)
    engine.set_membership(replace(MEMBERSHIP, epoch=2), 0.0)
    assert engine.overview().ranks[0].restored is None
