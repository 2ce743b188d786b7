"""Verdict on the runs: whether recoveries change the loss by more than another seed does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.loss.runs import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Losses in nats per byte, on the held-out passages over the last steps."""

    fault_free: float
    """Mean over the seeds."""
    recovered: float
    """Mean over the same seeds, with recoveries."""
    spread: float
    """Standard deviation of the fault-free seeds (of a sample)."""
    spread_range: float
    """Largest minus smallest fault-free loss: shown, but not the target."""
    differences: tuple[float, ...]
    """Loss with recoveries minus loss without, seed by seed."""
    standard_error: float
    """Standard error of the mean of `differences`."""
    lost: tuple[float, ...]
    """PLT, seed by seed."""

    @property
    def difference(self) -> float:
        """Difference of the means; above 0 where recoveries made the loss worse."""
        return self.recovered - self.fault_free

    @property
    def met(self) -> bool:
        """Whether the mean difference, up or down, is within the spread."""
        return abs(self.difference) <= self.spread


def judge(fault_free: Sequence[Run], recovered: Sequence[Run]) -> Verdict:
    """Compare runs of the same seeds, in the same order.

    Raises:
        ValueError: when seeds differ, there are fewer than two, a fault-free run had recoveries, or
            a recovery lost no tokens of experts.
    """
    if [run.seed for run in fault_free] != [run.seed for run in recovered] or len(fault_free) < 2:
        raise ValueError("compare the same seeds, at least two of them, with and without faults")
    for run in fault_free:
        if run.restored or run.lost:
            raise ValueError(f"the fault-free run of seed {run.seed} had recoveries")
    for run in recovered:
        if not run.restored or not run.lost:
            raise ValueError(f"no recovery of seed {run.seed} returned an expert to an older step")
    plain = [run.held_out for run in fault_free]
    again = [run.held_out for run in recovered]
    differences = tuple(b - a for a, b in zip(plain, again, strict=True))
    return Verdict(
        fault_free=statistics.fmean(plain),
        recovered=statistics.fmean(again),
        spread=statistics.stdev(plain),
        spread_range=max(plain) - min(plain),
        differences=differences,
        standard_error=statistics.stdev(differences) / math.sqrt(len(differences)),
        lost=tuple(run.lost for run in recovered),
    )


def smoothed(losses: Sequence[float], over: int) -> list[float]:
    """Mean of the last `over` losses at each step, or of fewer at the beginning."""
    return [statistics.fmean(losses[max(0, i + 1 - over) : i + 1]) for i in range(len(losses))]
