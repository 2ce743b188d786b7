"""Draws a job's history. Imported only when a plot is asked for, because matplotlib takes a second
to load."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from holdfast_cli.commands.recorded_recoveries import History, RecoveryRecord, RecoveryStage
from holdfast_cli.planner.plan_plot import BEST, LIMIT, LOST, OTHER, REFUSED, write_figure

COLOURS = dict(zip(RecoveryStage, (OTHER, REFUSED, LOST, BEST, "#7bc47f"), strict=True))
SHOWN_MAX = 40
"""Most recoveries drawn as bars, the newest ones."""


def write_history_plot(path: Path, history: History, *, title: str) -> None:
    """Draw `history` into a file, in the format of its suffix: .png, .svg or .pdf.

    Raises:
        StorageError: when the file cannot be written.
    """
    write_figure(path, draw_history(history, title=title))


def draw_history(history: History, *, title: str) -> Figure:
    """Draw the stages of each recovery as a bar, and recoveries and lost tokens over time."""
    shown = list(history.recoveries)[-SHOWN_MAX:]
    figure = Figure(figsize=(13, 2.6 + 0.3 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    stages, over_time = figure.subplots(1, 2, width_ratios=(5, 4))
    count = sum(not each.is_start for each in history.recoveries)
    figure.suptitle(f"{title}: {count} recoveries", fontweight="bold", fontsize=13)
    _draw_stages(stages, shown)
    _draw_over_time(over_time, history.recoveries)
    return figure


def _draw_stages(axes: Axes, shown: Sequence[RecoveryRecord]) -> None:
    for row, each in enumerate(shown):
        since = 0.0
        for stage in RecoveryStage:
            until = each.seconds(stage)
            if until is not None and until > since:
                axes.barh(row, until - since, left=since, color=COLOURS[stage], height=0.7)
                since = until
    for stage, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=stage.value)
    names = [f"epoch {each.epoch}" + (" (start)" if each.is_start else "") for each in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title("stages of each recovery", loc="left", fontsize=10)
    axes.set_xlabel("seconds since the first sign of a loss")
    axes.legend(fontsize=8, frameon=False)


def _draw_over_time(axes: Axes, recoveries: Sequence[RecoveryRecord]) -> None:
    times = [float(date2num(datetime.fromtimestamp(each.noticed_at))) for each in recoveries]
    counts: list[int] = []
    for each in recoveries:
        counts.append((counts[-1] if counts else 0) + (not each.is_start))
    axes.step(times, counts, where="post", color=BEST, marker="o", markersize=4)
    axes.set_title("recoveries until then", loc="left", fontsize=10)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    lossy = [(at, each.loss) for at, each in zip(times, recoveries, strict=True) if each.loss]
    if lossy:
        tokens = axes.twinx()
        portions = [100 * loss.total_plt for _, loss in lossy]
        tokens.step([at for at, _ in lossy], portions, where="post", color=LIMIT, linestyle="--")
        tokens.set_ylabel("% of all tokens lost (dashed)")
        tokens.set_ylim(bottom=0)
