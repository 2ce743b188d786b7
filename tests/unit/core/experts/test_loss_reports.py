from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from expert_worlds import after_full_snapshot, generation, unit, world
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.loss_reports import JobLoss, LossReport, RecoveryLoss, merged
from holdfast_core.experts.token_loss import LossAccount, recovery_loss


def report(**changes: Any) -> LossReport:
    """One rank of two layers."""
    one = LossReport(
        ranks=1,
        k=1,
        experts_max=8,
        limit=0.05,
        layers=(0, 2),
        at_risk=(4, 1),
        routed=(100, 50),
        lost=(6, 0),
    )
    return replace(one, **changes)


def recovery(epoch: int, **changes: Any) -> RecoveryLoss:
    one = RecoveryLoss(
        epoch=epoch,
        step=7,
        lost_tokens=6,
        plt=0.01,
        mlt=0.02,
        k_before=1,
        k_after=2,
        total_tokens=6,
        total_plt=0.01,
        total_mlt=0.02,
    )
    return replace(one, **changes)


def test_a_rank_reports_its_own_tokens_and_the_losses_of_all() -> None:
    ledger = after_full_snapshot(world([2, 2])).routed({unit(0, 0): 6, unit(1, 1): 2})
    ledger = ledger.captured(generation(1), [unit(0, 0)]).routed({unit(0, 0): 1})
    account = LossAccount.start().after({unit(1, 0): 5}, k=1)
    found = LossReport.of_rank(ledger, account, (), k=1, experts_max=2, limit=0.1)
    assert (found.layers, found.at_risk, found.routed, found.lost) == (
        (0, 1),
        (1, 2),
        (7, 2),
        (0, 5),
    )
    assert found.risk.plt == pytest.approx(3 / 9)
    assert found.risk.mlt == pytest.approx(1 / 7 + 2 / 2)


def test_ranks_are_added_up_and_their_ratios_are_not_averaged() -> None:
    """One rank lost half of 10 tokens, the other none of 990: half a percent, not a quarter."""
    little = report(layers=(0,), at_risk=(5,), routed=(10,), lost=(20,))
    much = report(layers=(0,), at_risk=(0,), routed=(990,), lost=(20,))
    both = merged([little, much])
    assert both is not None
    assert both.ranks == 2
    assert both.risk.plt == both.risk.mlt == pytest.approx(5 / 1000)
    assert both.life.plt == pytest.approx(20 / 1000)  # every rank knows all 20


def test_ranks_of_different_layers_are_put_beside_each_other() -> None:
    first = report(layers=(0,), at_risk=(1,), routed=(10,), lost=(4,))
    second = report(layers=(0, 3), at_risk=(0, 2), routed=(0, 40), lost=(4, 5))
    both = merged([second, first])
    assert both is not None
    assert (both.layers, both.at_risk, both.routed) == ((0, 3), (1, 2), (10, 40))
    assert both.lost == (4, 5)
    assert both.risk.mlt == pytest.approx(1 / 10 + 2 / 40)


def test_k_and_losses_come_from_the_report_with_the_newest_recovery() -> None:
    old = report(recoveries=(recovery(2),))
    new = report(k=2, lost=(9, 9), recoveries=(recovery(2), recovery(3)))
    for reports in ([old, new], [new, old]):
        both = merged(reports)
        assert both is not None
        assert (both.k, both.lost, both.newest) == (2, (9, 9), recovery(3))


def test_no_reports_merge_into_none() -> None:
    assert merged([]) is None


RANKS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(50, 99), st.integers(50, 99)),
    min_size=1,
    max_size=6,
)


@given(RANKS, st.integers(1, 5))
def test_it_does_not_matter_which_ranks_share_a_node(
    ranks: list[tuple[int, int, int, int]], each: int
) -> None:
    reports = [report(at_risk=(a, b), routed=(c, d)) for a, b, c, d in ranks]
    nodes = [merged(reports[i : i + each]) for i in range(0, len(reports), each)]
    assert merged(node for node in nodes if node) == merged(reports)


def test_a_part_of_the_world_estimates_the_whole() -> None:
    assert report(lost=(6, 0), routed=(100, 50)).plt_of(4) == pytest.approx(6 / 600)


def test_the_figures_of_a_job_show_whether_the_limit_is_passed() -> None:
    within = JobLoss.of(report(lost=(5, 0), routed=(80, 20)))
    assert (within.lost, within.passed, within.captures_all) == (0.05, False, False)
    assert (within.at_risk, within.at_risk_mlt) == (0.05, 4 / 80 + 1 / 20)
    assert (within.lost_mlt, within.lost_tokens, within.routed_tokens) == (5 / 80, 5, 100)
    beyond = JobLoss.of(report(lost=(5, 1), routed=(80, 20), k=8))
    assert (beyond.passed, beyond.captures_all) == (True, True)


def test_the_record_of_a_recovery_has_the_running_total() -> None:
    assignments = {0: 100, 1: 50}
    account = LossAccount.start().after({unit(0, 0): 10}, k=1)
    lost = {unit(0, 1): 5, unit(1, 0): 5}
    record = RecoveryLoss.of(
        recovery_loss(lost, assignments),
        account.after(lost, k=1),
        epoch=3,
        line=generation(9),
        k_before=1,
        k_after=2,
    )
    assert record == RecoveryLoss(
        epoch=3,
        step=9,
        lost_tokens=10,
        plt=10 / 150,
        mlt=5 / 100 + 5 / 50,
        k_before=1,
        k_after=2,
        total_tokens=20,
        total_plt=20 / 150,
        total_mlt=15 / 100 + 5 / 50,
    )
    assert RecoveryLoss.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    "change", [{"plt": None}, {"plt": -0.1}, {"mlt": float("nan")}, {"epoch": "one"}]
)
def test_an_invalid_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="loss of a recovery"):
        RecoveryLoss.from_dict({**recovery(2).to_dict(), **change})


@pytest.mark.parametrize("change", [{"at_risk": (1,)}, {"limit": float("nan")}, {"limit": 1.5}])
def test_a_report_whose_numbers_do_not_fit_together_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError):
        report(**change)
