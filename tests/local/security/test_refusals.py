"""What a daemon refuses, with which code and which words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from harness import RawCluster, RawJob
from raw_trainer import raw_layout, receive_descriptor
from waiting import WAIT_S, error_of

from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    InvalidJobError,
    ProtocolError,
    StaleEpochError,
    StepOrderError,
    UnknownSessionError,
    UnreachableError,
    VersionMismatchError,
)
from holdfast_protos import trainer_pb2

MEMBERS = 2


@pytest.fixture(scope="module")
def shared() -> Iterator[RawJob]:
    with RawCluster() as cluster:
        job = RawJob(cluster, cluster.start_nodes(MEMBERS))
        job.form()
        job.start_trainers()
        job.train()
        yield job


@pytest.fixture
def job(shared: RawJob) -> RawJob:
    """One running job serves all tests; none leaves it broken."""
    return shared


def _error(call: Callable[..., Any], *arguments: object) -> HoldfastError:
    with pytest.raises(grpc.RpcError) as refused:
        call(*arguments)
    return error_of(refused.value)


def test_another_version_of_the_protocol_is_refused_with_both_versions(job: RawJob) -> None:
    error = _error(job.trainers[0].hello, 99)
    assert isinstance(error, VersionMismatchError)
    assert "99" in str(error)
    assert "upgrade" in str(error)


def test_an_older_step_is_refused(job: RawJob) -> None:
    error = _error(job.trainers[0].grant, job.step)
    assert isinstance(error, StepOrderError)
    assert f"step {job.step}" in str(error)
    assert job.train().step == job.step


def test_an_unknown_session_is_refused(job: RawJob) -> None:
    request = trainer_pb2.GrantRequest(session="stranger", epoch=job.epoch, step=job.step + 1)
    error = _error(job.daemon(0).stub().Grant, request, WAIT_S)
    assert isinstance(error, UnknownSessionError)
    assert "stranger" in str(error)


def test_an_unknown_job_is_not_taken_for_a_broken_daemon(job: RawJob) -> None:
    stranger = RawJob(job.cluster, job.nodes, name="no.such.job").make_trainer(0)
    error = _error(stranger.hello)
    assert isinstance(error, UnreachableError)
    assert "no.such.job" in str(error)


def test_a_rank_that_lives_elsewhere_is_refused_with_the_ranks_that_live_here(job: RawJob) -> None:
    stranger = job.make_trainer(1)
    stranger.daemon = job.daemon(0)
    error = _error(stranger.hello)
    assert isinstance(error, InvalidJobError)
    assert "rank 1 is not on node n0" in str(error)


@pytest.mark.parametrize(
    ("layout", "kind", "words"),
    [
        (b"not a layout", CorruptError, "layout cannot be read"),
        (
            raw_layout(1, MEMBERS, 1000),
            InvalidJobError,
            "world rank 0 of 2 opens a session with the layout of rank 1 of 2",
        ),
    ],
)
def test_a_wrong_layout_is_refused(
    job: RawJob, layout: bytes, kind: type[HoldfastError], words: str
) -> None:
    trainer = job.make_trainer(0)
    trainer.join(job.epoch)
    trainer.layout = layout
    error = _error(trainer.open)
    assert isinstance(error, kind)
    assert words in str(error)
    assert job.train().step == job.step


def test_an_epoch_that_has_ended_and_one_that_has_not_begun_are_refused(job: RawJob) -> None:
    trainer = job.make_trainer(0)
    trainer.join(job.epoch)
    trainer.epoch = job.epoch + 1
    assert isinstance(_error(trainer.open), UnreachableError)
    old = job.trainers[0]
    job.trainers = job.trainers[1:]
    job.form()
    trainer.join(job.epoch)
    assert isinstance(_error(old.grant, job.step + 1), StaleEpochError)
    trainer.epoch = job.epoch - 1
    assert isinstance(_error(trainer.open), StaleEpochError)
    old.die()
    job.start_trainers()
    job.train()


def test_a_commit_that_does_not_fit_its_grant_is_refused(job: RawJob) -> None:
    trainer = job.trainers[0]
    job.step += 1
    slot = trainer.grant(job.step)
    assert slot is not None
    assert isinstance(_error(trainer.commit, 17, job.step), CorruptError)
    assert isinstance(_error(trainer.commit, slot, job.step + 1), ProtocolError)
    trainer.copy(slot, job.step)
    trainer.commit(slot, job.step)
    trainer.commit(slot, job.step)  # repeating it is harmless
    assert job.trainers[1].save(job.step)
    job.wait_protected(job.step)


def test_a_token_is_good_once(job: RawJob) -> None:
    trainer = job.trainers[0]
    for token in ("unknown", "x" * 200):
        with pytest.raises(ProtocolError):
            receive_descriptor(trainer.arena_socket, token)


def test_a_session_of_a_daemon_that_restarted_is_unknown_and_reopens_the_same_arena(
    job: RawJob,
) -> None:
    (before,) = (job.daemon(0).root / "jobs" / job.name).glob("arenas/*/arena")
    inode = before.stat().st_ino
    trainer = job.trainers[0]
    job.cluster.restart(job.nodes[0])
    job.readdress()
    assert isinstance(_error(trainer.grant, job.step + 1), UnknownSessionError)
    trainer.reopen()
    job.train(2)
    (after,) = (job.daemon(0).root / "jobs" / job.name).glob("arenas/*/arena")
    assert after == before
    assert after.stat().st_ino == inode
