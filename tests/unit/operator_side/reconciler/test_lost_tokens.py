"""Jobs whose snapshots leave experts out: what their recoveries cost, and when it is too much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from virtual_world import World, make_job

from holdfast_core.experts.loss_reports import JobLoss, LossReport, RecoveryLoss
from holdfast_operator.control.heartbeats import job_view
from holdfast_operator.reconciler.observe.counters import Counters, from_document
from holdfast_operator.reconciler.observe.views import ConditionType, ControlState
from holdfast_operator.reconciler.report.conditions import conditions
from holdfast_operator.reconciler.report.losses import loss_condition, loss_text
from holdfast_protos import control_pb2
from holdfast_protos.losses import loss_to_proto

KIND = "TokenLossWithinLimit"
SOME_EXPERTS = {"snapshot": {"policy": {"type": "PartialExperts"}}}


def recovery(epoch: int, lost: int, *, before: int = 1, after: int = 1) -> RecoveryLoss:
    return RecoveryLoss(
        epoch=epoch,
        step=10,
        lost_tokens=lost,
        plt=0.01,
        mlt=0.01,
        k_before=before,
        k_after=after,
        total_tokens=lost,
        total_plt=0.01,
        total_mlt=0.01,
    )


def losses(*, at_risk: int = 0, routed: int = 100, lost: int = 0, **more: Any) -> LossReport:
    """Report of one rank."""
    one = LossReport(
        ranks=1,
        k=1,
        experts_max=8,
        limit=0.05,
        layers=(0,),
        at_risk=(at_risk,),
        routed=(routed,),
        lost=(lost,),
    )
    return replace(one, **more)


def lossy() -> World:
    """A job of four ranks that train, one on each node."""
    world = World(make_job(spec=SOME_EXPERTS))
    world.settle(3.0)
    world.train(10)
    world.look()
    return world


def report_losses(world: World, *reports: LossReport) -> None:
    """Have the members' daemons report these, one each."""
    world.losses = dict(zip(world.nodes_of_members(), reports, strict=False))
    world.look()


def test_a_job_that_captures_everything_has_no_such_condition() -> None:
    world = World(make_job())
    world.settle(3.0)
    report_losses(world, *[losses(lost=50)] * 4)
    assert KIND not in {c.type.value for c in world.decision.conditions}
    assert world.state.losses is None


def test_nothing_is_known_until_every_rank_has_reported() -> None:
    world = lossy()
    assert world.condition(KIND)[:2] == (None, "NotReported")
    report_losses(world, *[losses(lost=50)] * 3)
    assert world.condition(KIND)[:2] == (None, "NotReported")
    report_losses(world, *[losses()] * 4)
    assert world.condition(KIND)[:2] == (True, "WithinLimit")
    assert "no recovery has lost tokens" in world.condition(KIND)[2]


def test_the_condition_names_the_call_that_a_trainer_without_counts_lacks() -> None:
    world = lossy()
    report_losses(world, *[losses(routed=0)] * 4)
    status, reason, message = world.condition(KIND)
    assert (status, reason) == (None, "TokensNotCounted")
    assert "session.count_tokens(layer, counts)" in message


def test_ranks_are_added_up_before_anything_is_divided() -> None:
    """19 tokens of 10 + 3 · 130: within 5 %, though more than that of the ranks' mean."""
    world = lossy()
    report_losses(world, losses(at_risk=5, routed=10, lost=19), *[losses(routed=130, lost=19)] * 3)
    assert world.state.losses is not None
    assert world.state.losses.lost == pytest.approx(19 / 400)
    assert world.state.losses.at_risk == pytest.approx(5 / 400)
    assert world.condition(KIND)[:2] == (True, "WithinLimit")


def test_passing_the_limit_is_reported_once_with_what_was_lost_and_what_is_done() -> None:
    world = lossy()
    report_losses(world, *[losses(lost=21, k=2, recoveries=(recovery(2, 21, after=2),))] * 4)
    status, reason, message = world.condition(KIND)
    assert (status, reason) == (False, "LimitPassed")
    assert "lost 21 of 400 tokens" in message
    assert "PLT 5.25%" in message
    assert "beyond the limit of 5.00%" in message
    assert "the newest recovery, of epoch 2, lost 21" in message
    assert "K grew from 1 to 2 then: snapshots hold 2 of 8 experts" in message
    for _ in range(3):
        world.look()
    assert world.messages("TokenLossLimitPassed") == [message]
    assert [e.warning for e in world.events if e.reason == "TokenLossLimitPassed"] == [True]


