"""What heartbeats say of a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.values import MemberPlace, Membership
from holdfast_daemon.describe import exit_code, rank_state
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.state import JobMemory, RankRecord, Session


@pytest.fixture
def memory() -> JobMemory:
    place = MemberPlace(index=0, node="a", memory_id="m", peer_address="", bulk_address="")
    membership = Membership(job="job", epoch=5, members=(place,), nproc_per_node=1, groups=((0,),))
    return JobMemory(
        job="job", node="a", memory_id="m", incarnation=1, membership=membership, me=0, epoch_seen=5
    )


def session(epoch: int) -> Session:
    return Session(id="s", rank=0, epoch=epoch, layout_id="l", pid=1, claimed=True)


def test_a_rank_is_healthy_with_a_session_of_this_epoch(memory: JobMemory) -> None:
    assert rank_state(memory, 0, RankRecord(session=session(5))) == "HEALTHY"


def test_a_session_of_an_ended_epoch_is_not_at_work(memory: JobMemory) -> None:
    assert rank_state(memory, 0, RankRecord(session=session(4))) == "UNHEALTHY"


def test_a_fenced_daemon_calls_no_rank_healthy(memory: JobMemory) -> None:
    memory.epoch_seen = 6
    assert rank_state(memory, 0, RankRecord(session=session(5))) == "UNHEALTHY"


def test_a_rank_whose_session_broke_off_is_offline(memory: JobMemory) -> None:
    assert rank_state(memory, 0, RankRecord(lost_in=5)) == "OFFLINE"


def test_an_exit_code_holds_for_the_epoch_in_which_the_worker_failed(memory: JobMemory) -> None:
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.memory = memory
    membership = memory.membership
    assert membership is not None
    engine.worker_exited(4, 0, 3)  # says nothing of epoch 5
    assert exit_code(memory, memory.rank(0)) == 0
    engine.worker_exited(5, 0, 137)
    assert exit_code(memory, memory.rank(0)) == 137
    memory.membership = replace(membership, epoch=6)
    assert exit_code(memory, memory.rank(0)) == 0


def test_an_exit_code_of_a_rank_that_lives_elsewhere_is_refused(memory: JobMemory) -> None:
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.memory = memory
    with pytest.raises(InvalidJobError, match="rank 1 does not live on node a"):
        engine.worker_exited(5, 1, 3)
