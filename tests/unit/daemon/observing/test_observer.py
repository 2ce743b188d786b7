"""The gauges of a job at heartbeat pace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from recomputed_state import layout_of

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.experts.loss_reports import LossReport, RecoveryLoss
from holdfast_core.experts.recompute import state_bytes
from holdfast_core.metric_definitions import job_labels
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_core.snapshots.reports import Directive
from holdfast_core.stragglers import StepTimes
from holdfast_daemon.engine import EngineSettings, JobEngine, JobOverview
from holdfast_daemon.engine.effects import Note
from holdfast_daemon.engine.slots import ArenaView
from holdfast_daemon.engine.state import SavePace, TrainerSession
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.observing.catalogue import MemoryCatalogue
from holdfast_daemon.observing.observer import NodeObserver
from holdfast_daemon.parity.traffic import NodeTraffic

JOB = "team.moe"


@dataclass
class Storage:
    arena_bytes: int = 3
    parity_bytes: int = 2


class Host:
    """What an observer reads of a `JobHost`, at a time that the test sets."""

    def __init__(self, redundancy: Redundancy) -> None:
        self.job, self.now, self.storage = JOB, 100.0, Storage()
        self.worker = SimpleNamespace(parity_traffic=NodeTraffic().of_job())
        self.engine = JobEngine(
            job=JOB, node="a", memory_id="m", incarnation=1, settings=EngineSettings()
        )
        member = Member(index=0, node="a", memory_id="m", peer_address="", bulk_address="")
        self.engine.memory.begin_epoch(
            Membership(
                job=JOB,
                epoch=1,
                members=(member,),
                nproc_per_node=2,
                groups=((0,),),
                redundancy=redundancy,
            )
        )

    def protect(self, step: int | None) -> None:
        generation = None if step is None else Generation(1, step)
        self.engine.memory.direct(
            Directive(job=JOB, epoch=1, line=None, protected=generation, retained=generation)
        )


class Bench:
    def __init__(self, redundancy: Redundancy = Redundancy.RAIM5) -> None:
        self.metrics = DaemonMetrics()
        self.catalogue = MemoryCatalogue("a", lambda: 0.0)
        self.observer = NodeObserver(self.metrics, self.catalogue, "a")
        self.host = Host(redundancy)

    def read(self, now: float, name: str, **labels: str) -> float | None:
        self.host.now = now
        self.observer.refresh({JOB: cast(JobHost, self.host)}, 5, 10)
        sample = f"holdfast_{name}"
        return self.metrics.registry.get_sample_value(sample, {**job_labels(JOB), **labels})


def test_protection_ages_until_something_newer_is_protected() -> None:
    bench = Bench()
    ages = []
    for now, step in ((100.0, None), (130.0, None), (131.0, 7), (141.0, 7), (142.0, 8)):
        bench.host.protect(step)
        ages.append(bench.read(now, "protection_age_seconds"))
    assert ages == [0.0, 30.0, 0.0, 10.0, 0.0]
    assert bench.read(142.0, "generation_step", stage="protected") == 8


def test_events_show_which_processes_have_stayed() -> None:
    bench = Bench()
    for rank, stayed in ((0, True), (1, False)):
        bench.observer.note(
            cast(JobHost, bench.host), Note(event=JobEvent.SESSION_OPENED, rank=rank, stayed=stayed)
        )
    bench.observer.note(cast(JobHost, bench.host), Note(event=JobEvent.WENT_LIVE, rank=0))
    found = [one.event for one in asyncio.run(bench.catalogue.read_events(JOB))]
    assert [one.get("stayed") for one in found] == [True, None, None]
    assert found[-1]["event"] == JobEvent.WENT_LIVE


def test_metrics_and_catalogue_share_one_overview_of_the_job() -> None:
    class Counting(JobEngine):
        overviews = 0

        def overview(self) -> JobOverview:
            self.overviews += 1
            return super().overview()

    bench = Bench()
    memory = bench.host.engine.memory
    engine = Counting(job=JOB, node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.memory, bench.host.engine = memory, engine
    assert bench.read(100.0, "epoch") == 1
    assert engine.overviews == 1


def test_a_job_that_wants_no_protection_is_not_unprotected() -> None:
    bench = Bench(Redundancy.NONE)
    assert bench.read(500.0, "protection_age_seconds") is None


def loss(at_risk: int, routed: int) -> LossReport:
    """What one rank says, of a job that has lost 30 tokens in its one layer."""
    record = RecoveryLoss(
        epoch=1,
        step=4,
        lost_tokens=30,
        plt=0.25,
        mlt=0.5,
        k_before=1,
        k_after=2,
        total_tokens=30,
        total_plt=0.125,
        total_mlt=0.75,
    )
    return LossReport(
        ranks=1,
        k=2,
        experts_max=8,
        limit=0.05,
        layers=(0,),
        at_risk=(at_risk,),
        routed=(routed,),
        lost=(30,),
        recoveries=(record,),
    )


def test_tokens_are_reported_where_snapshots_leave_experts_out() -> None:
    bench = Bench()
    memory = bench.host.engine.memory
    assert bench.read(1.0, "tokens_lost_ratio") is None
    memory.rank(0).loss, memory.rank(1).loss = loss(10, 50), loss(0, 150)
    expected = {
        "tokens_routed": 200,
        "tokens_lost": 30,
        "tokens_at_risk_ratio": 10 / 200,
        "tokens_at_risk_mlt": 10 / 200,
        "tokens_lost_ratio": 30 / 200,
        "tokens_lost_mlt": 0.75,
        "tokens_lost_limit_ratio": 0.05,
        "recovery_tokens_lost_ratio": 0.25,
        "recovery_tokens_lost_mlt": 0.5,
        "experts_per_layer": 2,
    }
    assert {name: bench.read(2.0, name) for name in expected} == expected


def test_the_expert_plan_is_reported_where_experts_have_uneven_copies() -> None:
    bench = Bench()
    memory = bench.host.engine.memory
    names = ("least_nodes", "seats", "busiest_node_ratio", "plan_step")
    assert bench.read(1.0, "expert_least_nodes") is None
    plan = PlanReport(
        epoch=memory.epoch,
        step=9,
        cause=PlanCause.START,
        ranks=2,
        rank_seats=3,
        layers=2,
        experts=6,
        least_nodes=2,
        busiest_node=1.125,
    )
    record = memory.rank(0)
    record.plan = plan
    record.session = TrainerSession(id="s", rank=0, epoch=memory.epoch, layout_id="l", pid=1)
    assert [bench.read(2.0, f"expert_{name}") for name in names] == [2, 3, 1.125, 9]
    record.session = None
    assert bench.read(3.0, "expert_least_nodes") is None


def test_tokens_fall_with_a_restore_and_go_with_ranks_that_move_away() -> None:
    """So they cannot be counters: a fall would be taken for a start from 0."""
    bench = Bench()
    memory = bench.host.engine.memory
    memory.rank(0).loss = loss(10, 70)
    assert bench.read(1.0, "tokens_routed") == 70
    memory.rank(0).loss = loss(10, 50)
    assert bench.read(1.0, "tokens_routed") == 50
    memory.current, memory.left = None, memory.membership
    assert bench.read(2.0, "tokens_routed") is None
    assert bench.read(2.0, "epoch") == 1


def test_a_job_that_comes_again_starts_afresh() -> None:
    bench = Bench()
    bench.read(100.0, "protection_age_seconds")
    bench.observer.forget(JOB)
    assert bench.read(400.0, "protection_age_seconds") == 0.0


@pytest.mark.parametrize("what", ["skipped", "failed"])
def test_what_ranks_count_is_added_up_and_a_new_process_counts_on(what: str) -> None:
    bench = Bench()
    for rank, count in ((0, 3), (1, 4)):
        setattr(bench.host.engine.memory.rank(rank), what, count)
    assert bench.read(100.0, f"saves_{what}_reported_total") == 7
    setattr(bench.host.engine.memory.rank(0), what, 1)
    assert bench.read(101.0, f"saves_{what}_reported_total") == 8


def session_of(engine: JobEngine, rank: int, pid: int) -> None:
    memory = engine.memory
    session = TrainerSession(id=f"s{rank}", rank=rank, epoch=memory.epoch, layout_id="", pid=pid)
    memory.sessions[session.id] = memory.rank(rank).session = session


def test_state_is_that_of_the_ranks_with_a_session() -> None:
    bench = Bench()
    memory = bench.host.engine.memory
    layout = layout_of(1)
    experts, others = state_bytes(layout)
    for rank in range(2):
        memory.arenas[rank, ""] = ArenaView(rank=rank, layout_id="", layout=layout, encoded=b"")
    for rank, pid in ((0, 10), (1, 11)):
        session_of(bench.host.engine, rank, pid)
        counted = [bench.read(1.0, "state_bytes", part=part) for part in ("experts", "other")]
        assert counted == [(rank + 1) * experts, (rank + 1) * others]


def test_saves_are_as_slow_as_the_slowest_rank_at_work() -> None:
    bench = Bench()
    engine = bench.host.engine
    for rank, pid in ((0, 10), (1, 11)):
        session_of(engine, rank, pid)
    assert bench.read(1.0, "save_staged_seconds") == 0.0
    for session, staged_s in (("s0", 0.25), ("s1", 0.5)):
        pace = SavePace(period_s=2.0, staged_s=staged_s, interval_steps=4, window_steps=6)
        engine.progress(session, step=1, now=1.0, pace=pace)
    names = (
        "save_staged_seconds",
        "save_period_seconds",
        "save_interval_steps",
        "save_window_steps",
    )
    assert [bench.read(2.0, name) for name in names] == [0.5, 2.0, 4, 6]
    for session in ("s0", "s1"):
        engine.session_ended(session, clean=True, now=3.0)
    assert [bench.read(4.0, name) for name in names] == [None] * 4


def test_waits_for_other_stages_add_up_over_ranks_and_over_their_sessions() -> None:
    bench = Bench()
    engine = bench.host.engine
    for rank, pid in ((0, 10), (1, 11)):
        session_of(engine, rank, pid)
    reports = [("s0", 0.5, 100), ("s1", 0.25, 30), ("s0", 2.0, 100), ("s1", 0.125, 5)]
    totals = []
    for at, (session, bubble_s, nbytes) in enumerate(reports):
        pace = SavePace(bubble_s=bubble_s, bubble_bytes=nbytes)
        engine.progress(session, step=1 + at, now=1.0 + at, pace=pace)
        names = ("bubble_seconds_total", "bubble_copied_bytes_total")
        totals.append(tuple(bench.read(1.0 + at, name) for name in names))
    # The last total has fallen, so its process is new.
    assert totals == [(0.5, 100), (0.75, 130), (2.25, 130), (2.375, 135)]


def test_the_parts_of_a_step_are_those_of_the_rank_that_the_others_wait_for() -> None:
    bench = Bench()
    engine = bench.host.engine
    for rank, own_s in ((0, 0.1), (1, 0.13)):
        session_of(engine, rank, 10 + rank)
        times = StepTimes(window=1, steps=10, step_s=0.14, own_s=own_s, wait_s=0.14 - own_s)
        assert bench.read(1.0, "step_own_seconds") == (None if rank == 0 else 0.1)
        engine.progress(f"s{rank}", step=1, now=1.0, times=times)
    names = ("step_own_seconds", "step_wait_seconds")
    assert [bench.read(2.0, name) for name in names] == [0.13, pytest.approx(0.01)]
    for session in ("s0", "s1"):
        engine.session_ended(session, clean=True, now=3.0)
    assert [bench.read(4.0, name) for name in names] == [None] * 2
