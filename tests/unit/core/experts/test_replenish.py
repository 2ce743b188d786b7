from __future__ import annotations

import json
from typing import Any

import pytest
from expert_worlds import unit

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.replenish import CAPACITY_BOOST, Replenishing

A, B = unit(0, 0), unit(0, 1)


def test_an_expert_has_more_capacity_until_a_tenth_more_made_up_for_its_loss() -> None:
    """10 lost tokens: 100 tokens with normal capacity, 110 with 10 % more."""
    tracker = Replenishing.start().after_recovery({A: 10, B: 0})
    assert (tracker.capacity_factor(A), tracker.capacity_factor(B)) == (CAPACITY_BOOST, 1.0)
    tracker = tracker.after_step({A: 109, B: 500})
    assert tracker.capacity_factor(A) == CAPACITY_BOOST
    tracker = tracker.after_step({A: 1})
    assert tracker.capacity_factor(A) == 1.0
    assert tracker == Replenishing.start()


def test_losses_of_several_recoveries_add_up() -> None:
    tracker = Replenishing.start().after_recovery({A: 2}).after_step({A: 11}).after_recovery({A: 1})
    assert tracker.owed == {A: 22}


def test_an_expert_without_tokens_waits_for_them() -> None:
    tracker = Replenishing.start().after_recovery({A: 1})
    assert tracker.after_step({B: 100}).after_step({}) == tracker


def test_a_loss_is_not_below_0() -> None:
    with pytest.raises(InvalidJobError, match="unit layer0/expert0 lost -3 tokens"):
        Replenishing.start().after_recovery({A: -3})


def test_a_tracker_survives_json() -> None:
    tracker = Replenishing.start().after_recovery({A: 3, B: 4})
    assert Replenishing.from_dict(json.loads(json.dumps(tracker.to_dict()))) == tracker


@pytest.mark.parametrize("change", [{"format": 9}, {"owed": {"expert": 1}}, {"owed": 1}])
def test_a_tracker_that_cannot_be_read_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="replenishing tracker"):
        Replenishing.from_dict({**Replenishing.start().to_dict(), **change})
