"""Nodes are lost, several at once; daemons are frozen until they are replaced, and come back."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc
import pytest
from combinations import Combination
from daemons import DaemonProcess, wait_until_frozen
from faulty_daemon import Trap
from harness import RawCluster, RawJob
from waiting import error_of, wait_for

from holdfast_core.errors import StaleEpochError
from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy

RAIM5 = Combination(PolicyType.PARTIAL_EXPERTS, Redundancy.RAIM5)


def _job(cluster: RawCluster, combination: Combination, members: int, group_size: int) -> RawJob:
    nodes = cluster.start_nodes(members)
    job = combination.job(cluster, nodes, group_size=group_size)
    job.form()
    job.start_trainers()
    return job


def _replace(cluster: RawCluster, job: RawJob, *members: int) -> None:
    spares = cluster.start_nodes(len(members))
    for member, spare in zip(members, spares, strict=True):
        job.nodes[member] = spare


def _lose(job: RawJob, *members: int) -> None:
    for member in members:
        job.daemon(member).lose()


@pytest.mark.parametrize("lost", [(0, 3), (1, 2), (0, 2, 4, 6), (1, 3, 5, 7)])
def test_one_node_of_each_parity_group_may_be_lost_at_once(
    cluster: RawCluster, lost: tuple[int, ...], combination: Combination
) -> None:
    job = _job(cluster, combination, members=4 if max(lost) < 4 else 8, group_size=2)
    newest = job.train(2)
    carries = combination.policy is not PolicyType.FULL
    assert all(bool(trainer.carried) == carries for trainer in job.trainers)
    _lose(job, *lost)
    _replace(cluster, job, *lost)
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert [rank for rank, (_, _, source) in enumerate(restored) if source == "parity"] == [*lost]
    job.train(2)


def test_a_node_may_be_lost_while_another_of_another_group_is_rebuilt(
    cluster: RawCluster, combination: Combination
) -> None:
    job = _job(cluster, combination, members=4, group_size=2)
    newest = job.train(2)
    _lose(job, 0)
    _replace(cluster, job, 0)
    job.daemon(0).arm(Trap(at="Rebuild", signal=signal.SIGSTOP))
    job.form()
    wait_until_frozen(job.daemon(0))
    _lose(job, 3)
    job.daemon(0).send_signal(signal.SIGCONT)
    _replace(cluster, job, 3)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)


@pytest.mark.parametrize("lost", [(0, 1), (2, 3), (1, 3)])
def test_two_losses_in_one_group_are_reported_with_the_ranks_that_cannot_be_restored(
    cluster: RawCluster, lost: tuple[int, int]
) -> None:
    size = 2 if lost != (1, 3) else 4
    job = _job(cluster, RAIM5, members=4, group_size=size)
    newest = job.train()
    _lose(job, *lost)
    _replace(cluster, job, *lost)
    job.form()
    restored = job.start_trainers()
    for generation, payload, reason in restored:
        assert (generation, payload) == (None, b"")
        assert f"{newest} lacks ranks {list(lost)}" in reason
    job.train(2)


def test_a_single_member_without_redundancy_restores_what_it_holds(cluster: RawCluster) -> None:
    job = RawJob(cluster, cluster.start_nodes(1), redundancy=Redundancy.NONE)
    job.form()
    job.start_trainers()
    for job.step in range(1, 6):
        job.save(job.step)
    newest = job.generation
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest


@pytest.mark.parametrize("member", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_daemon_that_was_frozen_until_it_was_replaced_is_fenced(
    cluster: RawCluster, member: int, combination: Combination
) -> None:
    job = _job(cluster, combination, members=4, group_size=4)
    newest = job.train(2)
    frozen, old_epoch = job.daemon(member), job.epoch
    ghost = job.trainers.pop(member)
    frozen.send_signal(signal.SIGSTOP)
    _replace(cluster, job, member)
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert restored[member][2] == "parity"
    newest = job.train()

    frozen.send_signal(signal.SIGCONT)
    wait_for("the old daemon to be fenced", lambda: frozen.job(job.name).get("fenced"))
    assert frozen.job(job.name)["epoch"] == old_epoch
    with pytest.raises(grpc.RpcError) as refused:
        ghost.grant(job.step + 1)
    assert isinstance(error_of(refused.value), StaleEpochError)
    ghost.die()
    newest = job.train(2)

    # It comes back as a member, with the old timeline in its memory: nothing of that is used.
    job.nodes[member] = frozen.node
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert restored[member][2] == "parity"
    job.train(2)


@contextmanager
def silenced(daemons: Iterable[DaemonProcess]) -> Iterator[None]:
    """Stop daemons meanwhile, so that they tell nobody anything."""
    stopped = list(daemons)
    for daemon in stopped:
        daemon.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for daemon in stopped:
            daemon.send_signal(signal.SIGCONT)


def test_what_a_frozen_daemon_seals_after_it_was_replaced_is_never_restored(
    cluster: RawCluster, combination: Combination
) -> None:
    member = 1
    job = _job(cluster, combination, members=3, group_size=3)
    newest = job.train(2)
    ghost, frozen = job.trainers.pop(member), job.daemon(member)
    slot = ghost.grant(job.step + 1)
    assert slot is not None
    ghost.copy(slot, job.step + 1)
    frozen.send_signal(signal.SIGSTOP)
    _replace(cluster, job, member)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    with silenced(job.daemon(each) for each in range(job.size)):
        frozen.send_signal(signal.SIGCONT)
        ghost.commit(slot, job.step + 1)  # the daemon cannot know better, and it does no harm
        sealed = Generation(newest.epoch, job.step + 1)
        assert str(sealed) in {held["generation"] for held in frozen.job(job.name)["slots"]}
    ghost.die()
    job.nodes[member] = frozen.node
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)
