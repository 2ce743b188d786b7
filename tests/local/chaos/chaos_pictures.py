"""Pictures of a chaos run: a timeline of its faults, and the duration of each recovery."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Sequence

from chaos_run import Fault
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROWS_MAX = 30
ROW_S_MIN = 10.0
ROW_INCHES = 0.62
COLOURS = {
    "ranks": "#4e79a7",
    "daemons": "#f28e2b",
    "nodes": "#e15759",
    "control loop": "#b07aa1",
    "bytes": "#59a14f",
    "tmpfs": "#9c755f",
    "Redis": "#76b7b2",
    "storage": "#c9a800",
    "identity": "#3b3f5c",
}
OTHER = "#8a8f98"
VIOLATED = "#d4002a"
GREY = "#8a8f98"

Bar = tuple[int, float, float]
"""(row, from, seconds)."""


def colour_of(lane: str) -> str:
    return COLOURS.get(lane, OTHER)


def timeline(faults: Sequence[Fault], seconds: float) -> Figure:
    """The run, drawn as a seismograph draws a day: rows of time, a dot for each fault in the lane
    and colour of its target, and a bar from there to its recovery."""
    row_s = max(ROW_S_MIN, seconds / ROWS_MAX)
    rows = max(1, int(-(-seconds // row_s)))
    struck = {fault.lane for fault in faults}
    lanes = [lane for lane in COLOURS if lane in struck] + sorted(struck - set(COLOURS))
    height = 0.84 / max(1, len(lanes))
    figure = Figure(figsize=(13, 1.2 + ROW_INCHES * rows), layout="constrained")
    axes = figure.subplots()
    for row in range(rows):
        axes.axhspan(row - 0.46, row + 0.46, color=GREY, alpha=0.08, lw=0)
    for index, lane in enumerate(lanes):
        offset = -0.42 + index * height
        mine = [fault for fault in faults if fault.lane == lane]
        for fault in mine:
            for row, start, length in _bars(fault, row_s, rows):
                low = row + offset + 0.1 * height
                axes.broken_barh(
                    [(start, length)],
                    (low, height * 0.8),
                    color=colour_of(lane),
                    alpha=0.55,
                    lw=0,
                )
        axes.scatter(
            [fault.time_s % row_s for fault in mine],
            [fault.time_s // row_s + offset + height / 2 for fault in mine],
            s=16,
            color=colour_of(lane),
            lw=0,
            zorder=3,
        )
    _mark_violations(axes, [fault for fault in faults if fault.violation], row_s)
    axes.set(xlim=(0, row_s), ylim=(rows - 0.5, -0.5), xlabel="seconds of the row")
    axes.set_yticks(range(rows), [clock(row * row_s) for row in range(rows)])
    _quiet(axes)
    handles = [Line2D([], [], lw=6, color=colour_of(lane), label=lane) for lane in lanes]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=max(1, len(lanes)), frameon=False
    )
    return figure


def _bars(fault: Fault, row_s: float, rows: int) -> Iterator[Bar]:
    """Bars of a recovery; one that outlasts its row continues in the next."""
    start, end = fault.time_s, fault.time_s + (fault.seconds or 0.0)
    for row in range(int(start // row_s), min(int(end // row_s), rows - 1) + 1):
        first, last = max(start, row * row_s), min(end, (row + 1) * row_s)
        yield row, first - row * row_s, last - first


def _mark_violations(axes: Axes, bad: Sequence[Fault], row_s: float) -> None:
    for number, fault in enumerate(bad, start=1):
        at = (fault.time_s % row_s, fault.time_s // row_s)
        axes.plot(*at, "X", color=VIOLATED, markersize=14, clip_on=False, zorder=4)
        axes.annotate(
            f"violation {number}",
            at,
            xytext=(10, 0),
            textcoords="offset points",
            color=VIOLATED,
            va="center",
            weight="bold",
        )


def recoveries(faults: Sequence[Fault]) -> Figure:
    """The duration of each recovery, by kind."""
    kinds = sorted({fault.kind for fault in faults}, reverse=True)
    figure = Figure(figsize=(13, 0.9 + 0.34 * max(1, len(kinds))), layout="constrained")
    axes = figure.subplots()
    for index, kind in enumerate(kinds):
        mine = [f for f in faults if f.kind == kind and f.seconds is not None]
        spread = [index + 0.56 * ((f.number * 0.618) % 1.0 - 0.5) for f in mine]
        colour = colour_of(mine[0].lane) if mine else OTHER
        seconds = [max(f.seconds or 0.0, 0.01) for f in mine]
        axes.scatter(seconds, spread, s=16, color=colour, alpha=0.55, lw=0)
        if seconds:
            axes.plot([statistics.median(seconds)] * 2, [index - 0.4, index + 0.4], color="#444")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="seconds from the fault until all ranks had restored; the line is the median")
    axes.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
    _quiet(axes)
    return figure


def _quiet(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=GREY, alpha=0.2)


def clock(seconds: float) -> str:
    """`seconds` as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def svg(figure: Figure) -> str:
    """The figure as an SVG element of a page."""
    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "chaos"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
