"""The plot of `make bench NAME=loss`: loss curves of all runs, and what recoveries change."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.loss.figures import smoothed
from benchmarks.loss.runs import Run

PLAIN, RECOVERED, FAULT = "#9aa5b1", "#0b6e4f", "#c0392b"
SMOOTHED_OVER = 20


def draw(
    path: Path, fault_free: Sequence[Run], recovered: Sequence[Run], kills: Sequence[int]
) -> None:
    """Draw the training losses above, on batches that are new to the model, and their differences
    below, with the standard deviation of the fault-free seeds around 0."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, change = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    plain, again = ([_curve(run) for run in runs] for runs in (fault_free, recovered))
    steps = [line.step for line in fault_free[0].lines][SMOOTHED_OVER:]
    for curves, colour, width, label in (
        (plain, PLAIN, 2.6, "fault-free"),
        (again, RECOVERED, 0.8, "recovered"),
    ):
        for number, curve in enumerate(curves):
            name = None if number else label
            loss.plot(steps, curve, color=colour, linewidth=width, label=name)
    spread = [statistics.stdev(values) for values in zip(*plain, strict=True)]
    change.fill_between(
        steps, [-s for s in spread], spread, color=PLAIN, alpha=0.4, label="spread of the seeds"
    )
    apart = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(plain, again, strict=True)]
    for curve in apart:
        change.plot(steps, curve, color=RECOVERED, linewidth=0.6, alpha=0.6)
    mean = [statistics.fmean(values) for values in zip(*apart, strict=True)]
    change.plot(steps, mean, color=RECOVERED, linewidth=2, label="recovered - fault-free, mean")
    for axes in (loss, change):
        for step in kills:
            axes.axvline(step, color=FAULT, linestyle="--", linewidth=1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper right", fontsize=9)
    loss.set_ylabel(f"loss, nats per byte\n(mean of {SMOOTHED_OVER} steps)")
    change.set_ylabel("difference")
    change.set_xlabel("step; dashed: SIGKILL")
    figure.suptitle(f"{len(fault_free)} seeds, with and without {len(kills)} recoveries")
    figure.savefig(path, dpi=150)


def _curve(run: Run) -> list[float]:
    return smoothed([line.loss for line in run.lines], SMOOTHED_OVER)[SMOOTHED_OVER:]
