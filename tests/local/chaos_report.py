"""What a chaos run showed: `report.json`, and a page with a picture of it for people.

Only computes and shows.
"""

from __future__ import annotations

import html
import io
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_run import Chaos, Fault
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROWS_MAX = 30
ROW_S_MIN = 10.0
SPAN_S_MIN = 0.12
"""Shorter recoveries are drawn that long, to be seen at all."""
COLOURS = {
    "ranks": "#4e79a7",
    "daemons": "#f28e2b",
    "nodes": "#e15759",
    "control loop": "#b07aa1",
    "bytes": "#59a14f",
    "tmpfs": "#9c755f",
    "Redis": "#76b7b2",
}
OTHER = "#8a8f98"
VIOLATED = "#d4002a"
GREY = "#8a8f98"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of all faults of one kind."""

    kind: str
    lane: str
    count: int
    while_recovering: int
    from_parity: int
    median_s: float
    worst_s: float
    worst_lost_steps: int
    violations: int


def summarise(faults: Sequence[Fault]) -> list[Row]:
    """By kind, in the order of the alphabet."""
    rows = []
    for kind in sorted({fault.kind for fault in faults}):
        mine = [fault for fault in faults if fault.kind == kind]
        seconds = [fault.seconds for fault in mine if fault.seconds is not None]
        rows.append(
            Row(
                kind=kind,
                lane=mine[0].lane,
                count=len(mine),
                while_recovering=sum(fault.while_recovering for fault in mine),
                from_parity=sum("parity" in fault.source for fault in mine),
                median_s=statistics.median(seconds) if seconds else 0.0,
                worst_s=max(seconds, default=0.0),
                worst_lost_steps=max((f.lost_steps or 0 for f in mine), default=0),
                violations=sum(bool(fault.violation) for fault in mine),
            )
        )
    return rows


def verdict(chaos: Chaos) -> str:
    """The outcome in a line."""
    held = "every invariant held" if not chaos.violations else "INVARIANTS DID NOT HOLD"
    return (
        f"{len(chaos.faults)} faults in {chaos.rounds} rounds: {len(chaos.violations)} violations, "
        f"{chaos.wrong_bytes} wrong bytes in {chaos.restores} restores, {chaos.fenced} writes of "
        f"older epochs refused; {held}"
    )


def write(chaos: Chaos, directory: Path) -> None:
    """`report.json` and `report.html` into the directory."""
    rows = summarise(chaos.faults)
    document = {
        "seed": chaos.seed,
        "faults": len(chaos.faults),
        "violations": len(chaos.violations),
        "wrong_bytes": chaos.wrong_bytes,
        "rounds": chaos.rounds,
        "seconds": round(chaos.ended_s, 1),
        "restores": chaos.restores,
        "fenced": chaos.fenced,
        "machine": f"{platform.machine()}, Linux {platform.release()}",
        "what_did_not_hold": chaos.violations,
        "kinds": [asdict(row) for row in rows],
        "story": [asdict(fault) for fault in chaos.faults],
    }
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "report.html").write_text(_page(chaos, rows))


# --- the pictures ---------------------------------------------------------------------------------


def timeline(faults: Sequence[Fault], seconds: float) -> Figure:
    """The run as a seismograph draws a day: rows of time, a bar for each fault, as long as its
    recovery took, in the lane and colour of what was hit."""
    row_s = max(ROW_S_MIN, seconds / ROWS_MAX)
    rows = max(1, int(-(-seconds // row_s)))
    lanes = [*COLOURS, *sorted({f.lane for f in faults} - set(COLOURS))]
    height = 0.84 / len(lanes)
    figure = Figure(figsize=(13, 1.1 + 0.42 * rows), layout="constrained")
    axes = figure.subplots()
    for row in range(rows):
        axes.axhspan(row - 0.46, row + 0.46, color=GREY, alpha=0.07, lw=0)
        for index, lane in enumerate(lanes):
            spans = [
                (fault.time_s - row * row_s, max(fault.seconds or 0.0, SPAN_S_MIN * row_s / 60))
                for fault in faults
                if fault.lane == lane and int(fault.time_s // row_s) == row
            ]
            low = row - 0.42 + index * height
            axes.broken_barh(
                spans, (low, height * 0.9), color=COLOURS.get(lane, OTHER), alpha=0.85, lw=0
            )
    bad = [fault for fault in faults if fault.violation]
    axes.plot(
        [f.time_s % row_s for f in bad],
        [f.time_s // row_s for f in bad],
        "X",
        color=VIOLATED,
        markersize=14,
        clip_on=False,
    )
    axes.set(xlim=(0, row_s), ylim=(rows - 0.5, -0.5), xlabel="seconds of the row")
    axes.set_yticks(range(rows), [_clock(row * row_s) for row in range(rows)])
    _quiet(axes)
    handles = [Line2D([], [], lw=6, color=COLOURS.get(lane, OTHER), label=lane) for lane in lanes]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(lanes), frameon=False)
    return figure


def recoveries(faults: Sequence[Fault]) -> Figure:
    """How long each recovery took, by kind."""
    kinds = sorted({fault.kind for fault in faults}, reverse=True)
    figure = Figure(figsize=(13, 0.9 + 0.34 * max(1, len(kinds))), layout="constrained")
    axes = figure.subplots()
    for index, kind in enumerate(kinds):
        mine = [f for f in faults if f.kind == kind and f.seconds is not None]
        spread = [index + 0.56 * ((f.number * 0.618) % 1.0 - 0.5) for f in mine]
        colour = COLOURS.get(mine[0].lane, OTHER) if mine else OTHER
        seconds = [max(f.seconds or 0.0, 0.01) for f in mine]
        axes.scatter(seconds, spread, s=9, color=colour, alpha=0.45, lw=0)
        if seconds:
            axes.plot([statistics.median(seconds)] * 2, [index - 0.4, index + 0.4], color="#444")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="seconds from the fault until all ranks had restored; the line is the median")
    axes.set_yticks(range(len(kinds)), kinds)
    _quiet(axes)
    return figure


def _quiet(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=GREY, alpha=0.2)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "chaos"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


# --- the page -------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; max-width: 1180px;
       margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { margin-bottom: 0; } .sub { color: #6b7280; margin-top: .2rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.6rem 0; }
.tile { flex: 1; min-width: 8rem; border: 1px solid #e5e7eb; border-radius: 10px;
        padding: .7rem 1rem; }
.tile b { display: block; font-size: 1.7rem; font-variant-numeric: tabular-nums; }
.tile span { color: #6b7280; } .good b { color: #1a7f37; } .bad b, .bad { color: #d4002a; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .28rem .6rem; border-bottom: 1px solid #eceef1; }
th:first-child, td:first-child { text-align: left; } th { color: #6b7280; font-weight: 500; }
i { display: inline-block; width: .7rem; height: .7rem; border-radius: 3px; margin-right: .5rem; }
"""


