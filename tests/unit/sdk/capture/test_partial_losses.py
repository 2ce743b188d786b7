"""What recoveries of snapshots without all experts lose, and how it is made up for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_run import TrainingRun, expert, loss_of

from holdfast._capture.partial_state import PartialState
from holdfast._session.unprotected import UnprotectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.experts.counts import UNKNOWN
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.token_loss import LossAccount
from holdfast_core.job.snapshots import Full, PartialExperts


@pytest.fixture
def run(make_trainer: Any, daemon: FakeDaemon) -> Iterator[TrainingRun]:
    made = TrainingRun(make_trainer(), daemon)
    yield made
    made.session.close()


def test_lost_tokens_are_counted_and_let_k_grow(
    run: TrainingRun, make_trainer: Any, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    # Of the tokens since then, only those of the experts whose turn step 3 was are safe.
    assert loss_of(run.session).at_risk == pytest.approx(20 / 120)
    assert loss_of(run.session).k == 1
    run.session.close()
    again = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=2))
    again.session.restore()
    again.save(4)
    assert loss_of(again.session).lost == pytest.approx(20 / 160)
    assert loss_of(again.session).k == 2  # 12.5 % is beyond the limit: every expert from now on
    assert loss_of(again.session).at_risk == 0
    again.session.close()


def test_each_recovery_is_recorded_with_what_all_of_them_came_to(
    run: TrainingRun, make_trainer: Any, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    report = loss_of(run.session).report
    assert report is not None
    assert (report.at_risk, report.routed, report.recoveries) == ((10, 10), (60, 60), ())
    assert loss_of(run.session).at_risk_mlt == pytest.approx(10 / 60 + 10 / 60)
    run.session.close()
    patient = PartialExperts(experts_per_layer=1, loss_limit=1)
    again = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=2), policy=patient)
    again.session.restore()
    first = RecoveryLoss(
        epoch=2,
        step=3,
        lost_tokens=20,
        plt=20 / 120,
        mlt=10 / 60 + 10 / 60,
        k_before=1,
        k_after=1,
        total_tokens=20,
        total_plt=20 / 120,
        total_mlt=10 / 60 + 10 / 60,
    )
    earlier = again.session.counters.loss.report
    assert earlier is not None and earlier.recoveries == (first,)  # before anything is saved again
    again.save(4)
    again.session.close()
    last = TrainingRun(make_trainer(seed=6), FakeDaemon(tmp_path, epoch=3))
    last.session.restore()
    loss = loss_of(last.session)
    assert loss.report is not None
    assert loss.report.recoveries[0] == first
    second = loss.report.recoveries[1]
    assert (second.epoch, second.step, second.total_tokens) == (3, 4, 20 + second.lost_tokens)
    assert (second.k_before, second.k_after) == (1, 2)
    assert loss.lost_mlt == second.total_mlt == pytest.approx(2 * second.total_tokens / 160)
    last.session.close()


def test_a_second_recovery_from_one_snapshot_counts_once(
    run: TrainingRun, make_trainer: Any, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    run.session.close()
    for epoch in (2, 3):
        again = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=epoch))
        again.session.restore()
        report = again.session.counters.loss.report
        assert report is not None
        assert [(each.epoch, each.total_tokens) for each in report.recoveries] == [(epoch, 20)]
        again.session.close()


def test_a_snapshot_of_before_recoveries_were_recorded_can_be_read() -> None:
    ledger = ExpertLedger.start([expert(0, 0)])
    state = PartialState(
        ledger=ledger,
        account=LossAccount.start(),
        k=1,
        marks={},
        measures=UNKNOWN,
        replenishing=Replenishing.start(),
    )
    document = state.to_dict()
    del document["recoveries"], document["routed"]
    assert PartialState.from_dict(document) == state


def test_experts_that_went_back_get_more_capacity_until_they_made_up_for_it(
    run: TrainingRun, make_trainer: Any, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    assert run.session.capacity_factors(0, 5) == [1.0] * 5
    assert run.session.capacity_room == 1.0
    run.session.close()
    again = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=2))
    again.session.restore()  # two experts went back by a step of 10 tokens
    assert again.session.capacity_factors(0, 5) == [1.0, 1.0, 1.0, 1.0, 1.1]
    assert again.session.capacity_factors(1, 5) == [1.0, 1.0, 1.0, 1.1, 1.0]
    assert again.session.capacity_factors(2, 3) == [1.0] * 3  # an unknown layer
    again.save(4)  # 10 tokens of the 110 that each owes
    again.session.close()

    last = TrainingRun(make_trainer(seed=6), FakeDaemon(tmp_path, epoch=3)).session
    last.restore()
    assert last.capacity_room == 1.1
    last.count_tokens(0, [0, 0, 0, 500, 99])
    assert last.capacity_factors(0, 5) == [1.0, 1.0, 1.0, 1.0, 1.1]
    last.count_tokens(0, [0, 0, 0, 0, 1])
    assert last.capacity_factors(0, 5) == [1.0] * 5
    assert last.capacity_factors(1, 5) == [1.0, 1.0, 1.0, 1.1, 1.0]
    assert last.capacity_room == 1.1  # other ranks may owe more: until the next restore
    last.close()


def test_a_second_recovery_of_one_snapshot_does_not_double_what_is_owed(
    run: TrainingRun, make_trainer: Any, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    run.session.close()
    for epoch in (2, 3):
        session = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=epoch)).session
        session.restore()
        session.count_tokens(0, [0, 0, 0, 0, 109])
        assert session.capacity_factors(0, 5)[4] == 1.1
        session.count_tokens(0, [0, 0, 0, 0, 1])
        assert session.capacity_factors(0, 5)[4] == 1.0
        session.close()


def test_a_full_snapshot_leaves_nothing_to_make_up_for(
    make_trainer: Any, daemon: FakeDaemon, tmp_path: Path
) -> None:
    run = TrainingRun(make_trainer(), daemon, policy=Full())
    for step in (1, 2, 3):
        run.save(step)
    run.session.close()
    again = TrainingRun(make_trainer(), FakeDaemon(tmp_path, epoch=2), policy=Full()).session
    assert again.restore() == 3
    assert (again.capacity_factors(0, 5), again.capacity_room) == ([1.0] * 5, 1.0)
    again.close()


def test_a_session_without_a_daemon_multiplies_capacities_by_1() -> None:
    session = UnprotectedSession()
    session.count_tokens(0, [1, 2, 3])
    assert (session.capacity_factors(0, 3), session.capacity_room) == ([1.0] * 3, 1.0)
