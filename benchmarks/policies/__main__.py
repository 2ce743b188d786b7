"""`make bench NAME=policies`: savings and risks of partial snapshots, beside the papers' figures.

Computed from units that the SDK finds in models on torch's meta device, not from formulas, and from
seeded routing traces. Writes build/bench/policies.json; the exit code is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.policies.figures import Figure, all_figures
from benchmarks.policies.papers import CHOSEN, NOT_REPRODUCED

ROOT = Path(__file__).resolve().parents[2]

TABLE_COLUMNS = 170
"""Width of a table in a file or a pipe, so that no row is wrapped."""


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="make bench NAME=policies", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=150, help="steps of the routing traces (default: %(default)s)")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "policies.json")
    options = parser.parse_args()
    figures = all_figures(options.steps)
    write_json(options.output, figures)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    print_table(console, figures)
    print_lists(console)
    print(f"wrote {options.output}")
    return 0 if all(figure.met is not False for figure in figures) else 1


def write_json(path: Path, figures: list[Figure]) -> None:
    """Write each key with its value, all columns of the table including `met` under `details`, and
    the lists of chosen inputs and missing figures."""
    report = {
        **{figure.key: figure.value for figure in figures},
        "chosen": CHOSEN,
        "not_reproduced": NOT_REPRODUCED,
        "details": {
            figure.key: {**dataclasses.asdict(figure), "met": figure.met} for figure in figures
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_table(console: Console, figures: list[Figure]) -> None:
    """Print the figures beside the papers' and their targets."""
    table = Table(title="Partial snapshots, from captured units", title_justify="left")
    for name in ("figure", "value", "paper", "target", "", "note"):
        table.add_column(name, justify="right" if name in ("value", "paper") else "left")
    for figure in figures:
        bounds = [
            f"{sign} {bound:.4g}"
            for sign, bound in (("≥", figure.at_least), ("≤", figure.at_most))
            if bound is not None
        ]
        table.add_row(
            figure.what,
            f"{figure.value:.2f} {figure.unit}",
            "" if figure.paper is None else f"{figure.paper:.4g}",
            ", ".join(bounds),
            {True: "met", False: "[bold]missed[/]", None: ""}[figure.met],
            figure.note,
        )
    console.print(table)


def print_lists(console: Console) -> None:
    """Print the inputs chosen to match the papers, and the papers' figures that are missing."""
    for title, items in (
        ("Chosen because they reproduce the papers' figures:", CHOSEN),
        ("Printed in the papers, and not computed here:", NOT_REPRODUCED),
    ):
        console.print(title)
        for item in items:
            console.print(f"- {item}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