def test_the_limit_can_be_passed_a_second_time() -> None:
    world = lossy()
    report_losses(world, *[losses(lost=21)] * 4)
    report_losses(world, *[losses(lost=21, routed=200)] * 4)  # training goes on
    assert world.condition(KIND)[:2] == (True, "WithinLimit")
    report_losses(world, *[losses(lost=50, routed=200)] * 4)
    assert len(world.messages("TokenLossLimitPassed")) == 2


def test_what_was_known_stands_during_a_recovery() -> None:
    world = lossy()
    report_losses(world, *[losses(lost=21)] * 4)
    report_losses(world, losses(lost=0), losses(lost=0))
    assert world.condition(KIND)[:2] == (False, "LimitPassed")
    report_losses(world, *[losses(lost=30, recoveries=(recovery(3, 9),))] * 4)
    assert len(world.messages("TokenLossLimitPassed")) == 1


def test_a_control_loop_that_starts_again_does_not_report_the_limit_again() -> None:
    world = lossy()
    report_losses(world, *[losses(lost=21, recoveries=(recovery(2, 21),))] * 4)
    known, reports = world.state.losses, world.losses
    assert known is not None
    world.losses = {}
    world.restart()
    assert world.state.losses == known
    world.look()
    assert world.condition(KIND)[:2] == (False, "LimitPassed")
    world.losses = reports
    world.settle(3.0)
    assert len(world.messages("TokenLossLimitPassed")) == 1


def test_an_invalid_stored_record_is_ignored() -> None:
    world = lossy()
    report_losses(world, *[losses(recoveries=(recovery(2, 0),))] * 4)
    document = world.stored()
    document["tokenLosses"]["newest"]["plt"] = -1.0
    assert from_document(document, now=0.0, wall=0.0) == Counters()


def test_the_condition_shows_that_all_experts_are_captured() -> None:
    loss = JobLoss.of(losses(lost=9, k=8, recoveries=(recovery(4, 9, before=4, after=8),)))
    condition = loss_condition(make_job(spec=SOME_EXPERTS), ControlState(losses=loss))
    assert condition is not None
    assert "K grew from 4 to 8 then: snapshots hold all experts" in (condition.message)


def test_an_ended_job_keeps_its_figures() -> None:
    world = lossy()
    report_losses(world, *[losses(lost=21)] * 4)
    world.finish()
    world.settle(1.0)
    world.losses = {}
    world.look()
    assert world.phase() == "Complete"
    assert world.condition(KIND)[:2] == (False, "LimitPassed")


def test_conditions_keep_their_order() -> None:
    world = lossy()
    found = conditions(world.job, world.observed(), world.state, world.now, "")
    absent = {
        *(ConditionType.FULL_STRENGTH, ConditionType.STORAGE_REACHABLE, ConditionType.PERSISTED),
        *(ConditionType.INSECURE, ConditionType.DAEMONS_OUTDATED, ConditionType.PODS_REFUSED),
        ConditionType.EXPERTS_REPLICATED,
    }
    assert [c.type for c in found] == [t for t in ConditionType if t not in absent]


def test_a_heartbeat_brings_the_report_of_its_ranks() -> None:
    report = losses(at_risk=3, lost=4, recoveries=(recovery(2, 4),))
    state = control_pb2.JobState(job="job", loss=loss_to_proto(report))
    assert job_view(state).loss == report
    assert job_view(control_pb2.JobState(job="job")).loss is None


def test_the_figures_fit_into_a_line() -> None:
    text = loss_text(JobLoss.of(losses(at_risk=2, lost=4, k=2)))
    assert text == (
        "tokens lost 4.00% (MLT 0.0400, limit 5.00%)  at risk now 2.00% (MLT 0.0200)"
        "  in a snapshot 2 of 8 experts"
    )
