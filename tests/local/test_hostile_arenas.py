"""What a trainer can do with the descriptor of its arena harms its own job and nobody else's."""

from __future__ import annotations

from harness import RawCluster, RawJob


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
