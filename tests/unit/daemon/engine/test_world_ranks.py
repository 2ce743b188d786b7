"""A world that a member has left: torch counts its ranks without a gap, everyone else with one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from member_engines import engine_of, membership_of
from msgspec import structs

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.errors import InvalidJobError, StaleEpochError, UnreachableError
from holdfast_core.inspections import GroupCollectives, InspectedProcess
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, encode_layout
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.membership import Membership, Tier
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.snapshots.stored import PersistOrder, RankFile
from holdfast_core.states import EndReason
from holdfast_daemon.engine import EngineSettings, JobEngine, loading, persist_leader
from holdfast_daemon.engine.effects import ArenaReady, CommitSet, Note, OpenStored, Seal
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.overview import evidence

WHOLE = replace(membership_of((0, 1, 2, 3), epoch=3), nproc_per_node=2)
MEMBERS = tuple(member for member in WHOLE.members if member.index != 2)
SHRUNK = replace(WHOLE, epoch=4, since=4, members=MEMBERS, groups=((0, 1, 3),), past=(WHOLE.world,))
"""Members 0, 1 and 3: the last one has ranks 6 and 7, which torch numbers 4 and 5."""


def layout_of(world_rank: int, size: int) -> bytes:
    return encode_layout(
        Layout(
            rank=world_rank,
            world_size=size,
            topology="raw",
            entries=(),
            extras_offset=0,
            extras_capacity=64,
        )
    )


@pytest.fixture
def engine() -> JobEngine:
    return engine_of(SHRUNK, 3)


def test_a_rank_behind_a_gap_is_named_by_its_world_rank(engine: JobEngine) -> None:
    assert [engine.rank_in_world(number, 4) for number in (4, 5)] == [6, 7]
    assert [engine_of(SHRUNK, 1).rank_in_world(number) for number in (2, 3)] == [2, 3]


@pytest.mark.parametrize("number", [2, 6, 7])
def test_a_worker_of_an_earlier_world_is_told_so(engine: JobEngine, number: int) -> None:
    why = f"an earlier world calls itself rank {number}: since epoch 4 there are 6 ranks"
    with pytest.raises(StaleEpochError, match=f"{why}, and node n3 hosts ranks 4..5 of job"):
        engine.rank_in_world(number)
    with pytest.raises(StaleEpochError, match="epoch 3; the current epoch is 4"):
        engine.rank_in_world(number, 3)
    with pytest.raises(UnreachableError, match="still in epoch 4"):
        engine.rank_in_world(number, 5)


def test_in_the_first_world_a_wrong_rank_is_on_another_node() -> None:
    with pytest.raises(InvalidJobError, match=r"rank 4 is not on node n3, which hosts ranks 6\.\."):
        engine_of(WHOLE, 3).rank_in_world(4)


def test_a_stream_of_worlds_belongs_to_a_lane_whatever_the_number_was(engine: JobEngine) -> None:
    assert [engine.rank_of_lane(number) for number in (4, 5, 6, 7)] == [6, 7, 6, 7]
    with pytest.raises(UnreachableError, match="not a member of job yet"):
        JobEngine(
            job="job", node="n9", memory_id="m", incarnation=1, settings=EngineSettings()
        ).rank_of_lane(0)


def test_workers_stay_only_for_worlds_of_a_size_that_suits_them(engine: JobEngine) -> None:
    def keeps(*sizes: int) -> bool:
        for rank, size in zip((6, 7), sizes, strict=True):
            engine.follows(rank, 100, size)
        world = engine.world_state(0)
        assert world is not None and (world.node_rank, world.nodes) == (2, 3)
        return world.keep

    assert keeps(0, 0) and keeps(6, 6) and keeps(0, 6)
    assert not keeps(0, 8)
    assert not keeps(8, 8)


def test_the_exit_of_a_worker_is_recorded_for_its_rank(engine: JobEngine) -> None:
    engine.worker_exited(3, 7, 9)  # of the world that has ended
    engine.worker_exited(4, 5, 3, "why")
    exits = {rank.rank: rank.exit_code for rank in engine.overview().ranks}
    assert exits == {6: 0, 7: 3}


def test_an_inspection_is_recorded_for_the_rank_once_and_forgotten_with_the_epoch(
    engine: JobEngine,
) -> None:
    stopped, waits = InspectedProcess(rank=5, state="T"), InspectedProcess(rank=4, state="S")
    assert engine.awaited_inspection == 0
    engine.inspect(3, 1, 1.0)  # of the world that has ended
    assert engine.awaited_inspection == 0
    engine.inspect(4, 2, 2.0)
    assert engine.inspected(4, 1, [stopped], 3.0) == []  # nobody waits for that one
    assert engine.awaited_inspection == 2
    before = engine.evidence()
    effects = engine.inspected(4, 2, [stopped, waits], 4.0)
    assert engine.evidence() != before
    notes = [each for each in effects if isinstance(each, Note)]
    assert [(n.rank, n.detail) for n in notes if n.event is JobEvent.INSPECTED] == [
        (6, "state S"),
        (7, "state T"),
    ]
    engine.inspect(4, 2, 5.0)  # the control loop repeats itself
    assert engine.awaited_inspection == 0
    made = engine.overview().inspection
    assert made is not None and made.processes is not None and made.asked_at == 2.0
    assert [(each.rank, each.state) for each in made.processes] == [(6, "S"), (7, "T")]
    engine.inspect(4, 3, 6.0)
    assert engine.awaited_inspection == 3
    with pytest.raises(StaleEpochError, match="an earlier world calls itself rank 0"):
        engine.inspected(4, 3, [InspectedProcess(rank=0)], 7.0)
    engine.memory.begin_epoch(replace(SHRUNK, epoch=5))
    assert engine.overview().inspection is None


@pytest.mark.parametrize(
    ("membership", "numbers", "ranks"),
    [
        (SHRUNK, (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 6, 7)),
        (SHRUNK, (3, 4), (3, 6)),
        (SHRUNK, (3, 6), ()),
        (replace(SHRUNK, order=(3, 0, 1)), (0, 2), (0, 6)),
    ],
    ids=["whole", "subgroup", "unknown", "ordered"],
)
def test_groups_of_a_process_that_is_inspected_have_ranks(
    membership: Membership, numbers: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    engine = engine_of(membership, 3)
    engine.inspect(4, 1, 1.0)
    group = GroupCollectives(group="0 gloo", pending=1, size=len(numbers), members=numbers)
    number = membership.world.world_rank(6)
    engine.inspected(4, 1, [InspectedProcess(rank=number, collectives=(group,))], 2.0)
    made = engine.overview().inspection
    assert made is not None and made.processes is not None
    assert made.processes[0].collectives == (structs.replace(group, members=ranks),)


def test_work_is_recorded_for_the_rank_and_forgotten_with_the_epoch(engine: JobEngine) -> None:
    engine.worked(3, [7], 1.0)  # of the world that has ended
    assert engine.overview().work_reported_at == -math.inf
    engine.worked(4, [5], 2.0)
    assert {r.rank: r.worked_at for r in engine.overview().ranks} == {6: None, 7: 2.0}
    engine.worked(4, [], 4.0)  # no process works, which is a report as well
    assert engine.overview().work_reported_at == 4.0
    with pytest.raises(StaleEpochError, match="an earlier world calls itself rank 0"):
        engine.worked(4, [5, 0], 3.0)
    engine.memory.begin_epoch(replace(SHRUNK, epoch=5))
    assert {r.worked_at for r in engine.overview().ranks} == {None}
    assert engine.overview().work_reported_at == -math.inf


def test_a_reason_is_recorded_with_the_exit_and_holds_in_its_epoch(engine: JobEngine) -> None:
    engine.worker_exited(4, 5, 137, "", EndReason.OOM_KILLED)
    assert {r.rank: r.exit_reason for r in engine.overview().ranks} == {6: "", 7: "OOMKilled"}
    engine.memory.begin_epoch(replace(SHRUNK, epoch=5))
    assert {r.exit_reason for r in engine.overview().ranks} == {EndReason.UNKNOWN}
    assert {r.rank: r.oom_killed_in for r in engine.overview().ranks} == {6: 0, 7: 4}


def test_a_kill_for_lack_of_memory_is_recorded_when_its_epoch_has_ended(engine: JobEngine) -> None:
    before = evidence(engine.memory)
    engine.worker_exited(3, 7, 137, "", EndReason.OOM_KILLED)  # numbered as in the last world
    assert evidence(engine.memory) != before
    found = {r.rank: (r.oom_killed_in, r.exit_code) for r in engine.overview().ranks}
    assert found == {6: (0, 0), 7: (3, 0)}
    engine.worker_exited(9, 7, 137, "", EndReason.OOM_KILLED)  # of an epoch that never was
    assert {r.oom_killed_in for r in engine.overview().ranks} == {0, 3}


def test_a_fault_of_hardware_is_recorded_when_its_epoch_has_ended(engine: JobEngine) -> None:
    before = evidence(engine.memory)
    engine.worker_exited(3, 7, 134, "", EndReason.HARDWARE_FAULT, "Xid 79")  # as in the last world
    assert evidence(engine.memory) != before
    found = {
        r.rank: (r.hardware_fault_in, r.exit_code, r.kernel_messages)
        for r in engine.overview().ranks
    }
    assert found == {6: (0, 0, ""), 7: (3, 0, "Xid 79")}
    engine.worker_exited(9, 7, 137, "", EndReason.HARDWARE_FAULT)  # of an epoch that never was
    assert {r.hardware_fault_in for r in engine.overview().ranks} == {0, 3}


def test_a_failure_is_told_with_its_own_messages_and_not_with_older_ones(
    engine: JobEngine,
) -> None:
    engine.worker_exited(4, 5, 1, "", EndReason.UNKNOWN, "Xid 45")
    engine.worker_exited(3, 7, 134, "", EndReason.HARDWARE_FAULT, "Xid 79")
    assert {r.rank: r.kernel_messages for r in engine.overview().ranks} == {6: "", 7: "Xid 45"}


def test_a_rank_without_a_session_trains_until_it_ends_or_the_epoch_does(
    engine: JobEngine,
) -> None:
    def state() -> tuple[bool, int, float]:
        found = next(rank for rank in engine.overview().ranks if rank.rank == 7)
        return found.unprotected, found.step, found.last_sign

    def train(step: int, now: float, **more: Any) -> None:
        engine.trained(7, epoch=4, step=step, now=now, failure="no room", **more)

    before = evidence(engine.memory)
    train(5, 1.0)
    assert state() == (True, 5, 1.0) and evidence(engine.memory) != before
    train(5, 2.0)
    assert state() == (True, 5, 1.0)  # it makes no progress
    train(6, 3.0)
    assert state() == (True, 6, 3.0)
    assert engine.memory.rank(7).failure == "no room"
    train(6, 4.0, closed=True)
    assert state() == (False, 6, 3.0)
    train(7, 5.0)
    engine.worker_exited(4, 5, 1)
    assert state()[0] is False
    with pytest.raises(StaleEpochError):
        engine.trained(7, epoch=3, step=9, now=6.0)
    train(8, 7.0)
    engine.memory.begin_epoch(replace(SHRUNK, epoch=5))
    assert state()[:2] == (False, 0)


ONE_LANE = replace(
    SHRUNK,
    nproc_per_node=1,
    past=(),
    tier=Tier(uri="file:///tier", every_steps=1),
)
GENERATION = Generation(4, 7)


def in_epoch(engine: JobEngine, directive: Directive) -> Epoch:
    engine.memory.direct(directive)
    assert engine.memory.current is not None
    return engine.memory.current


def test_a_snapshot_carries_the_world_rank_and_lies_in_the_arena_of_the_rank() -> None:
    engine = engine_of(ONE_LANE, 3)
    in_epoch(engine, Directive(job="job", epoch=4, line=Line(generation=None, reason="fresh")))
    with pytest.raises(InvalidJobError, match=r"world rank 2 of 3 opens .* layout of rank 3 of 4"):
        engine.open(rank=3, epoch=4, layout=layout_of(3, 4), largest_slot_bytes=0, pid=1, now=0.0)
    session, _ = engine.open(
        rank=3, epoch=4, layout=layout_of(2, 3), largest_slot_bytes=0, pid=1, now=0.0
    )
    ((rank, identity),) = engine.memory.arenas
    assert rank == 3
    engine.on_completion(ArenaReady(rank=3, layout_id=identity, slots=3), 0.0)
    engine.claimed(session, 0.0)
    granted, _ = engine.grant(session, epoch=4, step=7, now=0.0)
    effects = engine.commit(
        session,
        epoch=4,
        step=7,
        slot=granted.slot,
        payload_bytes=4,
        extras_bytes=4,
        digests=bytes(8),
        nan_units=(),
        now=0.0,
    )
    (seal,) = (effect for effect in effects if isinstance(effect, Seal))
    assert (seal.rank, seal.manifest.rank, seal.manifest.world_size) == (3, 2, 3)


def test_a_rank_behind_a_gap_loads_the_file_of_its_world_rank() -> None:
    engine = engine_of(ONE_LANE, 3)
    epoch = in_epoch(engine, Directive(job="job", epoch=4, load=GENERATION))
    loading.start(engine.memory, epoch, 3, GENERATION)
    opened = engine.memory.out[-1]
    assert isinstance(opened, OpenStored)
    assert (opened.rank, opened.world_rank) == (3, 2)


def file_of(world_rank: int) -> RankFile:
    return RankFile(
        rank=world_rank,
        file="",
        bytes=10,
        header_bytes=2,
        header_xxh3=0,
        payload_bytes=8,
        layout_id="l",
        manifest_digest=0,
    )


def test_a_set_has_a_file_of_each_world_rank_and_lacks_those_of_ranks() -> None:
    engine = engine_of(ONE_LANE, 0)
    order = PersistOrder(number=1, ended=False, generation=GENERATION)
    line = Line(generation=None, reason="fresh")
    epoch = in_epoch(engine, Directive(job="job", epoch=4, line=line, persist=order))

    def reported(member: int, *files: int, failure: str = "") -> None:
        engine.memory.reports[member] = MemberReport(
            job="job",
            epoch=4,
            member=member,
            incarnation=1,
            sequence=1,
            verified=True,
            inventory=Inventory(),
            persist=order,
            persisted=tuple(map(file_of, files)),
            persist_failure=failure,
        )

    reported(0, 0)
    reported(1, 1)
    persist_leader.lead(engine.memory, epoch, 1.0)
    reported(3, failure="no room")
    persist_leader.lead(engine.memory, epoch, 2.0)
    assert engine.memory.persist.last_failure == f"generation {GENERATION}: member 3: no room"
    reported(3, 2)
    persist_leader.lead(engine.memory, epoch, 3.0)
    (commit,) = (effect for effect in engine.memory.out if isinstance(effect, CommitSet))
    assert [file.rank for file in commit.files] == [0, 1, 2]


def test_work_is_progress_of_a_rank_that_has_never_saved(engine: JobEngine) -> None:
    def last_sign() -> float:
        return next(rank.last_sign for rank in engine.overview().ranks if rank.rank == 7)

    engine.trained(7, epoch=4, step=3, now=1.0, failure="no room", failure_code="memory_budget")
    engine.worked(4, [5], 2.0)
    assert last_sign() == 1.0
    engine.trained(7, epoch=4, step=4, now=3.0, failure="no session", failure_code="unsaved")
    engine.worked(4, [5], 4.0)
    assert last_sign() == 4.0


def test_what_somebody_has_to_change_is_the_problem_before_what_passes(engine: JobEngine) -> None:
    in_epoch(engine, Directive(job="job", epoch=4, line=Line(generation=None, reason="fresh")))
    engine.trained(6, epoch=4, step=3, now=1.0, failure="busy", failure_code="snapshot_skipped")
    assert engine.overview().problem.text == "busy"
    engine.trained(7, epoch=4, step=3, now=1.0, failure="no dp", failure_code="invalid_job")
    found = engine.overview().problem
    assert (found.text, found.code) == ("no dp", "invalid_job")
