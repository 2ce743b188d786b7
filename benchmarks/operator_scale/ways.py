"""What kopf's and the official client's own ways cost: `make bench NAME=operator ARGS=--ways`.

Each way runs in a process of its own against `pod_server`, so it needs no cluster. The pods are
listed, each changes three times, the watch expires, and every second pod is missing from the next
list. A way that still knows those would have a job wait for pods that are gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from benchmarks.operator_scale.one_way import WAYS

Figures = dict[str, float]
MIB = 2**20


def measure(pods: int, runs: int) -> dict[str, list[Figures]]:
    """Figures of every way, in `runs` runs that take turns."""
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for _ in range(runs):
        for way in WAYS:
            with _server(pods) as address:
                command = [sys.executable, "-m", "benchmarks.operator_scale.one_way", way, address]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[way].append(json.loads(done.stdout))
    return found


def show(console: Console, pods: int, report: dict[str, list[Figures]]) -> None:
    """Print the best run of each way."""
    table = Table()
    for name in ("way", "CPU", "time", "grows by", "peak", "pods", "events"):
        table.add_column(name, no_wrap=True)
    for way, runs in report.items():
        best = min(runs, key=lambda run: run["cpu_s"])
        cells = [f"{best['cpu_s']:.2f} s", f"{best['seconds']:.2f} s"]
        cells += [f"{best[name] / MIB:.0f} MiB" for name in ("grown_bytes", "peak_bytes")]
        cells += [
            f"{best[name]:.0f}" if name in best else "" for name in ("pods_known", "events_posted")
        ]
        table.add_row(way, *cells)
    console.print(f"{pods} pods; {pods // 2 + 1} of them after the watch expired")
    console.print(table)


@contextmanager
def _server(pods: int) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.operator_scale.pod_server", str(pods)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()
