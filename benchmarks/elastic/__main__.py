"""`make bench NAME=elastic`: uneven copies of experts beside expert parallelism (EP).

1. Tokens on the busiest rank, EP over uneven copies, for the models of Lazarus on 10 to 5 nodes and
   four shapes of loads. Computed; no clock is involved.
2. The dispatcher's share of a layer's processor time, on one process, beside plain EP and the
   dispatcher that plans on the host.
3. A node lost without a spare, in real processes: from the kill to the next completed step, where
   the others stay and experts move, and where all start anew on the nodes that are left.

How much faster parallel ranks train cannot be measured on one machine: its cores are the same
whatever their number. Writes build/bench/elastic.json and elastic.png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.elastic.counted import MODELS, NODES, SHAPES, nodes_of_groups, ratios
from benchmarks.elastic.dispatching import dispatcher_shares
from benchmarks.elastic.kills import Kill, lose_node
from benchmarks.machine import facts
from benchmarks.measure import REPETITIONS

ROOT = Path(__file__).resolve().parents[2]
Counted = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Model → shape of loads → number of nodes → multiple."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make bench NAME=elastic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kills", type=int, default=3, help="runs of each kind that lose a node (%(default)s)")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "elastic.json")
    options = parser.parse_args(argv)
    console, machine = Console(width=max(Console().width, 100)), facts()
    counted = {m.name: {shape: ratios(m, shape) for shape in SHAPES} for m in MODELS}
    print_counted(console, counted)
    shares = {model.name: dispatcher_shares(model, REPETITIONS * 3) for model in MODELS}
    for name, share in shares.items():
        console.print(
            f"dispatcher with {name}'s experts: {share.dispatcher:.1f} % of a layer's processor "
            f"time, planned on the host {share.planned_on_host:.1f} %, plain EP "
            f"{share.plain_ep:.1f} %; the layer takes {share.longer_than_plain_ep:+.1f} % beside "
            f"plain EP (shortest of {share.repetitions} repetitions); dispatching took "
            f"{share.before_over_now:.2f} times as long on the host"
        )
    kills = measured_kills(options.kills)
    for way, found in kills.items():
        seconds = sorted(one.next_step_s for one in found)
        console.print(
            f"node lost, {way}: next step after {median(seconds):.2f} s ({seconds[0]:.2f}-"
            f"{seconds[-1]:.2f}), steps done again: {[one.lost_steps for one in found]}"
        )
    report = {
        "kills": kills,
        "busiest_rank_multiples": counted,
        "dispatcher_percent": shares,
        "machine": machine,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    draw(options.output.with_suffix(".png"), counted)
    console.print(f"wrote {options.output}", soft_wrap=True)
    return 0


def measured_kills(repetitions: int) -> dict[str, list[Kill]]:
    """Lose a node in runs of both kinds, in turn."""
    ways = {"processes stay": True, "processes start anew": False}
    found: dict[str, list[Kill]] = {way: [] for way in ways if repetitions}
    with tempfile.TemporaryDirectory(prefix="hfe-", dir="/tmp") as folder:
        for number in range(repetitions):
            for way, stay in ways.items():
                path = Path(folder) / f"{number}-{'stay' if stay else 'anew'}"
                found[way].append(lose_node(path, stay=stay))
    return found


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


def draw(path: Path, counted: Counted) -> None:
    """Draw the multiples of each model."""
    drawing = Drawing(figsize=(4 * len(MODELS), 3.6), layout="constrained")
    FigureCanvasAgg(drawing)
    all_axes = drawing.subplots(1, len(MODELS), sharey=True)
    for axes, (name, shapes) in zip(all_axes, counted.items(), strict=True):
        for shape, found in shapes.items():
            axes.plot(list(found), list(found.values()), marker="o", label=shape)
        axes.invert_xaxis()
        axes.axhline(1, color="black", linewidth=0.5)
        axes.set_title(name)
        axes.set_xlabel("nodes")
    all_axes[0].set_ylim(bottom=0)  # of all, once all are drawn
    all_axes[0].set_ylabel("tokens on the busiest rank,\nEP over uneven copies")
    all_axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
