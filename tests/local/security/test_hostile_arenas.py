"""What a trainer can do with the descriptor of its arena harms its own job and no other."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from harness import RawCluster, RawJob, Restored
from test_hostile_clients import hostile
from waiting import error_of, wait_for

from holdfast_core.errors import MemoryBudgetError


def two_jobs(cluster: RawCluster, nodes: list[str]) -> tuple[RawJob, RawJob]:
    """Two jobs on the same nodes, each with a protected step."""
    good, bad = (RawJob(cluster, nodes, name=f"team.{name}") for name in ("good", "bad"))
    for job in (good, bad):
        job.form()
        job.start_trainers()
        job.train(2)
    return good, bad


def test_a_trainer_that_cuts_its_arena_costs_its_own_job_a_rebuild(cluster: RawCluster) -> None:
    good, bad = two_jobs(cluster, cluster.start_nodes(3))
    before = bad.generation
    bad.trainers[0].cut()
    bad.form()  # the daemons verify what they hold
    assert bad.check_restored(bad.start_trainers(), before) == before
    good.train(2)
    bad.train(2)
    assert all(daemon.alive for daemon in cluster.daemons.values())


def test_a_daemon_starts_on_an_arena_that_was_cut(cluster: RawCluster) -> None:
    good, bad = two_jobs(cluster, cluster.start_nodes(3))
    before = bad.generation
    bad.trainers[1].cut(nbytes=100_000)
    cluster.restart(bad.nodes[1])
    for job in (good, bad):
        job.form()
    assert bad.check_restored(bad.start_trainers(), before) == before
    assert {source for *_, source in good.start_trainers()} == {"local"}


@pytest.mark.slow
def test_a_trainer_that_fills_memory_by_its_arena_costs_its_own_job_only(
    tmpfs: Path, cluster: RawCluster
) -> None:
    shared = cluster.make_node("--budget", str(8 << 20), root=tmpfs / "node")
    shared.start()
    cluster.wait_beat(shared.node)
    nodes = [shared.node, *cluster.start_nodes(2)]
    good, bad = two_jobs(cluster, nodes)
    held = bad.trainers[0].descriptor
    with hostile("grows", str(held), inherited=(held,)):
        good.train(5)
        with pytest.raises(grpc.RpcError) as refused:
            bad.trainers[0].save(bad.step + 1)
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error_of(refused.value), MemoryBudgetError)
        assert shared.metric('holdfast_arenas_overgrown_total{moejob="bad",namespace="team"}') == 1
        late = RawJob(cluster, nodes, name="team.late", nbytes=50_000)
        late.form()
        late.start_trainers()
        late.train(2)
        cluster.restart(shared.node)
        for job in (good, late):
            newest = job.generation
            job.form()
            assert job.check_restored(job.start_trainers(), newest) == newest
            job.train(2)
    newest = bad.generation
    bad.form()
    assert bad.check_restored(start_when_welcome(bad), newest) == newest
    bad.train(2)


def start_when_welcome(job: RawJob) -> list[Restored]:
    """What the trainers restored, once they may write again."""

    def start() -> list[Restored] | None:
        try:
            return job.start_trainers()
        except grpc.RpcError as refused:
            assert isinstance(error_of(refused), MemoryBudgetError)
            return None

    restored = wait_for("the job to be welcome", start)
    assert restored is not None
    return restored


@pytest.mark.slow
def test_a_trainer_that_keeps_a_removed_arena_cannot_fill_memory_by_it(
    tmpfs: Path, cluster: RawCluster
) -> None:
    shared = cluster.make_node("--budget", str(8 << 20), root=tmpfs / "node")
    shared.start()
    cluster.wait_beat(shared.node)
    good, bad = two_jobs(cluster, [shared.node, *cluster.start_nodes(2)])
    held = os.dup(bad.trainers[0].descriptor)
    bad.drop()
    wait_for("the arena to be removed", lambda: os.fstat(held).st_blocks == 0)
    with hostile("grows", str(held), inherited=(held,)):
        os.close(held)
        good.train(5)
        cluster.restart(shared.node)
        newest = good.generation
        good.form()
        assert good.check_restored(good.start_trainers(), newest) == newest
        good.train(2)
