"""Draws the comparison of snapshot policies. Imported only if a plot is asked for, because
matplotlib takes a second to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from holdfast_cli.planner.models.policy_comparison import (
    NEGLIGIBLE,
    Assumptions,
    Comparison,
    PolicyCost,
)
from holdfast_cli.planner.policy_view import name_of
from holdfast_core.errors import StorageError
from holdfast_core.quantities import format_portion

BEST, OTHER, REFUSED, LOST, LIMIT = "#1f6feb", "#8fa3bf", "#d5d9e0", "#e8a33d", "#c0392b"
HIDDEN = "#e9f6ed"


def write_plot(path: Path, comparison: Comparison, assumed: Assumptions, *, title: str) -> None:
    """Draw `comparison` into a file, in the format of its suffix: .png, .svg or .pdf.

    Raises:
        StorageError: when the file cannot be written.
    """
    write_figure(path, draw(comparison, assumed, title=title))


def write_figure(path: Path, figure: Figure) -> None:
    """Write `figure` into a file, in the format of its suffix.

    Raises:
        StorageError: when the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"--plot {path} cannot be written: {error.strerror}") from error


def draw(comparison: Comparison, assumed: Assumptions, *, title: str) -> Figure:
    """Draw three columns of bars, one row for each policy: the time of the copy beside the step
    that hides it, the portion of time lost, and the portion of tokens lost."""
    costs = comparison.costs
    figure = Figure(figsize=(12, 2.4 + 0.42 * len(costs)), layout="constrained")
    FigureCanvasAgg(figure)
    copy, time, tokens = figure.subplots(1, 3, sharey=True, width_ratios=(4, 3, 3))
    figure.suptitle(
        f"{title}: {name_of(comparison.best)} recommended", fontweight="bold", fontsize=13
    )
    colours = [_colour(cost, comparison.best) for cost in costs]

    _bars(copy, [cost.copy_s for cost in costs], colours, lambda seconds: f"{seconds:.3g} s")
    copy.axvline(assumed.step_s, color=LIMIT, linestyle="--", linewidth=1.2)
    copy.axvspan(0, assumed.step_s, color=HIDDEN, linewidth=0, zorder=0)
    copy.set_title("copy of one snapshot", loc="left", fontsize=10)
    copy.set_xlabel(f"seconds; a step of {assumed.step_s:g} s (dashed) hides what is left of it")

    stalled = [100 * cost.stalled for cost in costs]
    redone = [100 * cost.redone for cost in costs]
    lost = [a + b for a, b in zip(stalled, redone, strict=True)]
    _bars(time, lost, colours, lambda percent: format_portion(percent / 100))
    time.barh(range(len(costs)), stalled, color=LOST, height=0.36, label="by waiting for copies")
    time.axvline(100 * NEGLIGIBLE, color=LIMIT, linestyle=":", linewidth=1)
    time.set_title("time lost", loc="left", fontsize=10)
    time.set_xlabel("% of the training (dotted: negligible)")
    if any(stalled):
        time.legend(loc="lower right", fontsize=8, frameon=False)

    portions = [100 * cost.lost_tokens for cost in costs]
    _bars(tokens, portions, colours, lambda percent: format_portion(percent / 100))
    if max(portions) > 50 * assumed.loss_limit:
        tokens.axvline(100 * assumed.loss_limit, color=LIMIT, linestyle="--", linewidth=1.2)
    tokens.set_title("tokens lost to experts", loc="left", fontsize=10)
    tokens.set_xlabel(f"% of all routed; the limit is {100 * assumed.loss_limit:g} %")

    copy.set_yticks(range(len(costs)), [_label(cost) for cost in costs])
    copy.invert_yaxis()
    for tick, cost in zip(copy.get_yticklabels(), costs, strict=True):
        if cost is comparison.best:
            tick.set_fontweight("bold")
            tick.set_color(BEST)
    return figure


def _bars(
    axes: Axes, values: Sequence[float], colours: Sequence[str], text: Callable[[float], str]
) -> None:
    bars = axes.barh(range(len(values)), values, color=colours, height=0.72)
    labels = axes.bar_label(bars, [text(value) for value in values], padding=4, fontsize=9)
    for label in labels:  # readable where a line passes behind it
        label.set_bbox({"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1})
    axes.set_xlim(0, 1.22 * max(*values, 1e-6))
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(cost: PolicyCost, best: PolicyCost) -> str:
    if cost is best:
        return BEST
    return REFUSED if cost.objection else OTHER


def _label(cost: PolicyCost) -> str:
    every = "every step" if cost.interval_steps == 1 else f"every {cost.interval_steps} steps"
    return f"{name_of(cost)}\n{cost.objection or every}"
