"""REFT figure 8: `docs/reliability.md` explains what these tests pin down."""

from __future__ import annotations

from math import exp, inf
from pathlib import Path

import pytest

from holdfast_cli.planner.models.reliability import (
    FailureModel,
    checkpoint_survival,
    parity_survival,
    survival,
    time_to,
)
from holdfast_core.errors import InvalidJobError

NOTE = Path(__file__).parents[5] / "docs" / "reliability.md"

CAPTION_DAYS = {"parity": 16.22, "checkpoint": 0.5}
"""Figure 8's caption, for the threshold 0.9 and c = 1.3."""

SAMPLES = [100 * i / 999 for i in range(1000)]
"""A curve of 1000 points over 100 days."""


def figure_8(*, nodes: int = 3072, group_size: int = 6, shape: float = 1.3) -> FailureModel:
    return FailureModel(
        nodes=nodes,
        group_size=group_size,
        hardware_rate=1e-4,
        software_rate=1e-5,
        shape=shape,
    )


def days(model: FailureModel) -> tuple[float, float]:
    return (
        time_to(lambda t: parity_survival(model, t), 0.9),
        time_to(lambda t: checkpoint_survival(model, t), 0.9),
    )


def sampled_days(model: FailureModel) -> tuple[float, float]:
    """The same, read off curves drawn through `SAMPLES`: the first point below the threshold."""
    return (
        next(t for t in SAMPLES if parity_survival(model, t) < 0.9),
        next(t for t in SAMPLES if checkpoint_survival(model, t) < 0.9),
    )


def test_figure_8_with_every_gpu_a_node_and_rates_per_day() -> None:
    with_parity, with_checkpoints = days(figure_8())
    assert with_parity == pytest.approx(CAPTION_DAYS["parity"], rel=0.005)
    assert with_parity == pytest.approx(16.178, abs=0.001)
    assert with_checkpoints == pytest.approx(0.408, abs=0.001)


def test_figure_8_caption_to_the_digit_when_read_off_a_curve_of_1000_points() -> None:
    with_parity, with_checkpoints = sampled_days(figure_8())
    assert round(with_parity, 2) == CAPTION_DAYS["parity"]
    assert round(with_checkpoints, 2) == CAPTION_DAYS["checkpoint"]


def test_the_note_has_the_figures_that_the_formulas_give() -> None:
    rows = [
        f"| {nodes} | {n} | {with_parity:.2f} | {with_checkpoints:.2f} |"
        for nodes, n in ((3072, 6), (3072, 8), (768, 6), (512, 6), (384, 6))
        for with_parity, with_checkpoints in [days(figure_8(nodes=nodes, group_size=n))]
    ]
    assert "\n".join(rows) in NOTE.read_text(encoding="utf-8")


def test_another_reading_meets_the_caption_but_departs_from_the_equations() -> None:
    # λ t^c / c in place of λ t^c, groups of 8, and failures of software counted in equation 2.
    both = FailureModel(
        nodes=3072, group_size=8, hardware_rate=1.1e-4 / 1.3, software_rate=0.0, shape=1.3
    )
    with_parity, with_checkpoints = days(both)
    assert with_parity == pytest.approx(CAPTION_DAYS["parity"], rel=0.01)
    assert with_checkpoints == pytest.approx(CAPTION_DAYS["checkpoint"], rel=0.01)


def test_survival_is_the_weibull_distribution_of_equation_1() -> None:
    assert survival(0.01, 1.5, 4.0) == exp(-0.01 * 8)
    assert survival(0.01, 1.0, 0.0) == 1.0


@pytest.mark.parametrize("time", [0.0, 0.1, 3.0, 40.0, 1e4])
def test_survival_with_parity_is_equation_2_as_written(time: float) -> None:
    model = figure_8()
    p, n, k = survival(1e-4, 1.3, time), 6, 3072
    as_written = (p**n + n * (1 - p) * p ** (n - 1)) ** (k / n)
    assert parity_survival(model, time) == pytest.approx(as_written, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("time", [0.0, 0.1, 3.0, 40.0])
def test_survival_without_redundancy_is_equation_3_as_written(time: float) -> None:
    as_written = survival(1e-4, 1.3, time) ** 3072 * survival(1e-5, 1.3, time) ** 3072
    assert checkpoint_survival(figure_8(), time) == pytest.approx(as_written)


@pytest.mark.parametrize("shape", [1.0, 1.3, 1.5, 2.0])
def test_parity_survives_longer_than_no_redundancy_for_every_shape_of_figure_8(
    shape: float,
) -> None:
    with_parity, with_checkpoints = days(figure_8(shape=shape))
    assert with_parity > 8 * with_checkpoints


def test_the_time_to_a_threshold_is_where_the_curve_crosses_it() -> None:
    crossing = time_to(lambda t: exp(-0.25 * t), 0.9)
    assert exp(-0.25 * crossing) == pytest.approx(0.9, rel=1e-12)
    assert time_to(lambda t: exp(-1e9 * t), 0.5) == pytest.approx(0.6931471805599453e-9)


def test_what_never_fails_survives_for_ever() -> None:
    model = FailureModel(nodes=4, group_size=2, hardware_rate=0.0, software_rate=0.0)
    assert days(model) == (inf, inf)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_a_threshold_that_is_not_a_probability_is_refused(threshold: float) -> None:
    with pytest.raises(InvalidJobError, match="a survival threshold lies between 0 and 1"):
        time_to(lambda t: exp(-t), threshold)


@pytest.mark.parametrize(("nodes", "group_size"), [(4, 1), (4, 5), (1, 1), (0, 2)])
def test_impossible_groups_are_refused(nodes: int, group_size: int) -> None:
    with pytest.raises(InvalidJobError, match=f"nodes={nodes} with group_size={group_size}"):
        figure_8(nodes=nodes, group_size=group_size)


@pytest.mark.parametrize("rates", [(-1.0, 0.0, 1.0), (0.0, float("nan"), 1.0), (0.0, 0.0, 0.0)])
def test_impossible_rates_are_refused(rates: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidJobError, match=f"hardware_rate={rates[0]}"):
        FailureModel(
            nodes=4,
            group_size=2,
            hardware_rate=rates[0],
            software_rate=rates[1],
            shape=rates[2],
        )
