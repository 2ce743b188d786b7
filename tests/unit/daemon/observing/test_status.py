"""What heartbeats say of a rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.errors import InvalidJobError, MemoryBudgetError, ProtocolError
from holdfast_core.experts.loss_reports import LossReport, RecoveryLoss
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_core.states import EndReason
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.overview import (
    RankOverview,
    current_loss,
    current_plan,
    exit_code,
    last_lines,
    loss_report,
    overview,
    problem,
    rank_health,
)
from holdfast_daemon.engine.state import JobMemory, RankRecord, TrainerSession
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.observing.status import WORK_REPORTED_S, as_json, job_state
from holdfast_daemon.parity.traffic import NodeTraffic
from holdfast_protos import control_pb2
from holdfast_protos.expert_plans import plan_from_proto, plan_to_proto


@pytest.fixture
def memory() -> JobMemory:
    place = Member(index=0, node="a", memory_id="m", peer_address="", bulk_address="")
    membership = Membership(job="job", epoch=5, members=(place,), nproc_per_node=1, groups=((0,),))
    memory = JobMemory(job="job", node="a", memory_id="m", incarnation=1)
    memory.begin_epoch(membership)
    return memory


def session(epoch: int) -> TrainerSession:
    return TrainerSession(id="s", rank=0, epoch=epoch, layout_id="l", pid=1, claimed=True)


def test_a_rank_is_healthy_with_a_session_of_this_epoch(memory: JobMemory) -> None:
    assert rank_health(memory, 0, RankRecord(session=session(5))) == "HEALTHY"


def test_a_session_of_an_ended_epoch_is_not_at_work(memory: JobMemory) -> None:
    assert rank_health(memory, 0, RankRecord(session=session(4))) == "UNHEALTHY"


def test_a_fenced_daemon_calls_no_rank_healthy(memory: JobMemory) -> None:
    memory.epoch_seen = 6
    assert rank_health(memory, 0, RankRecord(session=session(5))) == "UNHEALTHY"


def test_a_rank_whose_session_broke_off_is_offline(memory: JobMemory) -> None:
    assert rank_health(memory, 0, RankRecord(lost_in=5)) == "OFFLINE"


def test_an_exit_code_holds_for_the_epoch_in_which_the_worker_failed(memory: JobMemory) -> None:
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.memory = memory
    membership = memory.membership
    assert membership is not None
    engine.worker_exited(4, 0, 3)  # says nothing of epoch 5
    assert exit_code(memory, memory.rank(0)) == 0
    engine.worker_exited(5, 0, 137, "why", EndReason.HARDWARE_FAULT, "Xid")
    assert exit_code(memory, memory.rank(0)) == 137
    assert last_lines(memory, memory.rank(0)) == "why"
    [rank] = overview(memory).ranks
    assert (rank.exit_reason, rank.kernel_messages) == (EndReason.HARDWARE_FAULT, "Xid")
    memory.begin_epoch(replace(membership, epoch=6))
    assert exit_code(memory, memory.rank(0)) == 0
    assert last_lines(memory, memory.rank(0)) == ""
    [rank] = overview(memory).ranks
    # A report of the hardware may come late, so it is told for one more epoch.
    assert (rank.exit_reason, rank.kernel_messages) == (EndReason.UNKNOWN, "Xid")
    memory.begin_epoch(replace(membership, epoch=7))
    [rank] = overview(memory).ranks
    assert (rank.exit_reason, rank.kernel_messages) == (EndReason.UNKNOWN, "")


def test_a_refused_arena_is_the_problem_until_another_fits_or_the_epoch_ends(
    memory: JobMemory,
) -> None:
    assert memory.membership is not None
    memory.rank(0).refused = (5, "20 bytes, and 1 are left")
    found = problem(memory)
    assert found.text.endswith("without memory for snapshots: 20 bytes, and 1 are left")
    assert found.code == MemoryBudgetError.code
    memory.begin_epoch(replace(memory.membership, epoch=6))
    assert "without memory" not in problem(memory).text
    assert problem(memory).code == ""


def test_an_exit_code_of_a_rank_that_lives_elsewhere_is_refused(memory: JobMemory) -> None:
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.memory = memory
    with pytest.raises(InvalidJobError, match="rank 1 is not on node a"):
        engine.worker_exited(5, 1, 3)


def recovery(epoch: int) -> RecoveryLoss:
    return RecoveryLoss(
        epoch=epoch,
        step=1,
        lost_tokens=2,
        plt=0.1,
        mlt=0.1,
        k_before=1,
        k_after=1,
        total_tokens=2,
        total_plt=0.1,
        total_mlt=0.1,
    )


def loss(*recoveries: int) -> LossReport:
    return LossReport(
        ranks=1,
        k=1,
        experts_max=4,
        limit=0.05,
        layers=(0,),
        at_risk=(3,),
        routed=(20,),
        lost=(2,),
        recoveries=tuple(map(recovery, recoveries)),
    )


def test_heartbeats_add_up_the_ranks_at_work_and_name_the_newest_recovery(
    memory: JobMemory,
) -> None:
    membership = memory.membership
    assert membership is not None
    memory.revise(replace(membership, nproc_per_node=2))
    assert current_loss(memory) is None
    memory.rank(0).session = memory.rank(1).session = session(5)
    memory.rank(0).loss, memory.rank(1).loss = loss(4, 5), loss(4, 5)
    loss_now = current_loss(memory)
    assert loss_now is not None
    assert (loss_now.ranks, loss_now.at_risk, loss_now.routed, loss_now.lost) == (
        2,
        (6,),
        (40,),
        (2,),
    )
    assert loss_now.recoveries == (recovery(5),)


def test_heartbeats_tell_the_newest_expert_plan_of_the_ranks_at_work(memory: JobMemory) -> None:
    first = PlanReport(
        epoch=5,
        step=0,
        cause=PlanCause.START,
        ranks=2,
        rank_seats=3,
        layers=2,
        experts=6,
        least_nodes=2,
        busiest_node=1.125,
    )
    memory.rank(0).plan = first
    assert current_plan(memory) is None
    memory.rank(0).session = session(5)
    assert current_plan(memory) == first
    memory.rank(0).session = session(4)
    assert current_plan(memory) is None
    newest = replace(first, step=9, cause=PlanCause.LOADS)
    assert plan_from_proto(plan_to_proto(newest)) == newest
    message = plan_to_proto(newest)
    message.cause = "whim"
    with pytest.raises(ProtocolError, match="whim"):
        plan_from_proto(message)


def test_what_a_rank_reported_in_an_ended_epoch_is_kept_for_people_alone(memory: JobMemory) -> None:
    memory.rank(0).session = session(4)
    memory.rank(0).loss = loss(4)
    assert current_loss(memory) is None
    assert loss_report(memory) == loss(4)


def hosted(memory: JobMemory, now: float = 0.0) -> JobHost:
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.memory = memory
    storage = SimpleNamespace(arena_bytes=0, parity_bytes=0)
    worker = SimpleNamespace(parity_traffic=NodeTraffic().of_job())
    return cast(JobHost, SimpleNamespace(engine=engine, storage=storage, worker=worker, now=now))


def test_heartbeats_carry_all_that_is_known_of_a_rank(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosted(memory)
    known = overview(memory)
    fields = control_pb2.RankState.DESCRIPTOR.fields_by_name
    samples = {str: EndReason.OOM_KILLED, int: 7, bool: True, float: 7.0}
    values: dict[str, Any] = {
        name: samples[type(field.default_value)]
        for name, field in fields.items()
        if name in RankOverview.__dataclass_fields__ and field.message_type is None
    }
    assert {"exit_code", "hardware_fault_in", "kernel_messages", "unprotected"} <= values.keys()
    told = replace(known, ranks=(replace(known.ranks[0], **values),))
    monkeypatch.setattr(host.engine, "overview", lambda: told)
    [rank] = job_state(host).ranks
    assert {name: getattr(rank, name) for name in values} == values


def test_a_launcher_that_reports_no_more_may_see_work_that_nobody_knows_of(
    memory: JobMemory,
) -> None:
    [rank] = job_state(hosted(memory, 1.0)).ranks
    assert not rank.work_reported
    hosted(memory).engine.worked(5, [0], 1.0)
    hosted(memory).engine.worked(5, [], 3.0)
    [rank] = job_state(hosted(memory, 3.0 + WORK_REPORTED_S)).ranks
    assert rank.work_reported and rank.since_work_s == 2.0 + WORK_REPORTED_S
    [rank] = job_state(hosted(memory, 3.5 + WORK_REPORTED_S)).ranks
    assert not rank.work_reported and rank.since_work_s == 2.5 + WORK_REPORTED_S


def test_the_catalogue_gets_recoveries_only_of_epochs_that_existed(memory: JobMemory) -> None:
    memory.rank(0).loss = loss(4, 5, 6)
    host = hosted(memory)
    document = as_json(host, host.engine.overview())
    assert document["losses"] == [recovery(4).to_dict(), recovery(5).to_dict()]
    assert document["ranks"][0]["loss"] == {  # type: ignore[index]
        "experts_per_layer": 1,
        "at_risk": 3 / 20,
        "at_risk_mlt": 3 / 20,
    }
