from __future__ import annotations

import json
from typing import Any

import pytest
from expert_worlds import after_full_snapshot, any_worlds, generation, unit, world
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.experts.token_loss import (
    LossAccount,
    TokenLoss,
    at_risk,
    check_limit,
    portion,
    recovery_loss,
)


def test_plt_is_a_portion_of_all_and_mlt_the_sum_over_layers() -> None:
    """Two layers, 1000 tokens sent to 2 experts each: 100 lost of 2000, and 50 of 2000."""
    loss = TokenLoss(lost={0: 100, 1: 50}, assignments={0: 2000, 1: 2000})
    assert loss.plt == pytest.approx(150 / 4000)
    assert loss.mlt == pytest.approx(0.05 + 0.025)


def test_layers_weigh_alike_in_mlt_whatever_they_processed() -> None:
    loss = TokenLoss(lost={0: 10, 3: 10}, assignments={0: 100, 3: 1000})
    assert loss.mlt == pytest.approx(0.11)
    assert loss.plt == pytest.approx(20 / 1100)


@pytest.mark.parametrize(
    ("lost", "total", "expected"),
    [(0, 0, 0.0), (1, 0, 1.0), (5, 4, 1.0), (0, 9, 0.0), (1, 4, 0.25)],
)
def test_a_portion_is_from_0_to_1(lost: int, total: int, expected: float) -> None:
    assert portion(lost, total) == expected


def test_no_layers_lose_nothing() -> None:
    loss = TokenLoss(lost={}, assignments={})
    assert (loss.plt, loss.mlt) == (0.0, 0.0)


def test_what_is_at_risk_is_what_a_recovery_now_would_lose() -> None:
    table = world([2, 1])
    ledger = after_full_snapshot(table).routed({unit(0, 0): 6, unit(0, 1): 2, unit(1, 0): 8})
    ledger = ledger.captured(generation(1), [unit(0, 0)])
    risk = at_risk(ledger)
    _, lost = ledger.recovered(
        {unit(0, 0): generation(1), unit(0, 1): generation(0), unit(1, 0): generation(0)}
    )
    assert risk == recovery_loss(lost, ledger.assignments)
    assert (risk.lost, risk.plt) == ({0: 2, 1: 8}, 10 / 16)


@given(any_worlds(), st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(0, 3))
def test_at_risk_agrees_with_the_recovery_for_any_history(
    table: ExpertTable, tokens: list[int], every: int
) -> None:
    ledger = after_full_snapshot(table)
    units = table.units
    for step, count in enumerate(tokens, 1):
        who = units[step * 7 % len(units)]
        ledger = ledger.routed({who: count})
        if every and step % every == 0:
            ledger = ledger.captured(generation(step), [units[step % len(units)]])
    newest = {u: held[-1].generation for u, held in ledger.versions.items()}
    after, lost = ledger.recovered(newest)
    assert at_risk(ledger).lost_tokens == sum(lost.values())
    assert at_risk(after).lost_tokens == 0
    assert sum(after.tokens.values()) + sum(lost.values()) == sum(tokens)


def test_an_account_adds_up_over_recoveries() -> None:
    account = LossAccount.start()
    account = account.after({unit(0, 0): 5, unit(1, 0): 7}, k=1)
    account = account.after({unit(0, 1): 3, unit(1, 0): 0}, k=2).after({}, k=2)
    assert account.recoveries == 3
    assert account.lost == {0: 8, 1: 7}
    assert account.lost_by_k == {1: 12, 2: 3}
    assert account.loss({0: 100, 1: 100}).plt == pytest.approx(0.075)


LOSSES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(1, 4)), max_size=9)


@given(LOSSES, st.integers(0, 9))
def test_a_restart_between_any_two_recoveries_changes_nothing(
    losses: list[tuple[int, int, int]], restart: int
) -> None:
    account = resumed = LossAccount.start()
    for at, (layer, tokens, k) in enumerate(losses):
        account = account.after({unit(layer, 0): tokens}, k)
        resumed = resumed.after({unit(layer, 0): tokens}, k)
        if at == restart:
            resumed = LossAccount.from_dict(json.loads(json.dumps(resumed.to_dict())))
    assert resumed == account


def test_a_recovery_after_a_restored_ledger_counts_only_what_came_after_it() -> None:
    """The ledger goes back with the step, so tokens that are executed again are not lost."""
    table = world([2])
    first, second = table.units
    ledger = after_full_snapshot(table).routed({first: 10, second: 4})
    ledger = ledger.captured(generation(1), [first])
    restored = ExpertLedger.from_dict(ledger.to_dict())
    ledger = ledger.routed({first: 100, second: 100})
    _, lost = restored.recovered({first: generation(1), second: generation(0)})
    assert lost == {first: 0, second: 4}


def test_a_limit_is_passed_only_above_it_and_the_text_shows_it() -> None:
    assert not check_limit("PLT", 0.05, 0.05).passed
    assert check_limit("PLT", 0.0501, 0.05).passed
    assert check_limit("PLT", 0.1, 0.05).reason == (
        "PLT is 10.00%, above the limit of 5.00%; capture more experts in each snapshot"
    )
    assert check_limit("PLT", 0.01, 0.05).reason == "PLT is 1.00%, within the limit of 5.00%"


def test_a_loss_is_not_below_0() -> None:
    with pytest.raises(InvalidJobError, match="unit layer0/expert0 lost -1 tokens"):
        LossAccount.start().after({unit(0, 0): -1}, k=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "loss account of format 0: this version of Holdfast reads format 1"),
        ({"lost": {"a": 1}}, "the loss account cannot be read"),
        ({"lost_by_k": 3}, "the loss account cannot be read"),
    ],
)
def test_an_account_that_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        LossAccount.from_dict({**LossAccount.start().to_dict(), **change})
