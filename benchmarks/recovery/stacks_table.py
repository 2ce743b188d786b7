"""The report of `benchmarks.recovery.stacks`: lines while it runs, a table, and JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.json_report import write_json
from benchmarks.machine import facts
from benchmarks.measure import Figure
from benchmarks.recovery.figures import figure, shown
from benchmarks.recovery.runs import Mode
from benchmarks.recovery.stacks import STACKS, TORCHFT, measure

AT_MOST_S = 1.0
"""Limit of the median of each row of ours whose processes stay."""
NOTES = (
    "A restart is the same trainer without a world; torchtitan's is the override.",
    "Rows that end in -preloaded have HOLDFAST_PRELOAD.",
    "torchft: a replica group for each rank; torchrun starts the killed one again; each step needs "
    "all four, and has the bits of an undisturbed run. Its lighthouse has its defaults: it waits "
    "until the heartbeats of the lost process are 5 s old. Gloo's timeout is 5 s, as in its "
    "example: ranks without a connection to the lost one leave a cut-off allreduce only then.",
    "torchft-at-once: with --join_timeout_ms=100 it does not wait for them.",
)


def report(
    folder: Path,
    repetitions: int,
    names: Collection[str],
    sites: Mapping[str, Path],
    output: Path,
    console: Console,
) -> int:
    """Measure the stacks with `names` and report; return the exit code.

    Args:
        sites: folders of packages that have an environment of their own, by name.
        output: JSON file to write.
    """
    began, machine = time.monotonic(), facts()
    found: dict[tuple[str, Mode], Figure] = {}
    left_out: dict[str, str] = {}

    def progress(line: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {line}", style="dim", soft_wrap=True)

    try:
        for row in measure(folder, repetitions, names, sites, progress):
            if row.failed:
                left_out[row.name] = row.failed
                progress(f"{row.name} is left out: {row.failed}")
            else:
                found[row.name, row.mode] = figure(row.seconds)
    except KeyboardInterrupt:
        left_out["others"] = "the benchmark was interrupted"
    load = f"{machine['load_before']:.1f} before, {os.getloadavg()[0]:.1f} after"
    table = Table(
        title=f"Seconds from the kill of a rank to the next step of all: median (range) of "
        f"{repetitions} kills; {machine['cores']} cores, load {load}, torch {machine['torch']}",
        title_justify="left",
        box=box.MARKDOWN,
    )
    for column in ("", "processes stay", f"at most {AT_MOST_S:g} s", "all start again"):
        table.add_column(column, justify="right" if column else "left")
    missed = False
    for stack in STACKS:
        stay, restart = (found.get((stack.name, mode)) for mode in Mode)
        if stay is None and restart is None:
            continue
        mark = ""
        if stay is not None and stack.packages != TORCHFT:
            missed |= stay.value > AT_MOST_S
            mark = "[green]✓[/]" if stay.value <= AT_MOST_S else "[red]✗[/]"
        cells = ["–" if each is None else shown(each) for each in (stay, restart)]
        table.add_row(stack.name, cells[0], mark, cells[1])
    console.print(table)
    for note in NOTES:
        console.print(f"- {note}", soft_wrap=True, highlight=False)
    for name, why in left_out.items():
        console.print(f"[bold red]left out: {name}: {why}[/]", soft_wrap=True)
    rows = {f"{name}_{mode}": figure for (name, mode), figure in found.items()}
    machine |= {"load_after": os.getloadavg()[0], "repetitions": repetitions}
    write_json(output, rows, {}, machine, left_out)
    console.print(
        f"{time.monotonic() - began:.0f} s; wrote {output}; logs: {folder}", soft_wrap=True
    )
    return 1 if left_out or missed else 0
