"""`make bench NAME=recovery`: phases of recoveries, with processes that stay and without.

The example trains on four virtual nodes and a spare. A rank is killed, then a node with its memory,
in runs with --stay and without, alternating. From the kill to the next completed step each phase is
timed. The node is killed once an agent waits on the spare, as in a job that has trained for a
while. Then the control loop ends. Training must go on without it; only a control loop begins an
epoch, so a rank that is killed now is waited for until the next one starts, two seconds after the
kill. What is timed is all of that, from the kill. In further runs a node is lost while there is no
spare, and the job goes on with three.

In every run the processes that should have stayed must have, and the others not, and the final
state must have the bytes of an undisturbed run. With three nodes it cannot: batches and sums are
others. There the bytes that all ranks restored must be those that were saved. A run that fails a
check gives no figures.
Writes build/bench/recovery.json and recovery.png, with --stacks recovery-stacks.json; the exit code
is 1 when a check failed or a target was missed. Ctrl-C ends it with the figures of the runs so far.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.json_report import verdict, write_json
from benchmarks.machine import facts
from benchmarks.measure import REPETITIONS, Figure
from benchmarks.recovery.figures import AFTER_NOTICED, Results, key, shown
from benchmarks.recovery.picture import draw
from benchmarks.recovery.runs import RANKS, Kind, Mode, Plan, carry_out
from benchmarks.recovery.stacks import NAMES, packages_of
from benchmarks.recovery.stacks_table import report
from benchmarks.recovery.traces import Phase
from benchmarks.recovery.votes import measure as measure_votes
from benchmarks.targets import TARGETS
from holdfast_core.errors import HoldfastError

ROOT = Path(__file__).resolve().parents[2]
STEPS = 400
FEWER_STEPS = 120
"""Steps of a run without a spare, which has one fault only and hashes its state in every step."""
COLUMNS = 240
"""Width of the output where it is not a terminal: the table has eight columns of ranges."""
STEPS_MIN = 200
"""Least number of steps: fewer may be over before an agent waits on the spare."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.repetitions < 1 or options.steps < STEPS_MIN:
        parser.error(f"give at least 1 repetition and {STEPS_MIN} steps")
    began, machine = time.monotonic(), facts()
    console = Console() if sys.stdout.isatty() else Console(width=COLUMNS)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-recovery-"))
    if options.votes:
        for name, found in measure_votes(folder / "votes", options.steps).items():
            spread = f"{found.low:.1f} – {found.high:.1f}, {found.repetitions} pairs of steps"
            console.print(f"{name}: {found.value:.1f} ms ({spread})")
        console.print(f"{machine['cores']} cores, load {machine['load_before']:.1f} before")
        return 0
    if options.stacks:
        names = options.only or NAMES
        sites = {packages: Path(site) for packages, site in options.site}
        if missing := packages_of(names) - sites.keys():
            parser.error(f"give --site for {', '.join(sorted(missing))}, as `make bench` does")
        output = options.output.with_name("recovery-stacks.json")
        return report(folder / "stacks", options.repetitions, names, sites, output, console)
    results = Results()
    try:
        measure(results, folder, options.repetitions, options.steps, console)
    except KeyboardInterrupt:
        results.failed.append("the benchmark was interrupted")
    rows = results.rows()
    machine |= {"steps": options.steps, "repetitions": options.repetitions}
    left_out = {f"problem {number}": text for number, text in enumerate(results.failed, 1)}
    write_json(options.output, rows, {}, machine, left_out)
    print_tables(console, rows, machine)
    for problem in results.failed:
        console.print(f"[bold red]left out: {problem}[/]", soft_wrap=True)
    if rows:
        draw(options.output.with_suffix(".png"), rows)
    console.print(
        f"{time.monotonic() - began:.0f} s; wrote {options.output}; logs: {folder}", soft_wrap=True
    )
    met = [verdict(target, rows[target.key]) for target in TARGETS if target.key in rows]
    return 0 if not results.failed and all(met) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench NAME=recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--repetitions",
        "--repeat",
        type=int,
        default=REPETITIONS,
        help="runs of each kind; 1 is a short run (default: %(default)s)",
    )
    add("--steps", type=int, default=STEPS, help="steps of each run (default: %(default)s)")
    add("--votes", action="store_true", help="measure only what the vote costs a step")
    add(
        "--stacks",
        action="store_true",
        help="measure instead loops under DDP, FSDP2 and HSDP, those of frameworks, and torchft, "
        "on two nodes of two ranks each",
    )
    add(
        "--only", nargs="+", choices=NAMES, metavar="ROW", help=f"with --stacks: {', '.join(NAMES)}"
    )
    add(
        "--site",
        nargs=2,
        action="append",
        default=[],
        metavar=("PACKAGES", "FOLDER"),
        help="where packages are that have an environment of their own; `make bench` gives it",
    )
    add("--output", type=Path, default=ROOT / "build" / "bench" / "recovery.json")
    return parser


