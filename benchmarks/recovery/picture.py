"""The plot of `make bench NAME=recovery`: when each phase is reached after a fault."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from benchmarks.measure import Figure
from benchmarks.recovery.figures import key
from benchmarks.recovery.runs import Kind, Mode
from benchmarks.recovery.traces import Phase

COLOURS = {
    Phase.NOTICED: "#9aa5b1",
    Phase.AGREED: "#3d4852",
    Phase.STARTED: "#c0392b",
    Phase.FORMED: "#e0a030",
    Phase.LINE: "#7d5ba6",
    Phase.RESTORED: "#1f6feb",
    Phase.STEP: "#0b6e4f",
}


def draw(path: Path, rows: Mapping[str, Figure]) -> None:
    """Draw a bar for each fault and mode: the medians of the phases, one after the other, and the
    range of the next step."""
    shown = [(mode, kind) for kind in Kind for mode in Mode if key(mode, kind, Phase.STEP) in rows]
    figure = Drawing(figsize=(10, 1.6 + 0.6 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (mode, kind) in enumerate(shown):
        since = 0.0
        for phase, colour in COLOURS.items():
            until = rows[key(mode, kind, phase)].value
            label = phase if place == 0 else None
            axes.barh(place, until - since, left=since, color=colour, height=0.6, label=label)
            since = until
        step = rows[key(mode, kind, Phase.STEP)]
        axes.hlines(place, step.low, step.high, color="black", linewidth=1)
        axes.annotate(
            f"{step.value:.2f} s",
            (max(step.high, step.value), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(shown)), [f"{kind.words}, {mode}" for mode, kind in shown])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since SIGKILL, medians (line: range of the next step)")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLOURS), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
