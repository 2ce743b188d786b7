"""`make bench-elastic`: uneven copies of experts beside expert parallelism (EP).

1. Tokens on the busiest rank, EP over uneven copies, for the models of Lazarus on 10 to 5 nodes and
   four shapes of loads. Computed; no clock is involved.
2. The dispatcher's share of a layer's processor time, on one process.
3. Seconds from the kill of a node to the next completed step, in place with uneven copies, and by a
   restart with one EP group fewer, alternating.

How much faster parallel ranks train cannot be measured on one machine: its cores are the same
whatever their number. Writes build/bench/elastic.json and elastic.png; the exit code is 1 when a
run failed or uneven copies took longer to go on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.elastic.counted import MODELS, NODES, SHAPES, nodes_of_groups, ratios
from benchmarks.elastic.dispatching import dispatcher_share
from benchmarks.elastic.losing import Way, seconds_lost
from benchmarks.machine import facts
from benchmarks.measure import REPETITIONS, Figure
from holdfast_core.errors import HoldfastError

ROOT = Path(__file__).resolve().parents[2]
RUNS = 3
Counted = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Model → shape of loads → number of nodes → multiple."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make bench-elastic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--runs",
        type=int,
        default=RUNS,
        help="runs of each way to go on; 0: compute and time the dispatcher only "
        "(default: %(default)s)",
    )
    add("--output", type=Path, default=ROOT / "build" / "bench" / "elastic.json")
    options = parser.parse_args(argv)
    if options.runs < 0:
        parser.error("give 0 runs or more")
    console, machine = Console(width=max(Console().width, 100)), facts()
    counted = {m.name: {shape: ratios(m, shape) for shape in SHAPES} for m in MODELS}
    print_counted(console, counted)
    shares = {model.name: dispatcher_share(model, REPETITIONS * 3) for model in MODELS}
    for name, share in shares.items():
        console.print(
            f"dispatcher with {name}'s experts: {share.value:.0f} % of a layer's processor time "
            f"(shortest of {share.repetitions} repetitions)"
        )
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-elastic-"))
    lost, problems = losses(options.runs, folder, console)
    report = {
        "busiest_rank_multiples": counted,
        "dispatcher_percent": shares,
        "seconds_to_next_step": lost,
        "problems": problems,
        "machine": machine,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    draw(options.output.with_suffix(".png"), counted, lost)
    for way, figure in lost.items():
        console.print(f"next step, {way}: {shown(figure)}")
    for problem in problems:
        console.print(f"[bold red]left out: {problem}[/]", soft_wrap=True)
    console.print(f"wrote {options.output}; logs: {folder}", soft_wrap=True)
    slower = len(lost) == 2 and lost[Way.COPIES].value > lost[Way.GROUPS].value
    return 1 if problems or slower else 0


def losses(runs: int, folder: Path, console: Console) -> tuple[dict[str, Figure], list[str]]:
    """Figures of each way to go on after a loss, and why runs have none."""
    taken: dict[Way, list[float]] = {way: [] for way in Way}
    problems = []
    for run in range(runs):
        for way in list(Way) if run % 2 == 0 else list(Way)[::-1]:
            began = time.monotonic()
            try:
                taken[way].append(seconds_lost(way, folder / f"{way.name.lower()}-{run + 1}"))
            except HoldfastError as error:
                problems.append(f"{way}, run {run + 1}: {error}")
                continue
            console.print(
                f"{way}, run {run + 1}: {taken[way][-1]:.2f} s to the next step "
                f"(the run took {time.monotonic() - began:.0f} s)",
                style="dim",
            )
    figures = {
        way.value: Figure(
            value=statistics.median(seconds),
            unit="s",
            low=min(seconds),
            high=max(seconds),
            repetitions=len(seconds),
        )
        for way, seconds in taken.items()
        if seconds
    }
    return figures, problems


def print_counted(console: Console, counted: Counted) -> None:
    """Print the multiples, and how many nodes whole groups use."""
    table = Table(
        title="Tokens on the busiest rank, EP over uneven copies",
        title_justify="left",
        box=box.MARKDOWN,
    )
    for name in ("model", "loads", *(f"{nodes} nodes" for nodes in NODES)):
        table.add_column(name, justify="left" if name in ("model", "loads") else "right")
    for model in MODELS:
        used = (str(nodes_of_groups(nodes, model.ep)) for nodes in NODES)
        table.add_row(model.name, f"nodes used with EP {model.ep}", *used)
        for shape in SHAPES:
            found = counted[model.name][shape]
            table.add_row("", shape, *(f"{found[nodes]:.2f}" for nodes in NODES))
    console.print(table)


def shown(figure: Figure) -> str:
    """A figure in seconds, with its range."""
    return f"{figure.value:.2f} s ({figure.low:.2f} – {figure.high:.2f}, {figure.repetitions} runs)"


def draw(path: Path, counted: Counted, lost: Mapping[str, Figure]) -> None:
    """Draw the multiples of each model, and the seconds to the next step."""
    drawing = Drawing(figsize=(4 * (len(MODELS) + 1), 3.6), layout="constrained")
    FigureCanvasAgg(drawing)
    *left, right = drawing.subplots(1, len(MODELS) + 1)
    for axes, (name, shapes) in zip(left, counted.items(), strict=True):
        for shape, found in shapes.items():
            axes.plot(list(found), list(found.values()), marker="o", label=shape)
        axes.invert_xaxis()
        axes.axhline(1, color="black", linewidth=0.5)
        axes.set_title(name)
        axes.set_xlabel("nodes")
        axes.set_ylim(bottom=0)
    left[0].set_ylabel("tokens on the busiest rank,\nEP over uneven copies")
    left[0].legend()
    for place, figure in enumerate(lost.values()):
        right.bar(place, figure.value, color=("#0b6e4f", "#9aa5b1")[place], width=0.6)
        right.vlines(place, figure.low, figure.high, color="black")
        right.text(place, figure.value / 2, f"{figure.value:.1f} s", ha="center", color="white")
    right.set_xticks(range(len(lost)), [way.replace(", ", "\n") for way in lost])
    right.set_title("node lost → next step")
    right.set_ylabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
