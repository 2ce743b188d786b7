"""Results of a module of figures: JSON that is complete after each figure.

    {"facts": {…}, "figures": [{"name", "value", "unit", "floor", "floor_name", "ratio", "goal",
     "met", "runs": [[ours, floor], …]}, …], "skipped": ["NAME: reason", …],
     "failed": ["NAME: error", …]}

`value` and `floor` are medians in `unit`, `ratio` is the median of the ratios of the runs, in which
the floor and ours take turns; the runs show the range. A figure without a floor has none of these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import huge_pages
from benchmarks.measure import timed

Pair = tuple[float, float]
"""Seconds of ours and of the floor, measured one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Limit for the ratio of a figure or, without a floor, for its value."""

    limit: float
    least: bool = False
    """Whether the limit is the least that is wanted, not the most."""

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.limit:g}"

    def is_met(self, number: float) -> bool:
        return number >= self.limit if self.least else number <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFigure:
    """One entry of `figures`."""

    name: str
    value: float
    unit: str
    floor: float | None
    floor_name: str
    ratio: float | None
    goal: str | None
    met: bool | None
    runs: Sequence[Sequence[float]]


class Results:
    """The file of one module, written again after each figure.

    Args:
        path: the file.
        small: whether everything is as little as it can be.
        limit_s: age of the process after which no figure begins.
    """

    def __init__(self, path: Path, *, small: bool, limit_s: float) -> None:
        self.small = small
        self._limit_s = limit_s
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._path = path
        self._facts: dict[str, float | str] = {"device": _name_of(self.device)}
        self._figures: list[GpuFigure] = []
        self._skipped: list[str] = []
        self.failed: list[str] = []
        """Figures whose measurement raised, each with its error."""
        self._write()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def repetitions(self) -> int:
        return 2 if self.small else 7

    def left_s(self) -> float:
        """Time that is left for more figures."""
        return self._limit_s - _age_s()

    def state(self, name: str, fact: float | str) -> None:
        """Add a fact about what was measured, such as a number of bytes."""
        self._facts[name] = fact
        self._write()

    def skip(self, name: str, why: str) -> None:
        """Note a figure that is not measured."""
        self._skipped.append(f"{name}: {why}")
        self._write()

    def attempt(self, name: str, measure: Callable[[], object], least_s: float = 2.0) -> None:
        """Measure, if there is time for it; an error fails this figure alone.

        Args:
            least_s: time that it takes.
        """
        if not self.small and self.left_s() < least_s:
            self.skip(name, f"{max(self.left_s(), 0):.0f} s are left of {self._limit_s:.0f} s")
            return
        try:
            measure()
        except Exception as error:  # the next figures do not depend on it
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {str(error)[-300:]}")
            self._write()

    def durations(
        self, name: str, pairs: Sequence[Pair], floor_name: str, goal: Goal | None = None
    ) -> None:
        """Add a duration in milliseconds, `ratio` times its floor."""
        runs = [(1e3 * ours, 1e3 * floor) for ours, floor in pairs]
        self._add(name, runs, "ms", floor_name, [ours / floor for ours, floor in runs], goal)

    def rates(
        self,
        name: str,
        nbytes: int,
        pairs: Sequence[Pair],
        floor_name: str,
        goal: Goal | None = None,
    ) -> None:
        """Add a rate in GB/s, `ratio` of its floor."""
        runs = [(nbytes / 1e9 / ours, nbytes / 1e9 / floor) for ours, floor in pairs]
        self._add(name, runs, "GB/s", floor_name, [ours / floor for ours, floor in runs], goal)

    def longer(
        self, name: str, pairs: Sequence[Pair], floor_name: str, goal: Goal | None = None
    ) -> None:
        """Add a duration in milliseconds whose `ratio` is how much longer than its floor it is, in
        percent."""
        runs = [(1e3 * ours, 1e3 * floor) for ours, floor in pairs]
        percents = [100 * (ours / floor - 1) for ours, floor in runs]
        self._add(name, runs, "ms", floor_name, percents, goal)

    def plain(
        self, name: str, values: Sequence[float], unit: str, goal: Goal | None = None
    ) -> None:
        """Add a figure without a floor."""
        value = statistics.median(values)
        self._append(
            GpuFigure(
                name=name,
                value=value,
                unit=unit,
                floor=None,
                floor_name="",
                ratio=None,
                goal=None if goal is None else f"{goal} {unit}",
                met=None if goal is None else goal.is_met(value),
                runs=[[number] for number in values],
            )
        )

    def _add(
        self,
        name: str,
        runs: Sequence[Pair],
        unit: str,
        floor_name: str,
        ratios: Sequence[float],
        goal: Goal | None,
    ) -> None:
        ratio = statistics.median(ratios)
        self._append(
            GpuFigure(
                name=name,
                value=statistics.median(ours for ours, _ in runs),
                unit=unit,
                floor=statistics.median(floor for _, floor in runs),
                floor_name=floor_name,
                ratio=ratio,
                goal=None if goal is None else f"ratio {goal}",
                met=None if goal is None else goal.is_met(ratio),
                runs=[list(run) for run in runs],
            )
        )

    def _append(self, figure: GpuFigure) -> None:
        self._figures.append(figure)
        print(json.dumps({k: v for k, v in asdict(figure).items() if k != "runs"}), flush=True)
        self._write()

    def _write(self) -> None:
        whole = {
            "facts": self._facts,
            "figures": [asdict(figure) for figure in self._figures],
            "skipped": self._skipped,
            "failed": self.failed,
        }
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(whole), encoding="utf-8")
        new.replace(self._path)


def settle(device: torch.device) -> None:
    """Return when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(
    ours: Callable[[], object],
    floor: Callable[[], object],
    device: torch.device,
    repetitions: int,
    warm_ups: int = 2,
) -> list[Pair]:
    """Time the floor and ours alternately, each until the device has done it."""

    def seconds(action: Callable[[], object]) -> float:
        settle(device)

        def whole() -> None:
            action()
            settle(device)

        return timed(whole)

    pairs = []
    for turn in range(-warm_ups, repetitions):
        floor_s = seconds(floor)
        ours_s = seconds(ours)
        if turn >= 0:
            pairs.append((ours_s, floor_s))
    return pairs


def run(
    module: str, description: str, measure: Callable[[Results], None], *, limit_s: float
) -> int:
    """Run `python -m MODULE --out FILE.json [--small]`, in which no figure begins after `limit_s`;
    return the exit code, which is 1 when a figure failed."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--small", action="store_true", help="little of everything, to try it")
    options = parser.parse_args()
    pages = "small pages (--small)"
    if not options.small:
        pages = huge_pages.enter(module, sys.argv[1:])
    results = Results(options.out, small=options.small, limit_s=limit_s)
    results.state("memory", pages)
    measure(results)
    return 1 if results.failed else 0


def _age_s() -> float:
    """Time since this process began, imports included."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    begin_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begin_s


def _name_of(device: torch.device) -> str:
    with suppress(RuntimeError, AssertionError):
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
    return "CPU"
