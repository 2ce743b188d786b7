"""The control server may be killed at any time; what it knew is in the heartbeats that return."""

from __future__ import annotations

import pytest
from harness import RawCluster, RawJob
from waiting import wait_for

from holdfast_protos import codec, control_pb2

MEMBERS = 3


@pytest.fixture
def job(cluster: RawCluster) -> RawJob:
    return RawJob(cluster, cluster.start_nodes(MEMBERS))


def _learn(cluster: RawCluster, job: RawJob) -> None:
    """A control server that starts knows nothing; wait until all daemons have reported again."""
    cluster.control.start()
    for node in job.nodes:
        cluster.wait_beat(node)


def _state(cluster: RawCluster, node: str, job: RawJob) -> control_pb2.JobState:
    state = wait_for(f"the state on {node}", lambda: cluster.control.state(node, job.name))
    assert state is not None
    return state


def _wait_joined(job: RawJob) -> None:
    for rank in range(job.size):
        job.make_trainer(rank).join(job.epoch)


@pytest.mark.parametrize("away_from", ["epoch", "restore", "saving"])
def test_training_and_protection_go_on_while_the_control_server_is_away(
    cluster: RawCluster, job: RawJob, away_from: str
) -> None:
    job.form()
    _wait_joined(job)
    if away_from == "epoch":
        cluster.control.stop()
    job.start_trainers()
    if away_from == "restore":
        cluster.control.stop()
    job.train()
    if away_from == "saving":
        job.step += 1
        job.save(job.step)
        cluster.control.stop()
    newest = job.train(2)
    _learn(cluster, job)
    for node in job.nodes:
        state = _state(cluster, node, job)
        assert codec.membership_from_proto(state.membership) == job.membership()
        assert codec.generation_from_proto(state.protected) == newest
        assert [rank.step for rank in state.ranks] == [job.step]
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train()


def test_an_epoch_that_reached_only_some_daemons_is_found_again_in_their_heartbeats(
    cluster: RawCluster, job: RawJob
) -> None:
    job.form()
    job.start_trainers()
    newest = job.train()
    job.epoch += 1
    job.publish_to(job.nodes[1])
    job.make_trainer(1).join(job.epoch)
    cluster.control.stop()
    _learn(cluster, job)
    states = [_state(cluster, node, job) for node in job.nodes]
    found = max((codec.membership_from_proto(s.membership) for s in states), key=lambda m: m.epoch)
    assert found == job.membership()
    job.publish_to(*job.nodes)
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train()


def test_a_daemon_that_restarts_without_a_control_server_serves_its_rank(
    cluster: RawCluster, job: RawJob
) -> None:
    job.form()
    job.start_trainers()
    job.train()
    cluster.control.stop()
    daemon = job.daemon(1)
    daemon.kill()
    daemon.start()
    job.trainers[1].reopen()
    job.step += 1
    job.save(job.step)
    _learn(cluster, job)
    job.readdress()
    job.wait_protected(job.step)
    newest = job.generation
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
