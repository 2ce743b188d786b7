"""Figures of the runs: their checks, and the median and range of each phase."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.measure import Figure
from benchmarks.recovery.runs import Kind, Mode, Run
from benchmarks.recovery.traces import MissingError, Phase

AFTER_NOTICED = "after_noticed"
"""Key of the time from the decision to recover to the next step."""

Phases = Mapping[Phase, float]


@dataclass(kw_only=True, slots=True)
class Results:
    """Recoveries of all runs that passed their checks, and what failed in the others."""

    recoveries: dict[tuple[Mode, Kind], list[Phases]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, name: str, run: Run, sha256: str) -> None:
        """Add a run whose final state must have the hash `sha256`.

        Args:
            name: name of the run, for people.
        """
        problems = list(check(run, sha256))
        if problems:
            self.failed += [f"{name}: {problem}" for problem in problems]
            return
        for fault in run.faults:
            phases = run.traces.phases(fault.at, fault.epoch + 1)
            self.recoveries.setdefault((run.mode, fault.kind), []).append(phases)

    def rows(self) -> dict[str, Figure]:
        """Figures by `<mode>_<kind>_<phase>`, in seconds."""
        found: dict[str, Figure] = {}
        for (mode, kind), recoveries in self.recoveries.items():
            for phase in Phase:
                found[key(mode, kind, phase)] = figure([each[phase] for each in recoveries])
            after = [each[Phase.STEP] - each[Phase.NOTICED] for each in recoveries]
            found[key(mode, kind, AFTER_NOTICED)] = figure(after)
        return found


def check(run: Run, sha256: str) -> Iterator[str]:
    """What is wrong with a run, in words.

    Args:
        run: the run.
        sha256: hash of the final state of an undisturbed run. A run that goes on with fewer nodes
            has other batches and sums from then on; it must have restored what it had saved.
    """
    fewer = any(fault.kind is Kind.FEWER for fault in run.faults)
    if not run.sha256 or (run.sha256 != sha256 and not fewer):
        yield f"its final state is {run.sha256[:12] or 'missing'}, not {sha256[:12]}"
    last = max((step.epoch for step in run.traces.steps), default=0)
    if last != 1 + len(run.faults):
        yield f"it ended in epoch {last} after {len(run.faults)} faults"
        return
    for fault in run.faults:
        try:
            run.traces.phases(fault.at, fault.epoch + 1)
            before = run.traces.processes(fault.epoch)
            after = run.traces.processes(fault.epoch + 1)
            if fewer:
                run.traces.check_restored(fault.epoch + 1)
        except MissingError as error:
            yield f"{fault.kind.words}: {error}"
            continue
        same = {rank for rank in before if before[rank] in after.values()}
        stay = set(before) - {fault.rank} if run.mode is Mode.STAY else set()
        if same != stay:
            yield (
                f"{fault.kind.words}: the processes of ranks {sorted(same)} stayed, not those of "
                f"{sorted(stay)}"
            )


def key(mode: Mode, kind: Kind, what: str) -> str:
    """Key of a figure in the report."""
    return f"{mode}_{kind}_{what}"


def figure(seconds: Sequence[float]) -> Figure:
    """Median and range."""
    return Figure(
        value=statistics.median(seconds),
        unit="s",
        low=min(seconds),
        high=max(seconds),
        repetitions=len(seconds),
    )


def shown(figure: Figure) -> str:
    """A figure in seconds, with its range."""
    return f"{figure.value:.2f} ({figure.low:.2f} – {figure.high:.2f})"
