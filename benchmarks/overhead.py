"""What per-step snapshots, and persisting them, cost the example trainer: its step time.

`examples/train_moe.py` runs unchanged under torchrun, in turns without Holdfast (no
`HOLDFAST_SOCKET`), with a snapshot after every step, and with every fifth of them written to a
durable tier besides. Runs that follow one another are compared.

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
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import Cluster
from benchmarks.floors import SHARED_MEMORY
from benchmarks.measure import Figure, Outcome, encode
from holdfast_core.values import Redundancy, Tier
from holdfast_storage.sets import SetStore

JOB = "overhead"
PAIRS = 4
STEPS = 60
STEPS_LEFT_OUT = 10
"""The first steps of a run: allocation, the arena, warm-up."""

RANKS = 2
PERSIST_EVERY = 5
"""Steps."""

BUDGET_BYTES = 4 << 30
WITHIN_S = 300.0
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_moe.py"


def measure() -> Outcome:
    """The rows `overhead` and `persist_overhead`: percent by which a step gets longer, over pairs
    of runs."""
    off, on, persisting = [], [], []
    with Cluster(BUDGET_BYTES) as cluster, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as tmp:
        daemon = cluster.start("node-0")

        def protected(name: str, tier: Tier | None) -> float:
            # A job of its own for each run, so that each starts from the beginning.
            nodes = [daemon.node]
            cluster.control.place(
                name, 1, nodes, redundancy=Redundancy.NONE, nproc_per_node=RANKS, tier=tier
            )
            known = {"HOLDFAST_SOCKET": str(daemon.socket), "HOLDFAST_JOB": name}
            seconds = _step_s(_environment() | known, Path(tmp) / f"{name}.jsonl")
            cluster.control.drop(name)
            return seconds

        for pair in range(PAIRS):
            off.append(_step_s(_environment(), Path(tmp) / f"{pair}.jsonl"))
            on.append(protected(f"{JOB}-{pair}", None))
            store = Path(tmp) / f"tier-{pair}"
            tier = Tier(uri=str(store), every_steps=PERSIST_EVERY, keep=2)
            name = f"{JOB}-persisting-{pair}"
            persisting.append(protected(name, tier))
            if not SetStore(str(store), name).complete():
                raise RuntimeError("nothing was persisted")
    return Outcome(
        rows={
            "overhead": _longer(
                on,
                off,
                "longer step of examples/train_moe.py on two ranks, a snapshot after every step",
            ),
            "persist_overhead": _longer(
                persisting, on, f"and besides every {PERSIST_EVERY}th snapshot written to a tmpfs"
            ),
        }
    )


def _longer(steps: Sequence[float], floors: Sequence[float], note: str) -> Figure:
    percents = [100 * (step / floor - 1) for step, floor in zip(steps, floors, strict=True)]
    return Figure(
        value=statistics.median(percents),
        unit="%",
        low=min(percents),
        high=max(percents),
        repetitions=len(percents),
        seconds=statistics.median(steps),
        floor_seconds=statistics.median(floors),
        note=note,
    )


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
