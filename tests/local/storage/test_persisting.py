"""Daemons write to a real directory; they are killed while they do, and storage fails."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
from daemons import wait_until_dead
from faulty_daemon import Trap
from harness import JOB, RawCluster, RawJob
from waiting import wait_for

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy, Tier
from holdfast_protos import control_pb2, trainer_pb2
from holdfast_storage.sets import SetStore

LARGE = 12 << 20
"""Bytes of a rank that are written in several parts."""
WRITES = 3
"""Number of the write of a file at which a daemon dies in the middle of it."""


def _job(
    cluster: RawCluster, tier: Tier, *, nbytes: int = 300_000, policy: PolicyType = PolicyType.FULL
) -> RawJob:
    job = RawJob(cluster, cluster.start_nodes(3), nbytes=nbytes, tier=tier, policy=policy)
    job.form()
    job.start_trainers()
    return job


def _check_sets(job: RawJob, tier: Tier) -> list[Generation]:
    """The complete sets, newest first; every byte of them is what was captured."""
    store = SetStore(tier.uri, JOB)
    stored = store.complete()
    assert not stored.rejected
    for one in stored:
        for trainer in job.trainers:
            rank = store.open_rank(one, trainer.rank)
            data = bytearray(rank.content.payload_bytes)
            rank.read_into(0, rank.pieces, memoryview(data))
            assert data == trainer.content_at(one.generation)
    return [one.generation for one in stored]


def _wait_set(job: RawJob, tier: Tier, newer_than: Generation) -> Generation:
    found = wait_for(
        f"a complete set newer than {newer_than}",
        lambda: [g for g in _check_sets(job, tier) if g > newer_than],
    )
    return max(found)


def _wait_announced(job: RawJob, generation: Generation) -> None:
    def announced(member: int) -> bool:
        return _persist(job.daemon(member).job(JOB))["persisted"] == str(generation)

    for member in range(job.size):
        wait_for(f"member {member} to learn of {generation}", partial(announced, member))


def _persist(daemon_job: dict[str, object]) -> dict[str, object]:
    found = daemon_job["persist"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("victim", [0, 2], ids=["leader", "other"])
def test_a_daemon_killed_while_it_writes_leaves_no_wrong_set_and_the_next_is_complete(
    cluster: RawCluster, tmp_path: Path, victim: int
) -> None:
    tier = Tier(uri=tmp_path.as_uri(), every_steps=1)
    job = _job(cluster, tier, nbytes=LARGE)
    job.daemon(victim).arm(Trap(at="tier", match="write", count=WRITES))
    job.step += 1
    job.save(job.step)  # what is persisted is protected
    wait_until_dead(job.daemon(victim))
    (part,) = tmp_path.rglob(f".rank-{victim:05d}.*.part")
    assert 0 < part.stat().st_size < LARGE
    assert all(_check_sets(job, tier) == [] for _ in range(3))
    cluster.restart(job.nodes[victim])
    job.readdress()
    first = _wait_set(job, tier, Generation(0, 0))
    assert first == job.generation


def test_sets_follow_training_and_old_ones_go(
    cluster: RawCluster, tmp_path: Path, policy: PolicyType
) -> None:
    tier = Tier(uri=tmp_path.as_uri(), every_steps=2, keep=2, keep_every=4)
    job = _job(cluster, tier, policy=policy)
    for _ in range(5):
        newest = job.train(2)
        _wait_announced(job, newest)
        # A set is announced when old ones are gone.
        assert _check_sets(job, tier)[0] == newest
    assert [generation.step for generation in _check_sets(job, tier)] == [10, 8, 4]
    assert job.daemon(0).logged("persist_given_up") == []


def test_storage_that_fails_costs_training_nothing_and_is_named(
    cluster: RawCluster, tmp_path: Path
) -> None:
    tier = Tier(uri=tmp_path.as_uri(), every_steps=1)
    job = _job(cluster, tier)
    (tmp_path / JOB).write_text("a file where the job's directory should be")
    job.train(3)
    leader = job.daemon(0)
    wait_for("the failure to be reported", lambda: _persist(leader.job(JOB))["failure"])
    job.train(2)
    (tmp_path / JOB).unlink()
    before = Generation(job.epoch, job.step - 1)  # an order for it may be under way
    assert _wait_set(job, tier, newer_than=before) == job.generation
    wait_for("the failure to be over", lambda: not _persist(leader.job(JOB))["failure"])


@pytest.mark.parametrize("by", ["control loop", "command"])
def test_what_is_protected_is_persisted_on_request(
    cluster: RawCluster, tmp_path: Path, by: str
) -> None:
    tier = Tier(uri=tmp_path.as_uri(), every_steps=1_000_000)
    job = _job(cluster, tier)
    newest = job.train(2)
    assert _check_sets(job, tier) == []
    # Not the leader's daemon: any will do.
    if by == "command":
        job.daemon(2).stub().Persist(trainer_pb2.PersistRequest(job=JOB), timeout=10)
    else:
        message = control_pb2.ControlMessage(persist=control_pb2.PersistNow(job=JOB))
        cluster.control.send(job.nodes[2], message)
    assert _wait_set(job, tier, Generation(0, 0)) == newest


@pytest.mark.parametrize("moves", [False, True], ids=["no member moves", "a spare takes over"])
def test_a_request_that_follows_a_new_epoch_copies_what_was_protected_before(
    cluster: RawCluster, tmp_path: Path, moves: bool
) -> None:
    """As when a node is about to be taken away: a spare takes over, and all ranks begin again."""
    tier = Tier(uri=tmp_path.as_uri(), every_s=3600.0)
    job = _job(cluster, tier)
    protected = job.train(2)
    if moves:
        job.nodes[1] = cluster.start_nodes(1)[0]
    job.form()
    for daemon in cluster.daemons:
        message = control_pb2.ControlMessage(persist=control_pb2.PersistNow(job=JOB))
        cluster.control.send(daemon, message)
    assert _wait_set(job, tier, Generation(0, 0)) == protected


def test_a_daemon_that_gets_sigterm_has_it_persisted_first(
    cluster: RawCluster, tmp_path: Path
) -> None:
    tier = Tier(uri=tmp_path.as_uri(), every_steps=4)
    job = _job(cluster, tier)
    newest = job.train(3)
    assert _check_sets(job, tier) == []
    assert job.daemon(1).kill(signal.SIGTERM) == 0
    assert _check_sets(job, tier) == [newest]


def test_a_job_without_redundancy_is_persisted_when_it_is_complete(
    cluster: RawCluster, tmp_path: Path
) -> None:
    tier = Tier(uri=tmp_path.as_uri(), every_steps=1)
    nodes = cluster.start_nodes(2)
    job = RawJob(cluster, nodes, tier=tier, redundancy=Redundancy.NONE)
    job.form()
    job.start_trainers()
    job.save(1)
    assert _wait_set(job, tier, Generation(0, 0)) == Generation(1, 1)
