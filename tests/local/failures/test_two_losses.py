"""Two nodes of one parity group are lost at once, where the redundancy is made for it."""

from __future__ import annotations

import signal

import pytest
from daemons import wait_until_frozen
from faulty_daemon import Trap
from harness import RawCluster, RawJob

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.membership import Redundancy

TWO_LOSSES = [(Redundancy.RAIM6, 1), (Redundancy.REPLICATION, 2)]


def _job(cluster: RawCluster, redundancy: Redundancy, replicas: int, policy: PolicyType) -> RawJob:
    job = RawJob(
        cluster,
        cluster.start_nodes(5),
        redundancy=redundancy,
        replicas=replicas,
        group_size=5,
        policy=policy,
    )
    job.form()
    job.start_trainers()
    return job


def _lose(cluster: RawCluster, job: RawJob, *members: int) -> None:
    for member in members:
        job.daemon(member).lose()
    for member, spare in zip(members, cluster.start_nodes(len(members)), strict=True):
        job.nodes[member] = spare


@pytest.mark.parametrize(("redundancy", "replicas"), TWO_LOSSES)
@pytest.mark.parametrize("lost", [(0, 1), (1, 4)])
def test_two_nodes_of_one_group_may_be_lost_at_once(
    cluster: RawCluster,
    redundancy: Redundancy,
    replicas: int,
    lost: tuple[int, int],
    policy: PolicyType,
) -> None:
    job = _job(cluster, redundancy, replicas, policy)
    newest = job.train(2)
    _lose(cluster, job, *lost)
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert [rank for rank, (_, _, source) in enumerate(restored) if source == "parity"] == [*lost]
    job.train(2)


@pytest.mark.parametrize(("redundancy", "replicas"), TWO_LOSSES)
def test_a_node_may_be_lost_while_another_of_its_group_is_rebuilt(
    cluster: RawCluster, redundancy: Redundancy, replicas: int
) -> None:
    job = _job(cluster, redundancy, replicas, PolicyType.PARTIAL_EXPERTS)
    newest = job.train(2)
    _lose(cluster, job, 0)
    job.daemon(0).arm(Trap(at="Rebuild", signal=signal.SIGSTOP))
    job.form()
    wait_until_frozen(job.daemon(0))
    _lose(cluster, job, 3)
    job.daemon(0).send_signal(signal.SIGCONT)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)


def test_a_third_loss_is_reported_with_the_ranks_that_cannot_be_restored(
    cluster: RawCluster,
) -> None:
    job = _job(cluster, Redundancy.RAIM6, 1, PolicyType.FULL)
    newest = job.train()
    _lose(cluster, job, 0, 2, 3)
    job.form()
    for generation, payload, reason in job.start_trainers():
        assert (generation, payload) == (None, b"")
        assert f"{newest} lacks ranks [0, 2, 3]" in reason
