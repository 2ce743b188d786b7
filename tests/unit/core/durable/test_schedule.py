"""When a generation is due in the durable tier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_core.durable import schedule
from holdfast_core.durable.schedule import Facts, why_due
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Redundancy, Tier

NOTHING = Tier(uri="file:///tier")
FACTS = Facts(
    candidate=Generation(2, 120), base_step=100, elapsed_s=10, cost_s=5.0, loss_rate_per_s=1e-9
)


@pytest.mark.parametrize(
    ("tier", "facts", "due"),
    [
        (replace(NOTHING, every_steps=20), FACTS, "20 steps"),
        (replace(NOTHING, every_steps=21), FACTS, ""),
        (replace(NOTHING, every_s=10.0), FACTS, "10 s since"),
        (replace(NOTHING, every_s=10.1), FACTS, ""),
        (replace(NOTHING, every_steps=99, every_s=10.0), FACTS, "10 s since"),
        (replace(NOTHING, every_steps=99), replace(FACTS, wanted=True), "requested"),
        (replace(NOTHING, every_steps=99), replace(FACTS, redundancy_lost=True), "redundancy"),
        (NOTHING, replace(FACTS, cost_s=None), "none yet"),
        (NOTHING, FACTS, ""),
        (NOTHING, replace(FACTS, elapsed_s=3600.0), "appendix A"),
        (replace(NOTHING, every_steps=20), replace(FACTS, base_step=300), ""),
    ],
)
def test_a_generation_is_due_by_steps_by_time_or_for_a_reason(
    tier: Tier, facts: Facts, due: str
) -> None:
    assert due in why_due(tier, facts)
    assert bool(due) == bool(why_due(tier, facts))


def test_a_generation_is_due_soon_after_a_portion_of_the_interval() -> None:
    tier = replace(NOTHING, every_steps=40)
    assert why_due(tier, FACTS, portion=0.5)
    assert not why_due(tier, FACTS, portion=0.51)


def test_the_computed_interval_is_that_of_young_and_daly_within_its_bounds() -> None:
    # sqrt(2 * 10 / 1e-5) = 1414
    assert schedule.computed_interval_s(10.0, 1e-5) == pytest.approx(1414.2, abs=0.1)
    assert schedule.computed_interval_s(10.0, 1e-12) == schedule.INTERVAL_S_MAX
    assert schedule.computed_interval_s(0.1, 1.0) == schedule.INTERVAL_S_MIN
    # A tier so slow that its sets take longer than any interval still gets a pause.
    assert schedule.computed_interval_s(5000.0, 1.0) == 10_000.0


def test_observed_losses_raise_the_rate_and_groups_lower_it() -> None:
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))

    def rate(redundancy: Redundancy, lost_nodes: int) -> float:
        return schedule.loss_rate_per_s(
            groups, redundancy, lost_nodes=lost_nodes, watched_s=86400.0
        )

    assert rate(Redundancy.NONE, 0) == pytest.approx(8 / (8 * 86400 + schedule.NODE_LIFE_S))
    assert rate(Redundancy.RAIM5, 0) < rate(Redundancy.RAIM5, 3) < rate(Redundancy.NONE, 3)


@pytest.mark.parametrize(
    ("line", "persisted", "base"),
    [
        (None, None, 0),
        (None, Generation(2, 7), 7),
        (Generation(1, 50), None, 50),
        (Generation(1, 50), Generation(1, 40), 40),
        (Generation(1, 50), Generation(1, 60), 50),  # of the timeline that was left
        (Generation(1, 50), Generation(2, 70), 70),
    ],
)
def test_steps_count_from_the_newest_set_of_this_timeline(
    line: Generation | None, persisted: Generation | None, base: int
) -> None:
    candidate = Generation(2, 100)
    assert schedule.base_step(candidate, Line(generation=line, reason=""), persisted) == base


def test_pauses_double_up_to_a_limit() -> None:
    assert [schedule.backoff_s(n) for n in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert schedule.backoff_s(10_000) == schedule.RETRY_S_MAX


def test_patience_grows_with_what_is_to_be_written() -> None:
    slow = replace(NOTHING, bytes_per_s=1_000_000)
    assert schedule.patience_s(NOTHING, 0) == schedule.PATIENCE_S
    assert schedule.patience_s(slow, 10**9) == schedule.PATIENCE_S + 2000
