"""A trainer, or its daemon, is killed at each step of a save; and a rank has one writer."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from harness import RawCluster, RawJob
from trainer_child import TrainerProcess
from waiting import error_of, wait_for

from holdfast_core.errors import RankInUseError, UnknownSessionError
from holdfast_core.job.snapshots import PolicyType

MEMBERS = 3
RANK = 1


@pytest.fixture
def job(cluster: RawCluster, policy: PolicyType) -> RawJob:
    job = RawJob(cluster, cluster.start_nodes(MEMBERS), policy=policy)
    job.form()
    job.start_trainers()
    return job


def _take_over(job: RawJob) -> TrainerProcess:
    job.trainers[RANK].die()
    return TrainerProcess(job.make_trainer(RANK), job.epoch)


def _lost(cluster: RawCluster, job: RawJob) -> Callable[[], bool]:
    def lost() -> bool:
        state = cluster.control.state(job.nodes[RANK], job.name)
        return state is not None and all(rank.lost for rank in state.ranks)

    return lost


@pytest.mark.parametrize("died_after", ["open", "grant", "half of the copy", "copy", "commit"])
def test_a_trainer_that_is_killed_while_saving_loses_nothing_protected(
    cluster: RawCluster, job: RawJob, died_after: str
) -> None:
    newest = job.train(2)
    child = _take_over(job)
    step = job.step + 1
    steps = ["open", "grant", "half of the copy", "copy", "commit"]
    taken = steps[1 : steps.index(died_after) + 1]
    slot = child.do("grant", step) if "grant" in taken else None
    if "half of the copy" in taken:
        child.do("copy", slot, step, 0.5)
    if "copy" in taken:
        child.do("copy", slot, step)
    if "commit" in taken:
        child.do("commit", slot, step)
    child.kill()
    assert job.try_save(without=RANK).step == step
    wait_for("the loss of the rank to be reported", _lost(cluster, job))
    if died_after == "commit":
        job.wait_protected(job.step)
        newest = job.generation
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)


@pytest.mark.parametrize("loss", ["daemon", "node"])
@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_daemon_that_is_killed_while_its_trainer_copies_loses_nothing_protected(
    cluster: RawCluster, job: RawJob, part: float, rank: int, loss: str
) -> None:
    newest = job.train(2)
    trainer, daemon = job.trainers[rank], job.daemon(rank)
    step = job.step + 1
    slot = trainer.grant(step)
    assert slot is not None
    trainer.copy(slot, step, part)
    daemon.kill()
    assert job.try_save(without=rank).step == step
    trainer.copy(slot, step)  # the mapping outlives the daemon
    if loss == "daemon":
        cluster.restart(daemon.node)
        job.readdress()
        with pytest.raises(grpc.RpcError) as refused:
            trainer.commit(slot, step)
        assert isinstance(error_of(refused.value), UnknownSessionError)
    else:
        daemon.lose()
        (job.nodes[rank],) = cluster.start_nodes(1)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)


def test_a_rank_that_is_held_is_refused_to_a_second_process_until_the_first_is_killed(
    cluster: RawCluster, job: RawJob
) -> None:
    newest = job.train()
    child = _take_over(job)
    second = job.make_trainer(RANK)
    second.join(job.epoch)
    with pytest.raises(grpc.RpcError) as refused:
        second.open()
    assert isinstance(error_of(refused.value), RankInUseError)
    assert str(child.pid) in str(error_of(refused.value))

    cluster.restart(job.nodes[RANK])  # the daemon has forgotten who holds it; the kernel has not
    job.readdress()
    second.join(job.epoch)
    with pytest.raises(RankInUseError):
        second.open()

    child.kill()
    second.open()
    job.trainers[RANK] = second
    assert job.train() > newest


def test_a_new_epoch_waits_for_the_end_of_a_process_that_still_writes(
    cluster: RawCluster, job: RawJob
) -> None:
    newest = job.train()
    child = _take_over(job)
    slot = child.do("grant", job.step + 1)
    job.form()
    second = job.make_trainer(RANK)
    second.join(job.epoch)
    generation, _, _ = second.restore()
    assert generation == newest
    with pytest.raises(grpc.RpcError) as refused:
        second.open()
    assert isinstance(error_of(refused.value), RankInUseError)
    child.do("copy", slot, job.step + 1)  # it still can: its mapping is its own
    child.kill()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train()