def _page(chaos: Chaos, rows: Sequence[Row]) -> str:
    found = "".join(f"<li class=bad>{html.escape(text)}</li>" for text in chaos.violations)
    pictures = (
        "<h2>The run</h2><p class=sub>Read it like a page of text: each row is a stretch of time, "
        "each bar a fault, as long as the recovery from it took.</p>"
        f"{_svg(timeline(chaos.faults, chaos.ended_s))}"
        f"<h2>Recoveries</h2>{_svg(recoveries(chaos.faults))}"
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>Chaos, seed {chaos.seed}</title><style>{_STYLE}</style>"
        f"<h1>Chaos</h1><p class=sub>seed {chaos.seed}, {_clock(chaos.ended_s)} minutes; "
        f"repeat with <code>make chaos ARGS=&quot;--seed {chaos.seed}&quot;</code></p>"
        f"<div class=tiles>{_tiles(chaos)}</div>"
        f"{f'<h2>What did not hold</h2><ul>{found}</ul>' if found else ''}"
        f"{pictures if chaos.faults else ''}{_table(rows)}</html>\n"
    )


def _tiles(chaos: Chaos) -> str:
    seconds = [fault.seconds for fault in chaos.faults if fault.seconds is not None]
    good, bad = "tile good", "tile bad"
    tiles = (
        ("tile", f"{len(chaos.faults):,}", "faults of real processes"),
        (bad if chaos.violations else good, str(len(chaos.violations)), "violations"),
        (bad if chaos.wrong_bytes else good, str(chaos.wrong_bytes), "wrong bytes"),
        ("tile", f"{chaos.restores:,}", "restores compared"),
        ("tile", f"{chaos.fenced:,}", "old writers refused"),
        ("tile", f"{statistics.median(seconds) if seconds else 0:.2f} s", "median recovery"),
        ("tile", f"{max(seconds, default=0):.1f} s", "worst recovery"),
    )
    return "".join(
        f"<div class='{kind}'><b>{value}</b><span>{what}</span></div>"
        for kind, value, what in tiles
    )


def _table(rows: Sequence[Row]) -> str:
    heads = (
        "fault", "count", "while recovering", "restored from parity", "median s", "worst s",
        "most steps lost", "violations",
    )  # fmt: skip
    body = "".join(
        f"<tr><td><i style='background:{COLOURS.get(row.lane, OTHER)}'></i>{row.kind}</td>"
        f"<td>{row.count}</td><td>{row.while_recovering}</td><td>{row.from_parity}</td>"
        f"<td>{row.median_s:.2f}</td><td>{row.worst_s:.2f}</td><td>{row.worst_lost_steps}</td>"
        f"<td>{row.violations}</td></tr>"
        for row in rows
    )
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f"<h2>By kind</h2><table><tr>{head}</tr>{body}</table>"
