"""The report of a benchmark run for people: tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from benchmarks.json_report import verdict
from benchmarks.measure import Figure, Outcome
from benchmarks.targets import OF_SLOTS, TARGETS
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN

mpl.use("Agg")

from matplotlib import pyplot as plt  # after the backend was chosen

OURS, THEIRS = "#0b6e4f", "#9aa5b1"
PLOTTED = ("blocked", "committed", "restore")
PEER_NAMES = {
    "dlrover_flash": "DLRover Flash Checkpoint",
    "dcp_async_process": "DCP async, process",
    "dcp_async_thread": "DCP async, thread",
    "safetensors": "safetensors to /dev/shm",
    "torch_save": "torch.save to /dev/shm",
}


def print_tables(
    console: Console,
    rows: Mapping[str, Figure],
    peers: Mapping[str, Outcome],
    skipped: Mapping[str, str],
    facts: Mapping[str, object],
) -> None:
    """Print the figures beside their targets, then the peers beside Holdfast."""
    title = f"Holdfast, {facts['size']} of state, {facts['cores']} cores, {facts['memory']}"
    table = Table(title=title, title_justify="left")
    for name, justify in (("figure", "left"), ("measured", "right"), ("spread", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("at most", "", "took", "floor"):
        table.add_column(name, justify="right")
    for target in TARGETS:
        figure = rows.get(target.key)
        if figure is None:
            continue
        met = verdict(target, figure)
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: ""}[met]
        table.add_row(
            target.figure,
            f"{figure.value:.2f} {figure.unit}",
            f"{figure.low:.2f} … {figure.high:.2f}",
            "" if target.at_most is None else f"{target.at_most:g}",
            mark,
            _duration(figure.seconds),
            _duration(figure.floor_seconds),
        )
    if table.row_count:
        console.print(table)
    if any(each.key_of(SLOTS_MAX) in rows for each in OF_SLOTS):
        console.print(_slots_table(rows))
    if peers:
        console.print(_peer_table(rows, peers))
    for name, why in skipped.items():
        console.print(f"[yellow]{name} was left out: {why}[/]")


def _slots_table(rows: Mapping[str, Figure]) -> Table:
    numbers = range(SLOTS_MAX, SLOTS_MIN - 1, -1)
    table = Table(
        title="two slots beside three: four nodes, all of the state changes (spread)",
        title_justify="left",
    )
    table.add_column("figure")
    for slots in numbers:
        table.add_column(f"{slots} slots", justify="right")
    for each in OF_SLOTS:
        cells = []
        for slots in numbers:
            f = rows[each.key_of(slots)]
            spread = f" ({f.low:.1f} … {f.high:.1f})" if f.low < f.high else ""
            cells.append(f"{f.value:.2f} {f.unit}{spread}")
        table.add_row(each.figure, *cells)
    return table


def _peer_table(rows: Mapping[str, Figure], peers: Mapping[str, Outcome]) -> Table:
    keys = [t.key for t in TARGETS if any(t.key in outcome.rows for outcome in peers.values())]
    table = Table(title="beside its peers (smaller is better)", title_justify="left")
    table.add_column("")
    for key in keys:
        unit = rows[key].unit if key in rows else ""
        table.add_column(f"{key}\n{unit}", justify="right")
    everyone = {"Holdfast": rows} | {_name(name): peer.rows for name, peer in peers.items()}
    for name, figures in everyone.items():
        cells = [f"{figures[key].value:.2f}" if key in figures else "–" for key in keys]
        table.add_row(name, *cells, style="bold" if figures is rows else "")
    return table


def plot(path: Path, rows: Mapping[str, Figure], peers: Mapping[str, Outcome]) -> None:
    """Plot Holdfast and its peers as multiples of a memcpy: bars on a logarithmic axis."""
    everyone = {"Holdfast": rows} | {_name(name): peer.rows for name, peer in peers.items()}
    titles = {target.key: target.figure for target in TARGETS}
    figure, axes = plt.subplots(
        len(PLOTTED), 1, sharex=True, figsize=(9, 1.2 + 0.42 * len(PLOTTED) * len(everyone))
    )
    for ax, key in zip(axes, PLOTTED, strict=True):
        names = [name for name, figures in everyone.items() if key in figures]
        shown = [everyone[name][key] for name in names]
        spread = [
            [max(0.0, f.value - f.low) for f in shown],
            [max(0.0, f.high - f.value) for f in shown],
        ]
        ax.barh(
            names,
            [f.value for f in shown],
            xerr=spread,
            color=[OURS if name == "Holdfast" else THEIRS for name in names],
            error_kw={"ecolor": "#3d4852", "elinewidth": 0.8},
            height=0.7,
        )
        for place, f in enumerate(shown):
            ax.annotate(
                f"{f.value:.2f}×",
                (max(f.high, f.value), place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        ax.set_xscale("log")
        ax.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        ax.invert_yaxis()
        ax.set_title(titles[key], loc="left", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("multiples of a warm memcpy of the same bytes (log scale; whole spread)")
    left, right = axes[-1].get_xlim()
    axes[-1].set_xlim(min(left, 0.5), 1.6 * right)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _name(peer: str) -> str:
    return PEER_NAMES.get(peer, peer)


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds else ""
