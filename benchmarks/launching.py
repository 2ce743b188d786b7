"""`make bench NAME=launching`: what starting a launcher costs, up to when it could start workers.

Compares the fork server that the launcher forks from itself with the one that the standard library
starts, an interpreter that imports torch again. A launcher whose script is started afresh, without
a fork server, is the floor: it has to import torch. The figures of one round are of the same
minute; the table shows the median of rounds.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

MEBIBYTE = 1 << 20
LAUNCHER = "import sys; from holdfast import launch; sys.exit(launch.main())"
STANDARD = """
import multiprocessing, sys
from multiprocessing import forkserver
from holdfast import launch

def start(modules):
    multiprocessing.set_forkserver_preload(modules)
    forkserver.ensure_running()

launch.start_fork_server = start
sys.exit(launch.main())
"""
WAYS = {
    "no fork server": (LAUNCHER, "--fresh"),
    "of the standard library": (STANDARD,),
    "a fork of the launcher": (LAUNCHER,),
}
WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What one start has cost."""

    ready_s: float
    """Time from the command to when a worker could be forked."""
    cpu_s: float
    memory_bytes: int
    """Memory of all its processes: of a page that n share, each has 1/n."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args(argv)
    found: dict[str, list[Start]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for way, (program, *more) in WAYS.items():
                found[way].append(_start(Path(folder), program, more))
                print(f"round {number + 1} of {options.rounds}: {way}", file=sys.stderr)
    _show(found)
    return 0


def _start(folder: Path, program: str, more: Sequence[str]) -> Start:
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-c", program, "--socket", str(folder / "daemon.sock")]
    command += ["--job", "default.moe", "--nodes", "1", "--nproc", "1"]
    command += ["--ready-file", str(ready), *more, "--", "python", "train.py"]
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            while not ready.exists():
                assert process.poll() is None, f"the launcher ended with {process.returncode}"
                assert time.monotonic() - began < WAIT_S, "the launcher is not ready"
                time.sleep(0.005)
            took_s = time.monotonic() - began
            launcher = psutil.Process(process.pid)
            every = (launcher, *launcher.children(recursive=True))
            return Start(
                ready_s=took_s,
                cpu_s=sum(sum(each.cpu_times()[:2]) for each in every),
                memory_bytes=sum(each.memory_full_info().pss for each in every),
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _show(found: dict[str, list[Start]]) -> None:
    table = Table("fork server", "ready after, s", "CPU, s", "memory, MiB", title="One launcher")
    for way, starts in found.items():
        ready = [start.ready_s for start in starts]
        table.add_row(
            way,
            f"{statistics.median(ready):.1f} ({min(ready):.1f} to {max(ready):.1f})",
            f"{statistics.median(start.cpu_s for start in starts):.1f}",
            f"{statistics.median(start.memory_bytes for start in starts) / MEBIBYTE:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
