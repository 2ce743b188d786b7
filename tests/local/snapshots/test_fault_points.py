"""A daemon is killed at every point of a snapshot's life, and every point of a recovery.

One cluster serves all cases: replacement nodes are new daemons on fresh memory. In each case a trap
kills one daemon exactly at a point. Then the daemon comes back in a new epoch, or in the same one
at a new address, or its node is lost and a spare takes over. The job must restore one generation,
not older than the newest that was seen to be protected, with exactly its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
from combinations import Combination
from daemons import wait_until_dead
from fault_points import CASES, FEW, POINTS, SHORT, Case, Point
from harness import RawCluster, RawJob
from waiting import wait_for

from holdfast_core.snapshots.generations import Generation

MEMBERS = 4
SAVES_MAX = 6
"""A trap that is not met within so many saves is not where it is supposed to be."""


class Running:
    """The cluster that the cases of one redundancy and number of slots share; made anew for others,
    and after a case that failed. Between cases the newest step is protected."""

    def __init__(self) -> None:
        self.cluster: RawCluster | None = None
        self.job: RawJob | None = None

    @contextmanager
    def case(self, combination: Combination) -> Iterator[tuple[RawCluster, RawJob]]:
        wanted = (combination.redundancy, combination.slots)
        if self.job is not None and (self.job.redundancy, self.job.slots) != wanted:
            self.close()  # idle daemons send heartbeats
        if self.cluster is None or self.job is None:
            self.cluster = RawCluster().__enter__()
            self.job = combination.job(self.cluster, self.cluster.start_nodes(MEMBERS))
            self.job.form()
            self.job.start_trainers()
            self.job.train(2)
        try:
            yield self.cluster, self.job
        except BaseException:
            print(self.cluster.report())
            self.close()
            raise

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.__exit__()
        self.cluster = self.job = None


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    shared = Running()
    yield shared
    shared.close()


def _save_until(job: RawJob, newest: Generation, dead: Callable[[], bool]) -> Generation:
    """Train until the victim dies; the newest generation that was seen to be protected."""
    for _ in range(SAVES_MAX):
        saved = job.try_save()

        def protected_or_dead(saved: Generation = saved) -> bool:
            seen = [job.protected(member) for member in range(job.size)]
            return dead() or all(generation == saved for generation in seen)

        wait_for(f"{saved} to be protected, or the victim to die", protected_or_dead)
        if dead():
            return newest
        newest = saved
    raise AssertionError("the trap was not met")


def _strike(cluster: RawCluster, job: RawJob, point: Point, victim: int) -> Generation:
    """Let the victim die at the point; the newest generation that was seen to be protected."""
    newest, daemon = job.generation, job.daemon(victim)
    traps = point.traps_for(job.redundancy)
    match point.during:
        case "saves":
            daemon.arm(*traps)
            newest = _save_until(job, newest, lambda: not daemon.alive)
        case "epoch":
            daemon.arm(*traps)
            job.form()
        case "rebuild":
            daemon.lose()
            job.nodes[victim] = cluster.start_nodes(1)[0]
            daemon = job.daemon(victim)
            daemon.arm(*traps)
            job.form()
        case "rebuild-source":
            other = (victim + 1) % job.size
            job.daemon(other).lose()
            job.nodes[other] = cluster.start_nodes(1)[0]
            daemon.arm(*traps)
            job.form()
        case "adoption":
            daemon.kill()
            daemon.arm(*traps)
            for _ in traps[1:]:
                daemon.start()
                wait_until_dead(daemon)
            daemon.start()
    wait_until_dead(daemon)
    return newest


def _recover(cluster: RawCluster, job: RawJob, victim: int, loss: str) -> None:
    """Bring the member back: its daemon, or a spare node in a new epoch."""
    daemon = job.daemon(victim)
    if loss == "node":
        daemon.lose()
        job.nodes[victim] = cluster.start_nodes(1)[0]
    else:
        while daemon.trap.exists():
            daemon.start()
            wait_until_dead(daemon)
        cluster.restart(daemon.node)
    if loss == "addresses":
        job.readdress()
    else:
        job.form()


def _train_on(job: RawJob, victim: int, newest: Generation) -> Generation:
    """The epoch goes on after its daemon came back: the ranks reopen, or start if they had not."""
    if job.trainers[0].epoch == job.epoch:
        job.trainers[victim].reopen()
        return job.train(2)
    job.check_restored(job.start_trainers(), newest)
    return job.train()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=()
            if case in FEW
            else pytest.mark.slow
            if case in SHORT
            else pytest.mark.exhaustive,
        )
        for case in CASES
    ],
)
def test_a_protected_generation_survives(
    running: Running, case: Case, combination: Combination
) -> None:
    point, victim = case.point, case.victim
    with running.case(combination) as (cluster, job):
        job.capture(combination.policy)
        newest = _strike(cluster, job, point, victim)
        _recover(cluster, job, victim, case.loss)
        if case.loss == "addresses":
            newest = _train_on(job, victim, newest)
            job.form()
        job.check_restored(job.start_trainers(), newest)
        job.train(2)
        assert not any(job.daemon(m).trap.exists() for m in range(job.size))


def test_the_short_form_meets_each_point_with_each_victim_and_with_each_loss() -> None:
    def met(cases: Iterable[Case]) -> tuple[set[tuple[str, int]], set[tuple[str, str]]]:
        return {(c.point.name, c.victim) for c in cases}, {(c.point.name, c.loss) for c in cases}

    assert met(SHORT) == met(CASES)
    assert {point for point, _ in met(SHORT)[0]} == {point.name for point in POINTS}
    assert len(SHORT) < 0.55 * len(CASES)
    assert FEW < SHORT
    assert {case.point.during for case in FEW} == {point.during for point in POINTS}
    assert {case.loss for case in FEW} == {case.loss for case in CASES}
