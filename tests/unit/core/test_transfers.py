from __future__ import annotations

import pytest
from expert_worlds import unit, world

from holdfast_core.errors import InvalidJobError
from holdfast_core.transfers import Transfer, plan_transfers
from holdfast_core.units import UnitKey

A, B, C = unit(0, 0), unit(0, 1), unit(0, 2)
GRADIENTS, FULL = Transfer.GRADIENTS, Transfer.FULL


@pytest.mark.parametrize(
    ("previous", "current", "interval", "mismatched", "kinds"),
    [
        pytest.param([], [A, B], 1, [], {A: FULL, B: FULL}, id="first"),
        pytest.param([A, B], [A, B], 1, [], {A: GRADIENTS, B: GRADIENTS}, id="continued"),
        pytest.param([A, B], [B, C], 1, [], {B: GRADIENTS, C: FULL}, id="changed"),
        pytest.param([A, B], [A, B], 2, [], {A: FULL, B: FULL}, id="not at every step"),
        pytest.param([A, B], [A, B], 1, [B], {A: GRADIENTS, B: FULL}, id="copy differs"),
        pytest.param([A], [], 1, [A], {}, id="nothing selected"),
    ],
)
def test_gradients_are_enough_while_selection_goes_on(
    previous: list[UnitKey],
    current: list[UnitKey],
    interval: int,
    mismatched: list[UnitKey],
    kinds: dict[UnitKey, Transfer],
) -> None:
    plan = plan_transfers(previous, current, interval_steps=interval, mismatched=mismatched)
    assert plan.kinds == kinds


def test_bytes_are_those_of_weights_or_of_the_whole_expert() -> None:
    table = world([3], nbytes=100)
    plan = plan_transfers([A, B], [A, B, C], interval_steps=1, mismatched=[B])
    assert plan.nbytes(table) == 20 + 100 + 100


def test_the_reason_counts_both_kinds() -> None:
    plan = plan_transfers([A, B], [A, B, C], interval_steps=1, mismatched=[B])
    assert plan.reason == (
        "gradients for 1 experts, the full state for 2, 1 of them because their copies differed"
    )
    sparse = plan_transfers([A], [A], interval_steps=5)
    assert sparse.reason.endswith("for 1, because snapshots are 5 steps apart")


def test_an_interval_below_a_step_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="interval_steps=0"):
        plan_transfers([], [], interval_steps=0)
