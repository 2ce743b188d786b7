"""What heartbeats say of a rank."""

from __future__ import annotations

import pytest

from holdfast_core.values import MemberPlace, Membership
from holdfast_daemon.describe import rank_state
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
