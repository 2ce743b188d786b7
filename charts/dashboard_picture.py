"""Draws the dashboard from what a Prometheus holds: a look at every panel without Grafana.

    .venv/bin/python charts/dashboard_picture.py --prometheus http://localhost:9090 \
        --minutes 30 --out dashboard.png

Sections, titles, legends and units are the dashboard's, with all its variables at All. Panels
without data are left out, and printed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import FuncFormatter

FILE = Path(__file__).resolve().parent / "holdfast" / "files" / "dashboard.json"
POINTS = 240
COLUMNS = 3
LEGEND_MAX = 8
WITHIN_S = 30.0
DAY_S = 86_400.0
UNITS = {"s": " s", "bytes": "B", "binBps": "B/s", "ops": "/s", "percentunit": "%", "short": ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Part of the past that is drawn, in seconds since 1970."""

    start: float
    end: float
    rate_interval_s: float

    @property
    def step_s(self) -> float:
        return (self.end - self.start) / POINTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a panel."""

    legend: str
    days: Sequence[float]
    """Times in days since 1970, as matplotlib has them."""
    values: Sequence[float]


def main() -> int:
    """Draw the picture; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--prometheus", required=True, metavar="URL", help="such as http://localhost:9090")
    add("--minutes", type=float, default=180.0, help="until now (default: %(default)g)")
    add("--rate-seconds", type=float, default=60.0, help="span of rates (default: %(default)g)")
    add("--out", type=Path, default=Path("dashboard.png"), help="(default: %(default)s)")
    options = parser.parse_args()
    now = time.time()
    span = Span(start=now - 60 * options.minutes, end=now, rate_interval_s=options.rate_seconds)
    empty = draw(options.prometheus, span, options.out)
    for title in empty:
        print(f"no data: {title}")
    print(f"wrote {options.out}")
    return 0


def draw(url: str, span: Span, out: Path) -> list[str]:
    """Draw all panels that have data into `out`; return the titles of the others."""
    found: list[tuple[str, dict[str, Any], list[Line]]] = []
    empty = []
    for section, panel in _panels():
        lines = [line for each in panel["targets"] for line in _lines(url, each, span)]
        if lines:
            found.append((section, panel, lines))
        else:
            empty.append(panel["title"])
    rows = max(1, -(-len(found) // COLUMNS))
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(6 * COLUMNS, 2.8 * rows), squeeze=False, layout="constrained"
    )
    for axes, (section, panel, lines) in zip(grid.flat, found, strict=False):
        _draw(axes, section, panel, lines, span)
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    figure.savefig(out, dpi=80)
    plt.close(figure)
    return empty


def _panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """(title of the section, panel)."""
    section = ""
    for panel in json.loads(FILE.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            section = panel["title"]
        else:
            yield section, panel


def _lines(url: str, target: dict[str, str], span: Span) -> Iterator[Line]:
    expression = target["expr"].replace("$__rate_interval", f"{span.rate_interval_s:g}s")
    expression = expression.replace("$__range", f"{span.end - span.start:.0f}s")
    query = {
        "query": re.sub(r"\$\w+", ".*", expression),
        **{"start": f"{span.start}", "end": f"{span.end}", "step": f"{span.step_s}"},
    }
    whole = f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(whole, timeout=WITHIN_S) as answer:
        found = json.loads(answer.read())["data"]["result"]
    for series in found:
        # A quantile of no observations is NaN.
        points = [(float(at), float(value)) for at, value in series["values"] if value != "NaN"]
        if points:
            yield Line(
                legend=_filled(target["legendFormat"], series["metric"]),
                days=[at / DAY_S for at, _ in points],
                values=[value for _, value in points],
            )


def _filled(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), legend)


def _draw(axes: Axes, section: str, panel: dict[str, Any], lines: list[Line], span: Span) -> None:
    unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    factor = 100 if unit == "%" else 1
    for line in lines:
        values = [factor * value for value in line.values]
        axes.plot(line.days, values, label=line.legend, linewidth=1.2)
    axes.set_title(f"{section}: {panel['title']}", fontsize=8, loc="left", wrap=True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{_short(value)}{unit}"))
    axes.set_xlim(span.start / DAY_S, span.end / DAY_S)
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) <= LEGEND_MAX:
        axes.legend(fontsize=6, frameon=False)


def _short(value: float) -> str:
    """A number with a prefix for large ones."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {prefix}"
    return f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
