"""What the vote before the optimizer costs a step, in one run that votes in every other step.

So a step with a vote and the one before it, without, are milliseconds apart, and what else the
machine does weighs on both. A vote's cost is its collective, and what a step notes before it so
that it could be undone.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

from benchmarks.measure import Figure
from benchmarks.recovery.runs import Mode, Plan, carry_out
from holdfast_core.errors import UnreachableError

LEFT_OUT = 20
"""Number of first steps that do not count."""


def measure(folder: Path, steps: int) -> dict[str, Figure]:
    """Train undisturbed; return the figures of `figures`.

    Raises:
        HoldfastError: the run did not reach its end.
    """
    plan = Plan(mode=Mode.STAY, steps=steps, folder=folder, kinds=(), every_other_vote=True)
    if not carry_out(plan).sha256:
        raise UnreachableError(f"the run in {folder} did not reach its final state")
    lines = [json.loads(line) for line in plan.log.read_text().splitlines()]
    return figures({line["step"]: line["time"] for line in lines})


def figures(ended_s: dict[int, float]) -> dict[str, Figure]:
    """Times of steps with a vote (even ones) and without, and what the vote adds: the median of all
    pairs, with the middle half of them as the range.

    Args:
        ended_s: when each step ended.
    """
    took = {after: ended_s[after] - ended_s[before] for before, after in _pairs(ended_s)}
    voted = [step for step in took if step % 2 == 0 and step - 1 in took and step > LEFT_OUT]
    return {
        "step_without_vote": _figure([took[step - 1] for step in voted]),
        "step_with_vote": _figure([took[step] for step in voted]),
        "vote": _figure([took[step] - took[step - 1] for step in voted]),
    }


def _pairs(ended_s: dict[int, float]) -> itertools.pairwise[tuple[int, int]]:
    return itertools.pairwise(sorted(ended_s))


def _figure(seconds: list[float]) -> Figure:
    low, middle, high = (1e3 * each for each in statistics.quantiles(seconds, n=4))
    return Figure(value=middle, unit="ms", low=low, high=high, repetitions=len(seconds))
