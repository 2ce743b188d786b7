"""Draws simulations: ETTR over MTBF, and where the time goes. Imported only if a plot is asked for,
because matplotlib takes a second to load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from holdfast_cli.planner.simulation.inputs import duration_text
from holdfast_cli.planner.simulation.view import COLOURS, Simulated
from holdfast_core.errors import StorageError

LINES = (
    "#1f6feb", "#0b6e4f", "#6a9f58", "#8e6bbf", "#9aa5b1", "#5c6b7a", "#e8a33d", "#d5a15a",
    "#c0392b",
)  # fmt: skip
FIXED: Any = {"svg.hashsalt": "holdfast", "svg.fonttype": "none"}
"""The same picture from the same figures."""


def write_picture(path: Path, simulated: Sequence[Simulated], *, title: str) -> None:
    """Draw into a file, in the format of its suffix: .png, .svg or .pdf.

    Raises:
        StorageError: when the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context(FIXED):
            metadata = {"Date": None} if path.suffix == ".svg" else None
            draw_runs(simulated, title=title).savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise StorageError(f"--plot {path} cannot be written: {error.strerror}") from error


def draw_runs(simulated: Sequence[Simulated], *, title: str) -> Figure:
    """Draw ETTR over MTBF with bands, and, for the shortest MTBF, bars of the time lost."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    over, where = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(title, fontweight="bold", fontsize=13)
    _over_mtbf(over, simulated)
    _where(where, simulated)
    return figure


def _over_mtbf(axes: Axes, simulated: Sequence[Simulated]) -> None:
    for number, kind in enumerate(dict.fromkeys(each.kind for each in simulated)):
        rows = [each for each in simulated if each.kind is kind]
        colour = LINES[number % len(LINES)]
        x = list(range(len(rows)))
        style = "-" if rows[0].model.built else "--"
        label = kind.value if rows[0].model.built else f"{kind} (not built)"
        axes.plot(
            x,
            [each.runs.ettr for each in rows],
            style,
            color=colour,
            label=label,
            marker="o",
            markersize=4,
        )
        low, high = [each.runs.low for each in rows], [each.runs.high for each in rows]
        axes.fill_between(x, low, high, color=colour, alpha=0.06, linewidth=0)
    rates = list(dict.fromkeys(each.mtbf_s for each in simulated))
    names = ["trace" if rate is None else duration_text(rate) for rate in rates]
    axes.set_xticks(range(len(rates)), names)
    axes.set_xlabel("mean time between failures of the job; bands: 90 % of the runs")
    axes.set_title("effective training time ratio", loc="left", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower left")


def _where(axes: Axes, simulated: Sequence[Simulated]) -> None:
    worst = [each for each in simulated if each.mtbf_s == simulated[-1].mtbf_s]
    left = [0.0] * len(worst)
    for what, colour in COLOURS.items():
        widths = [100 * each.runs.portions[what] for each in worst]
        if max(widths) > 1e-6:
            axes.barh(
                range(len(worst)), widths, left=left, color=colour, label=what.value, height=0.7
            )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(worst)), [each.kind.value for each in worst])
    axes.invert_yaxis()
    rate = worst[0].mtbf_s
    name = "with the trace" if rate is None else f"at {duration_text(rate)}"
    axes.set_title(f"time lost {name}, %", loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08))
