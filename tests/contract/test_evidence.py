"""What a daemon reports at once is what the control loop calls evidence: each has its own list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast_core.errors import ReplicasDivergedError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_core.snapshots.reports import Directive
from holdfast_core.states import RestoreSource
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.overview import evidence, overview
from holdfast_daemon.engine.slots import ArenaView, ParityState
from holdfast_daemon.engine.state import (
    Follower,
    JobMemory,
    SavePace,
    TrainerSession,
)
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.observing.status import job_state
from holdfast_daemon.parity.traffic import NodeTraffic
from holdfast_operator.control.heartbeats import evidence_of, job_view
from holdfast_operator.reconciler.observe.views import JobView
from holdfast_protos import control_pb2

SESSION = TrainerSession(id="s", rank=0, epoch=5, layout_id="l", pid=1, claimed=True)
LAYOUT = Layout(
    rank=0, world_size=1, topology="raw", entries=(), extras_offset=0, extras_capacity=64
)


@pytest.fixture
def memory() -> JobMemory:
    """Of a rank at work."""
    place = Member(index=0, node="a", memory_id="m", peer_address="", bulk_address="")
    membership = Membership(job="job", epoch=5, members=(place,), nproc_per_node=1, groups=((0,),))
    memory = JobMemory(job="job", node="a", memory_id="m", incarnation=1)
    memory.begin_epoch(membership)
    memory.rank(0).session = SESSION
    memory.rank(0).last_step = 7
    memory.direct(directive_with(Generation(5, 7)))
    return memory


def directive_with(protected: Generation | None) -> Directive:
    line = Line(generation=None, reason="nothing was saved")
    return Directive(job="job", epoch=5, line=line, protected=protected)


def view_of(memory: JobMemory, fetched_bytes: int = 0) -> JobView:
    """What the control loop sees in a heartbeat of now."""
    traffic = NodeTraffic(clock=lambda: 0.0).of_job()
    traffic.count(fetched_bytes)
    host = SimpleNamespace(
        engine=SimpleNamespace(overview=lambda: overview(memory)),
        storage=SimpleNamespace(arena_bytes=0, parity_bytes=0),
        worker=SimpleNamespace(parity_traffic=traffic),
        now=0.0,
    )
    return job_view(job_state(cast(JobHost, host)))


def found(memory: JobMemory, fetched_bytes: int = 0) -> object:
    """Evidence that the control loop finds in the daemon's view."""
    return evidence_of(view_of(memory, fetched_bytes))


def test_what_parity_fetches_is_reported_but_is_not_evidence(memory: JobMemory) -> None:
    assert view_of(memory, 50_000_000).protection_bytes_s == 5e6
    assert found(memory, 50_000_000) == found(memory)


def test_the_fewest_slots_of_a_ranks_arenas_are_reported_but_are_no_evidence(
    memory: JobMemory,
) -> None:
    before = found(memory)
    assert view_of(memory).slots == 0
    for rank, layout, slots in ((0, "old", 3), (0, "new", 2), (1, "of another node", 1)):
        arena = ArenaView(rank=rank, layout_id=layout, layout=LAYOUT, encoded=b"")
        memory.arenas[rank, layout] = arena
        arena.allocated(slots)
    memory.arenas[0, "next"] = ArenaView(rank=0, layout_id="next", layout=LAYOUT, encoded=b"")
    assert view_of(memory).slots == 2
    assert found(memory) == before


def test_the_pace_of_ranks_at_work_is_reported_but_is_not_evidence(memory: JobMemory) -> None:
    before = found(memory)
    record = memory.rank(0)
    record.pace = SavePace(interval_steps=12, window_steps=5)
    assert found(memory) == before
    for epoch, expected in ((memory.epoch, (12, 5)), (memory.epoch - 1, (0, 0))):
        record.session = replace(SESSION, epoch=epoch)
        reported = view_of(memory)
        assert (reported.interval_steps, reported.window_steps) == expected


def test_who_follows_is_reported_but_is_not_evidence(memory: JobMemory) -> None:
    before = evidence(memory), found(memory)
    assert not view_of(memory).ranks[0].follows
    memory.rank(0).follower = Follower(number=1, pid=1)
    assert view_of(memory).ranks[0].follows
    assert (evidence(memory), found(memory)) == before


