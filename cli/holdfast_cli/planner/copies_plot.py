"""Draws an expert plan. Imported only if a plot is asked for, because matplotlib takes a second to
load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from holdfast_cli.planner.plan_plot import BEST, LIMIT, LOST, OTHER, write_figure
from holdfast_core.elastic_experts.plans import ExpertPlan


def write_copies_plot(path: Path, plan: ExpertPlan, *, title: str) -> None:
    """Draw `plan` into a file, in the format of its suffix: .png, .svg or .pdf.

    Raises:
        StorageError: when the file cannot be written.
    """
    write_figure(path, draw_copies(plan, title=title))


def draw_copies(plan: ExpertPlan, *, title: str) -> Figure:
    """Draw the copies of the first layer by node and expert, the survival by number of lost nodes,
    and the busiest node of each layer."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    copies, survival, loads = figure.subplots(1, 3, width_ratios=(4, 3, 3))
    figure.suptitle(f"{title}: copies of experts", fontweight="bold", fontsize=13)
    _draw_copies(copies, plan)
    _draw_survival(survival, plan)
    _draw_loads(loads, plan)
    return figure


def _draw_copies(axes: Axes, plan: ExpertPlan) -> None:
    counts = plan.chosen.counts[0]
    order = np.argsort(counts.sum(axis=1), kind="stable")
    axes.imshow(counts[order].T, cmap="Blues", aspect="auto", vmin=0, interpolation="nearest")
    axes.set_title("layer 0: copies on each node (darker: more)", loc="left", fontsize=10)
    axes.set_xlabel("experts, fewest copies first")
    axes.set_ylabel("node")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if len(order) <= 32:
        axes.set_xticks(range(len(order)), [str(expert) for expert in order], fontsize=7)


def _draw_survival(axes: Axes, plan: ExpertPlan) -> None:
    for model, label, colour, style in (
        (plan.recovery, "placed for recovery", OTHER, "-"),
        (plan.balance, "placed for balance", LOST, "-"),
        (plan.chosen, "this plan", BEST, "--"),
    ):
        lost = range(len(model.survival.cases))
        axes.plot(
            lost,
            [100 * model.survival.probability(k) for k in lost],
            label=label,
            color=colour,
            linestyle=style,
            marker="o" if len(lost) <= 32 else "",
        )
    axes.set_title("a live copy of every expert", loc="left", fontsize=10)
    axes.set_xlabel("lost nodes")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("% of the sets of so many nodes")
    axes.legend(fontsize=8, frameon=False)


def _draw_loads(axes: Axes, plan: ExpertPlan) -> None:
    over = [
        max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0 for loads in plan.node_loads
    ]
    axes.bar(range(len(over)), over, color=BEST)
    axes.axhline(1.0, color=LIMIT, linestyle="--", linewidth=1.2)
    axes.set_ylim(0, max(over) * 1.15)
    axes.set_title("busiest node", loc="left", fontsize=10)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("tokens, in those of the mean node")
