"""The gauges of a job at heartbeat pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from holdfast_core.values import Directive, Generation, MemberPlace, Membership, Redundancy
from holdfast_daemon.catalogue import MemoryCatalogue
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.state import ExpertLoss
from holdfast_daemon.host import JobHost
from holdfast_daemon.metrics import Metrics
from holdfast_daemon.observe import NodeObserver

JOB = "team.moe"


@dataclass
class Storage:
    arena_bytes: int = 3
    parity_bytes: int = 2


class Host:
    """What an observer reads of a `JobHost`, at a time that the test sets."""

    def __init__(self, redundancy: Redundancy) -> None:
        self.job, self.now, self.storage = JOB, 100.0, Storage()
        self.engine = JobEngine(
            job=JOB, node="a", memory_id="m", incarnation=1, settings=EngineSettings()
        )
        place = MemberPlace(index=0, node="a", memory_id="m", peer_address="", bulk_address="")
        self.engine.memory.membership = Membership(
            job=JOB,
            epoch=1,
            members=(place,),
            nproc_per_node=2,
            groups=((0,),),
            redundancy=redundancy,
        )
        self.engine.memory.me = 0

    def protect(self, step: int | None) -> None:
        generation = None if step is None else Generation(1, step)
        self.engine.memory.directive = Directive(
            job=JOB, epoch=1, line=None, protected=generation, retained=generation
        )


class Bench:
    def __init__(self, redundancy: Redundancy = Redundancy.RAIM5) -> None:
        self.metrics = Metrics()
        self.observer = NodeObserver(self.metrics, MemoryCatalogue("a", lambda: 0.0))
        self.host = Host(redundancy)

    def read(self, now: float, name: str, **labels: str) -> float | None:
        self.host.now = now
        self.observer.refresh({JOB: cast(JobHost, self.host)}, 5, 10)
        sample = f"holdfast_{name}"
        return self.metrics.registry.get_sample_value(sample, {"job": JOB, **labels})


def test_protection_ages_until_something_newer_is_protected() -> None:
    bench = Bench()
    ages = []
    for now, step in ((100.0, None), (130.0, None), (131.0, 7), (141.0, 7), (142.0, 8)):
        bench.host.protect(step)
        ages.append(bench.read(now, "protection_age_seconds"))
    assert ages == [0.0, 30.0, 0.0, 10.0, 0.0]
    assert bench.read(142.0, "generation_step", stage="protected") == 8


def test_a_job_that_wants_no_protection_is_not_unprotected() -> None:
    bench = Bench(Redundancy.NONE)
    assert bench.read(500.0, "protection_age_seconds") is None


def test_tokens_are_told_where_snapshots_leave_experts_out() -> None:
    bench = Bench()
    record = bench.host.engine.memory.rank(0)
    assert bench.read(1.0, "tokens_lost_ratio") is None
    record.loss = ExpertLoss(experts_per_layer=1, at_risk=0.25, lost=0.5)
    assert bench.read(2.0, "tokens_at_risk_ratio") == 0.25
    assert bench.read(2.0, "tokens_lost_ratio") == 0.5


def test_a_job_that_comes_again_starts_afresh() -> None:
    bench = Bench()
    bench.read(100.0, "protection_age_seconds")
    bench.observer.forget(JOB)
    assert bench.read(400.0, "protection_age_seconds") == 0.0


@pytest.mark.parametrize("what", ["skipped", "failed"])
def test_what_ranks_count_is_added_up(what: str) -> None:
    bench = Bench()
    for rank, count in ((0, 3), (1, 4)):
        setattr(bench.host.engine.memory.rank(rank), what, count)
    assert bench.read(100.0, f"saves_{what}_reported") == 7
