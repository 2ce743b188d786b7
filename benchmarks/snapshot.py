"""The snapshot benchmark: every row, every peer, a table, a plot and a report.

    python -m benchmarks.snapshot --size 1GiB --report build/bench/snapshot.json

Each part runs in a process of its own, one after another, so that none inherits another's memory.
Exits with 1 when a part failed; a target that is missed is shown, and is no failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks import huge_pages, machine, report
from benchmarks.json_report import write_json
from benchmarks.measure import Figure, Outcome, decode
from benchmarks.peers import PEERS
from holdfast_core.quantities import parse_bytes

PARTS = (
    "trainer",
    "partial",
    "compute_weights",
    "protection",
    "slots",
    "overhead",
    "persist_loop",
    "many_tensors",
)
OF_ONE_SIZE = ("overhead", "persist_loop", "many_tensors")
"""Parts whose state has the size of the example's model, or a size of its own."""


WITHIN_S = 900.0
TABLE_COLUMNS = 120
"""Width of the tables where the output has no width, such as a log."""


def run_part(module: str, arguments: list[str]) -> Outcome:
    """Result of `python -m benchmarks.<module>`; its failure becomes a reason to skip."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        out = Path(directory) / "outcome.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--out", str(out)]
        try:
            done = subprocess.run(
                command, check=False, timeout=WITHIN_S, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return Outcome(rows={}, skipped=f"did not end within {WITHIN_S:g} s")
        if done.returncode != 0 or not out.exists():
            return Outcome(rows={}, skipped=f"failed:\n{done.stderr[-3000:]}")
        return decode(out.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="1GiB", help="bytes of training state (default 1GiB)")
    parser.add_argument("--report", type=Path, default=Path("build/bench/snapshot.json"))
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *PEERS], help="run only these")
    parser.add_argument("--small-pages", action="store_true", help="keep the machine's /dev/shm")
    options = parser.parse_args()
    pages = "small pages"
    if not options.small_pages:
        pages = huge_pages.enter("benchmarks.snapshot", sys.argv[1:])
    size = ["--bytes", str(parse_bytes(options.size.removesuffix("B")))]
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    facts = machine.facts() | {"size": options.size, "memory": pages}
    rows: dict[str, Figure] = {}
    peers: dict[str, Outcome] = {}
    skipped: dict[str, str] = {}
    failed = False
    for name in options.only or [*PARTS, *PEERS]:
        with console.status(f"measuring {name}"):
            if name in PEERS:
                outcome = run_part("peers", [name, *size])
            else:
                outcome = run_part(name, [] if name in OF_ONE_SIZE else size)
        if outcome.skipped:
            skipped[name] = outcome.skipped
            failed |= name in PARTS
        elif name in PEERS:
            peers[name] = outcome
        else:
            rows |= outcome.rows
    write_json(options.report, rows, peers, facts, skipped)
    report.print_tables(console, rows, peers, skipped, facts)
    plotted = options.report.with_suffix(".png")
    if "blocked" in rows:
        report.plot(plotted, rows, peers)
        console.print(f"plot: {plotted}")
    console.print(f"report: {options.report}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
