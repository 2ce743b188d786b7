"""Cost of per-step snapshots for the example trainer, in step time.

`examples/train_moe.py` runs unchanged under torchrun, alternately without Holdfast (no
`HOLDFAST_SOCKET`) and with a snapshot after every step. Consecutive runs are compared.

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
from benchmarks.measure import Figure, Outcome, encode
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
    """Measure the row `overhead`: percent by which a step gets longer, over pairs of runs."""
    off, on = [], []
    with Cluster(BUDGET_BYTES) as cluster, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as tmp:
        daemon = cluster.start("node-0")
        for pair in range(PAIRS):
            off.append(_step_s({}, Path(tmp) / f"{pair}.jsonl"))
            # A job of its own for each run, so that each starts from the beginning.
            name, nodes = f"{JOB}-{pair}", [daemon.node]
            cluster.control.place(name, 1, nodes, redundancy=Redundancy.NONE, nproc_per_node=RANKS)
            known = {"HOLDFAST_SOCKET": str(daemon.socket), "HOLDFAST_JOB": name}
            on.append(_step_s(known, Path(tmp) / f"{name}.jsonl"))
            cluster.control.drop(name)
    percents = [100 * (step / floor - 1) for step, floor in zip(on, off, strict=True)]
    figure = Figure(
        value=statistics.median(percents),
        unit="%",
        low=min(percents),
        high=max(percents),
        repetitions=len(percents),
        seconds=statistics.median(on),
        floor_seconds=statistics.median(off),
        note="longer step of examples/train_moe.py on two ranks, a snapshot after every step",
    )
    return Outcome(rows={"overhead": figure})


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