def test_a_replay_is_reported_for_its_epoch(memory: JobMemory) -> None:
    assert view_of(memory).ranks[0].repeated_after is None
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.memory = memory
    engine.no_replay(0, "rank 2 has logged steps 4 to 7")
    assert view_of(memory).ranks[0].no_replay == "rank 2 has logged steps 4 to 7"
    engine.went_live(0, 5, 7, repeated_after=0, now=0.0, source=RestoreSource.PARITY)
    rank = view_of(memory).ranks[0]
    assert (rank.restored, rank.restored_from) == (Generation(5, 7), RestoreSource.PARITY)
    assert rank.repeated_after == 0  # not the same as none
    assert memory.membership is not None
    memory.begin_epoch(replace(memory.membership, epoch=6))
    rank = view_of(memory).ranks[0]
    assert (rank.repeated_after, rank.no_replay) == (None, "")


def test_a_newer_step_is_not_evidence(memory: JobMemory) -> None:
    before = evidence(memory), found(memory)
    memory.rank(0).last_step = 8
    memory.direct(directive_with(Generation(5, 8)))
    assert (evidence(memory), found(memory)) == before


@pytest.mark.parametrize("word", [float("nan"), float("inf"), -1.0])
def test_an_invalid_rate_counts_as_zero(word: float) -> None:
    state = control_pb2.JobState(job="job", protection_bytes_s=word)
    assert job_view(state).protection_bytes_s == 0.0


def test_the_kind_of_a_failed_save_reaches_the_control_loop(memory: JobMemory) -> None:
    memory.rank(0).failure = "unit layer2/dense: ranks [0, 1] are replicas and no longer equal"
    memory.rank(0).failure_code = ReplicasDivergedError.code
    view = view_of(memory)
    assert view.problem == memory.rank(0).failure
    assert view.problem_code == ReplicasDivergedError.code


@pytest.mark.parametrize("code", ["from_the_future", "x" * 10**6])
def test_a_code_that_the_control_loop_does_not_know_counts_as_none(code: str) -> None:
    view = job_view(control_pb2.JobState(job="job", problem="broken", problem_code=code))
    assert (view.problem, view.problem_code) == ("broken", "")


def _lost(memory: JobMemory) -> None:
    memory.rank(0).lost_in = 5


def _exited(memory: JobMemory) -> None:
    memory.rank(0).exited = (5, 137)


def _agent_waits(memory: JobMemory) -> None:
    memory.agent_waiting = True


def _restored(memory: JobMemory) -> None:
    memory.rank(0).restored = (Generation(5, 7), RestoreSource.LOCAL)


def _restored_from_elsewhere(memory: JobMemory) -> None:
    memory.rank(0).restored = (None, RestoreSource.PARITY)


def _another_session(memory: JobMemory) -> None:
    memory.rank(0).session = replace(SESSION, id="t", pid=2)


def _protects_no_more(memory: JobMemory) -> None:
    memory.parity_failure = "no memory"


def _fails_for_another_reason(memory: JobMemory) -> None:
    memory.rank(0).failure, memory.rank(0).failure_code = "no", ReplicasDivergedError.code


def _nothing_protected(memory: JobMemory) -> None:
    memory.direct(directive_with(None))


def _new_epoch(memory: JobMemory) -> None:
    assert memory.membership is not None
    memory.revise(replace(memory.membership, epoch=6))


def _something_is_not_verified(memory: JobMemory) -> None:
    memory.lane_slots(0)[0].state = ParityState.READY


def _fenced(memory: JobMemory) -> None:
    memory.epoch_seen = 6


def _line_decided(memory: JobMemory) -> None:
    line = Line(generation=Generation(4, 3), reason="the newest whole one")
    memory.direct(Directive(job="job", epoch=5, line=line, protected=Generation(5, 7)))


def _has_done_no_step_yet(memory: JobMemory) -> None:
    memory.rank(0).last_step = 0


def _persisted(memory: JobMemory) -> None:
    memory.persist.stored = Generation(5, 7)


EVIDENCE = (
    *(_lost, _exited, _agent_waits, _restored, _restored_from_elsewhere, _another_session),
    *(
        _protects_no_more,
        _fails_for_another_reason,
        _nothing_protected,
        _new_epoch,
        _something_is_not_verified,
        _fenced,
        _line_decided,
    ),
)


@pytest.mark.parametrize("happens", EVIDENCE)
def test_what_the_control_loop_takes_for_evidence_is_sent_at_once(
    memory: JobMemory, happens: Callable[[JobMemory], None]
) -> None:
    before = evidence(memory), found(memory)
    happens(memory)
    assert found(memory) != before[1]
    assert evidence(memory) != before[0]


@pytest.mark.parametrize("happens", [_has_done_no_step_yet, _persisted])
def test_what_jobs_wait_for_is_sent_at_once(
    memory: JobMemory, happens: Callable[[JobMemory], None]
) -> None:
    before = evidence(memory)
    happens(memory)
    assert evidence(memory) != before