def measure(results: Results, folder: Path, repetitions: int, steps: int, console: Console) -> None:
    """Carry out all runs and add them to `results`.

    The rank that is lost differs from repetition to repetition, so that the daemon that leads and
    the launcher that serves the store are lost too.
    """
    undisturbed = Plan(mode=Mode.STAY, steps=steps, folder=folder / "undisturbed", kinds=())
    sha256 = carry_out(undisturbed).sha256
    if not sha256:
        results.failed.append("the undisturbed run did not reach its final state")
        return
    for repetition in range(repetitions):
        modes = list(Mode) if repetition % 2 == 0 else list(Mode)[::-1]
        for mode in modes:
            rank = (2 + repetition) % RANKS
            plan = Plan(
                mode=mode, steps=steps, folder=folder / f"{mode}-{repetition + 1}", rank=rank
            )
            fewer = replace(
                plan,
                steps=FEWER_STEPS,
                folder=folder / f"fewer-{mode}-{repetition + 1}",
                kinds=(Kind.FEWER,),
            )
            for each in (plan, fewer):
                try:
                    run = carry_out(each)
                except HoldfastError as error:
                    results.failed.append(f"{each.folder.name}: {error}")
                    continue
                results.add(each.folder.name, run, sha256)
                lost = ", ".join(kind.words for kind in each.kinds)
                console.print(f"{each.folder.name}, rank {rank}: {lost}", style="dim")


def print_tables(
    console: Console, rows: Mapping[str, Figure], machine: Mapping[str, float | str]
) -> None:
    """Print when each phase was reached, then the targets."""
    counts = sorted({figure.repetitions for figure in rows.values()})
    runs, load = " or ".join(map(str, counts)) or "no", f"{machine['load_before']:.1f}"
    title = (
        f"Seconds since the kill, median (range) of {runs} runs; "
        f"{machine['cores']} cores, load {load} before, torch {machine['torch']}"
    )
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    table.add_column("all ranks have")
    columns = [(mode, kind) for kind in Kind for mode in Mode]
    for mode, kind in columns:
        table.add_column(f"{kind.words}, {mode}", justify="right")
    for what in (*Phase, AFTER_NOTICED):
        found = [rows.get(key(mode, kind, what)) for mode, kind in columns]
        name = "step, since noticed" if what == AFTER_NOTICED else what
        table.add_row(name, *("–" if each is None else shown(each) for each in found))
    console.print(table)
    for target in TARGETS:
        figure = rows.get(target.key)
        if figure is not None:
            mark = "[green]✓[/]" if verdict(target, figure) else "[red]✗[/]"
            limit = f"at most {target.at_most:g} s"
            console.print(f"{target.figure}, processes stay: {shown(figure)} s, {limit} {mark}")


if __name__ == "__main__":
    sys.exit(main())
