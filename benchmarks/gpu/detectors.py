"""Longer steps of a job in which everything is looked for, against one in which nothing is.

Two jobs of three ranks, which share the device, take turns (`benchmarks.detectors`): one with every
detector off, the other with all of them on. Sessions on a GPU do not measure the parts of steps.

- `step_detectors`: the time of a step; `ratio` is in percent;
- `detectors_daemons`, `detectors_trainers`: additional processor time of a node's daemons, and of
  its launcher and rank, in a step.

    python -m benchmarks.gpu.detectors --out FILE.json
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks import detectors
from benchmarks.gpu.results import Goal, Results, run
from holdfast_core.errors import HoldfastError

LIMIT_S = 170.0
IMPORTS_S, START_S = 30.0, 60.0
"""Time that this process takes to start, and both jobs."""
SIZE = detectors.Size(rounds=15)
SMALL = detectors.Size(rounds=3, step_ms=5.0, nbytes=4 << 20)
LONGER = Goal(limit=0.3)


def needed_s(size: detectors.Size) -> float:
    """Time that the figures take."""
    rounds = size.rounds + detectors.LEFT_OUT
    return START_S + 2 * rounds * detectors.BLOCK_STEPS * 1e-3 * size.step_ms


def measure(results: Results) -> None:
    """Measure all figures."""
    if not (results.on_gpu or results.small):
        results.skip("step_detectors", "needs a CUDA device; make bench NAME=detectors needs none")
        return
    size = SMALL if results.small else SIZE
    ways = (detectors.OFF, detectors.ON)

    def take_turns() -> None:
        with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:
            blocks, alarms = asyncio.run(detectors.measure(ways, Path(folder), size))
        pairs = list(zip(blocks["on"], blocks["off"], strict=True))
        results.longer(
            "step_detectors",
            [(on.step_s, off.step_s) for on, off in pairs],
            "the same step, all detectors off",
            None if results.small else LONGER,
        )
        for part in ("daemons", "trainers"):
            results.plain(
                f"detectors_{part}",
                [1e3 * (on.used_s[part] - off.used_s[part]) for on, off in pairs],
                "ms",
            )
        if alarms:
            raise HoldfastError("; ".join(alarms))

    results.attempt("step_detectors", take_turns, needed_s(size))


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.detectors", __doc__ or "", measure, limit_s=LIMIT_S))
