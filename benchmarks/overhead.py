"""Cost of per-step snapshots for the example trainer, in step time.

`examples/train_moe.py` runs unchanged under torchrun, alternately without Holdfast (no
`HOLDFAST_SOCKET`) and with a snapshot after every step. Consecutive runs are compared.

Its ranks leave no core free, so a step takes longer by what a save does, wherever it does it. The
floor is the time to copy and hash as many bytes on as many cores. The row below it is what the
daemon uses of a core in a step, calls of both ranks and heartbeats included.

    python -m benchmarks.overhead --out FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.cluster import Cluster
from benchmarks.floors import SHARED_MEMORY
from benchmarks.measure import (
    REPETITIONS,
    WARM_UPS,
    Figure,
    Outcome,
    encode,
    median_percent,
    milliseconds,
    timed,
)
from benchmarks.redundancy import GRID_BYTES, Capture
from holdfast_core.snapshots.layouts import decode_layout
from holdfast_core.snapshots.membership import Redundancy

JOB = "overhead"
PAIRS = 4
STEPS = 60
STEPS_LEFT_OUT = 10
"""Number of first steps of a run that do not count: allocation, the arena, warm-up."""

RANKS = 2
BUDGET_BYTES = 4 << 30
WITHIN_S = 300.0
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_moe.py"


def measure() -> Outcome:
    """Measure the rows `overhead`, percent by which a step gets longer, over pairs of runs,
    `overhead_floor` and `overhead_daemon`."""
    off, on, daemon_s, nbytes = [], [], [], 0
    with Cluster(BUDGET_BYTES) as cluster, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as tmp:
        daemon = cluster.start("node-0")
        for pair in range(PAIRS):
            off.append(_step_s({}, Path(tmp) / f"{pair}.jsonl"))
            # A job of its own for each run, so that each starts from the beginning.
            name, nodes = f"{JOB}-{pair}", [daemon.node]
            cluster.control.place(name, 1, nodes, redundancy=Redundancy.NONE, nproc_per_node=RANKS)
            known = {"HOLDFAST_SOCKET": str(daemon.socket), "HOLDFAST_JOB": name}
            used_s = daemon.cpu_s()
            on.append(_step_s(known, Path(tmp) / f"{name}.jsonl"))
            daemon_s.append((daemon.cpu_s() - used_s) / STEPS)
            nbytes = _saved_bytes(daemon.root, name)
            cluster.control.drop(name)
    step_s = statistics.median(off)
    percents = [100 * (step / floor - 1) for step, floor in zip(on, off, strict=True)]
    note = "longer step of examples/train_moe.py on two ranks, a snapshot after every step"
    return Outcome(
        rows={
            "overhead": median_percent(percents, on, step_s, note),
            "overhead_floor": _floor(nbytes, step_s),
            "overhead_daemon": milliseconds(daemon_s),
        }
    )


def _saved_bytes(root: Path, job: str) -> int:
    """Bytes that the ranks of `job` capture in a save, from the daemon's directory."""
    files = [file for file in root.rglob("layout.json") if job in str(file)]
    if len(files) != RANKS:
        raise RuntimeError(f"{len(files)} arenas of {job}, not {RANKS}")
    return sum(decode_layout(file.read_bytes()).slot_bytes for file in files)


def _floor(nbytes: int, step_s: float) -> Figure:
    """Percent of a step that it takes to copy and hash `nbytes` with a thread for each rank."""
    whole = -(-nbytes // GRID_BYTES) * GRID_BYTES
    work = Capture(whole, RANKS)
    times = [timed(work.capture) for _ in range(WARM_UPS + REPETITIONS)][WARM_UPS:]
    percents = [100 * seconds * nbytes / whole / step_s for seconds in times]
    return median_percent(percents, times, note=f"{nbytes} bytes")


def example(ranks: int, steps: int, log: Path) -> tuple[list[str], dict[str, str]]:
    """The command that trains the example, and its environment without Holdfast."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(EXAMPLE)]
    command += ["--steps", str(steps), "--log-file", str(log)]
    variables = {name: text for name, text in os.environ.items() if "HOLDFAST" not in name}
    return command, variables | {"OMP_NUM_THREADS": "1"}


def _step_s(known: dict[str, str], log: Path) -> float:
    """Median seconds of a step of one run, with `known` added to its environment."""
    command, environment = example(RANKS, STEPS, log)
    done = subprocess.run(
        command,
        env=environment | known,
        check=False,
        timeout=WITHIN_S,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the example trainer failed:\n{done.stderr[-4000:]}")
    times: list[float] = [json.loads(line)["time"] for line in log.read_text().splitlines()]
    steps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(steps[STEPS_LEFT_OUT:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_bytes(encode(measure()))


if __name__ == "__main__":
    main()
