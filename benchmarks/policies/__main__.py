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

ROOT = Path(__file__).resolve().parents[2]

TABLE_COLUMNS = 170
"""Width of a table in a file or a pipe, so that no row is wrapped."""

CHOSEN = (
    "PEC GPT-MoE-Small: an untied head. Table 1's 323 million parameters are those of a tied one, "
    "but only an untied one (361 million) gives figure 5's 54.2 %: both are shown.",
    "PEC GPT-MoE-Small: experts in every second layer, of 4 x 768, in float32 with two moments. "
    "With the causal masks of GPT-2's code in the checkpoint, 54.2 and 76.9 % match to a tenth.",
    "PEC figure 5: 8 ranks with data and expert parallelism of 8.",
    "MoEtion 1.6B-64E: 27 layers of 2048 with an untied head, for 58.7 billion parameters and 587 "
    "and 61 GB; the paper gives no dimensions.",
    "MoEtion 2.9B-16E: 24 layers (section 4.1) of 3072 with a tied head, for 30.1 billion.",
    "MoEtion 3.8B-8E and 3.8B-32E: Mixtral 8x7B's dimensions, for 46.7 billion and 1820 GB.",
    "MoEtion: 10 bytes a parameter: bfloat16 and two moments in float32.",
    "MoEtion: 6 experts of each layer, which the paper names for 1.6B-64E only.",
    "Tokens at risk: a seeded trace with the skew of figure 3; the paper's traces are not public.",
)
"""Inputs chosen because they reproduce the papers' figures."""

NOT_REPRODUCED = (
    "PEC figure 2, 5(d) and 6: losses, accuracies and lost tokens of training runs "
    "(`make bench NAME=loss` has those of the example).",
    "PEC figure 5(c): seconds of a snapshot beside a step of 0.78 s, and so the 11.7 % less time; "
    "shown are the peaks that the time follows.",
    "MoEtion section 4.1: 85 % of 2.9B-16E are experts, and 75 % less with some of them; with 24 "
    "layers and 16 experts in each, 96 % are.",
    "MoEtion section 4.1: S is 25 to 40 % of the experts: follows from bandwidths not given.",
    "MoEtion section 7.2: 80 % of the tokens go to 6 of 64 experts; a property of their routing.",
    "MoEtion figure 9(a): 195 GB with 32 experts; 3 experts of each layer have 185 and 4 have 242, "
    "and the paper does not give the number.",
    "MoEtion section 7.5: 12.6, 10.9 and 7.0 s a checkpoint, up to 15 times as often, 12 times "
    "less wasted work; of their cluster.",
    "MoEtion section 5.1: up to 40 % less traffic (`make bench NAME=redundancy`).",
)
"""Figures that the papers print and that are not computed here, each with the reason."""


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
