from __future__ import annotations

from math import comb, inf, isclose, sqrt

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.intervals import (
    DIFFERENCE_FROM,
    group_loss_probability,
    group_loss_rate_per_s,
    optimal_interval_s,
    save_overhead_s,
    steps_of,
    total_overhead_s,
)

HOUR_S = 3600.0


def test_the_optimal_interval_is_that_of_young_and_daly() -> None:
    assert optimal_interval_s(10.0, 1 / (5 * HOUR_S)) == sqrt(2 * 10.0 * 5 * HOUR_S)
    assert optimal_interval_s(10.0, 1 / (5 * HOUR_S)) == 600.0


@pytest.mark.parametrize("overhead_s", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("mttf_s", [600.0, 86400.0])
def test_no_other_interval_costs_less_in_total(overhead_s: float, mttf_s: float) -> None:
    def total(interval_s: float) -> float:
        return total_overhead_s(
            save_overhead_s=overhead_s,
            interval_s=interval_s,
            total_s=30 * 86400.0,
            failure_rate_per_s=1 / mttf_s,
            restart_s=120.0,
        )

    best_s = optimal_interval_s(overhead_s, 1 / mttf_s)
    assert all(total(best_s) < total(best_s * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_total_overhead_adds_saving_recomputation_and_restarting() -> None:
    # 10 saves of 2 s; 0.5 failures, each losing half an interval of 100 s and 30 s more.
    assert total_overhead_s(
        save_overhead_s=2.0,
        interval_s=100.0,
        total_s=1000.0,
        failure_rate_per_s=0.0005,
        restart_s=30.0,
    ) == pytest.approx(10 * 2 + 0.5 * (50 + 30))


def test_only_what_computation_does_not_hide_is_overhead() -> None:
    assert save_overhead_s(3.0, 2.0) == 1.0
    assert save_overhead_s(2.0, 3.0) == 0.0


def test_a_save_that_costs_nothing_is_made_every_step() -> None:
    assert optimal_interval_s(0.0, 0.0) == 0.0
    hidden_s = optimal_interval_s(save_overhead_s(1.0, 2.0), 1e-6)
    assert hidden_s == 0.0
    assert steps_of(hidden_s, 2.0) == 1


def test_what_never_fails_needs_no_saving() -> None:
    assert optimal_interval_s(1.0, 0.0) == inf


def test_the_snapshot_interval_is_equation_9() -> None:
    t_sn, t_comp, rate = 5.0, 3.0, 1e-5
    as_written = sqrt((abs(t_sn - t_comp) + t_sn - t_comp) / rate)
    found = optimal_interval_s(save_overhead_s(t_sn, t_comp), rate)
    assert found == pytest.approx(as_written)


@pytest.mark.parametrize("n", [2, 3, 6, 100])
@pytest.mark.parametrize("lost", [0.0, 1e-12, 1e-6, 1e-3, 0.04, 0.05, 0.3, 0.9, 1.0])
def test_the_loss_of_a_group_is_the_sum_over_two_and_more_lost_nodes(n: int, lost: float) -> None:
    exact = sum(comb(n, k) * lost**k * (1 - lost) ** (n - k) for k in range(2, n + 1))
    assert isclose(group_loss_probability(lost, n), exact, rel_tol=1e-9, abs_tol=1e-300)


def test_both_ways_to_compute_the_loss_of_a_group_meet() -> None:
    at = DIFFERENCE_FROM / 8
    below, above = group_loss_probability(at * (1 - 1e-12), 8), group_loss_probability(at, 8)
    assert below == pytest.approx(above, rel=1e-9)


def test_a_large_group_of_short_lived_nodes_is_lost_for_certain() -> None:
    assert group_loss_probability(0.9, 5000) == 1.0


def test_a_group_that_is_exposed_for_longer_is_lost_more_often() -> None:
    rate = 1 / (30 * 24 * HOUR_S)
    short, long = (group_loss_rate_per_s(rate, 4, exposure_s=s) for s in (10.0, 600.0))
    # Two of four nodes within the exposure: C(4, 2) rate² exposure_s.
    assert short == pytest.approx(6 * rate**2 * 10, rel=1e-3)
    assert long == pytest.approx(6 * rate**2 * 600, rel=1e-3)


def test_an_interval_is_rounded_to_steps() -> None:
    assert steps_of(95.0, 10.0) == 10
    assert steps_of(3.0, 10.0) == 1


def test_values_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(InvalidJobError, match=r"save_overhead_s=-1\.0: give a number of at least"):
        optimal_interval_s(-1.0, 1.0)
    with pytest.raises(InvalidJobError, match="failure_rate_per_s=nan"):
        optimal_interval_s(1.0, float("nan"))
    with pytest.raises(InvalidJobError, match=r"node_loss_probability=1\.5"):
        group_loss_probability(1.5, 4)
    with pytest.raises(InvalidJobError, match="n=1: a parity group has at least 2 nodes"):
        group_loss_probability(0.5, 1)
    with pytest.raises(InvalidJobError, match=r"exposure_s=0\.0"):
        group_loss_rate_per_s(1e-6, 4, exposure_s=0.0)
    with pytest.raises(InvalidJobError, match="do not give a number of steps"):
        steps_of(inf, 1.0)
    with pytest.raises(InvalidJobError, match=r"interval_s=0\.0: an interval must be longer"):
        total_overhead_s(
            save_overhead_s=1.0,
            interval_s=0.0,
            total_s=1.0,
            failure_rate_per_s=1.0,
            restart_s=1.0,
        )
