"""What per-step snapshots cost the example trainer: its step time with and without a daemon.

`examples/train_moe.py` runs unchanged under torchrun, in turns with a snapshot after every step and
without Holdfast (no `HOLDFAST_SOCKET`), and the runs that follow one another are compared.

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
from benchmarks.measure import Figure, Outcome, encode
from holdfast_core.values import Redundancy

JOB = "overhead"
PAIRS = 4
STEPS = 60
STEPS_LEFT_OUT = 10
"""The first steps of a run: allocation, the arena, warm-up."""

RANKS = 2
BUDGET_BYTES = 4 << 30
WITHIN_S = 300.0
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_moe.py"


def measure() -> Outcome:
    """The row `overhead`: percent by which a step gets longer, over pairs of runs."""
    percents, on, off = [], [], []
    with Cluster(BUDGET_BYTES) as cluster, tempfile.TemporaryDirectory() as directory:
        daemon = cluster.start("node-0")
        for pair in range(PAIRS):
            log = Path(directory) / f"{pair}.jsonl"
            off.append(_step_s(_environment(), log.with_suffix(".off")))
            # A job of its own for each run, so that each starts from the beginning.
            job = f"{JOB}-{pair}"
            cluster.control.place(
                job, 1, [daemon.node], redundancy=Redundancy.NONE, nproc_per_node=RANKS
            )
            protected = _environment() | {
                "HOLDFAST_SOCKET": str(daemon.socket),
                "HOLDFAST_JOB": job,
            }
            on.append(_step_s(protected, log.with_suffix(".on")))
            cluster.control.drop(job)
            percents.append(100 * (on[-1] / off[-1] - 1))
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


def _step_s(environment: dict[str, str], log: Path) -> float:
    """Median seconds of a step of one run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(EXAMPLE)]
    command += ["--steps", str(STEPS), "--log-file", str(log)]
    done = subprocess.run(
        command, env=environment, check=False, timeout=WITHIN_S, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"the example trainer failed:\n{done.stderr[-4000:]}")
    times: list[float] = [json.loads(line)["time"] for line in log.read_text().splitlines()]
    steps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(steps[STEPS_LEFT_OUT:])


def _environment() -> dict[str, str]:
    variables = {name: text for name, text in os.environ.items() if "HOLDFAST" not in name}
    return variables | {"OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_bytes(encode(measure()))


if __name__ == "__main__":
    main()
