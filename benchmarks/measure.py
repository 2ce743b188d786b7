"""Repeated, interleaved measurements, and the figures made from them.

Machines are noisy and shared. So every repetition times the floor right before or after the
measured operation, the ratio is taken within the repetition, and a figure is the median of the
ratios with its whole spread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

REPETITIONS = 7
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of the report."""

    value: float
    """Median, in `unit`."""
    unit: str
    """`× memcpy`, `× bare path`, `× warm save`, `ms` or `%`."""
    low: float
    high: float
    """Upper end of the spread over all repetitions, in `unit`; `low` is the lower end."""
    repetitions: int
    seconds: float = 0.0
    """Median duration of the measured operation."""
    floor_seconds: float = 0.0
    """Median duration of the floor that `value` is a ratio to; 0 when `value` is not a ratio."""
    note: str = ""


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` took."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def ratio(
    seconds: Sequence[float], floors: Sequence[float], unit: str = "× memcpy", note: str = ""
) -> Figure:
    """The median ratio of paired durations."""
    ratios = [taken / floor for taken, floor in zip(seconds, floors, strict=True)]
    return Figure(
        value=statistics.median(ratios),
        unit=unit,
        low=min(ratios),
        high=max(ratios),
        repetitions=len(ratios),
        seconds=statistics.median(seconds),
        floor_seconds=statistics.median(floors),
        note=note,
    )


def milliseconds(seconds: Sequence[float], note: str = "") -> Figure:
    """The median duration."""
    return Figure(
        value=1e3 * statistics.median(seconds),
        unit="ms",
        low=1e3 * min(seconds),
        high=1e3 * max(seconds),
        repetitions=len(seconds),
        seconds=statistics.median(seconds),
        note=note,
    )


def percent(values: Sequence[float], note: str = "") -> Figure:
    """The largest of `values`, which are in percent."""
    return Figure(
        value=max(values),
        unit="%",
        low=min(values),
        high=max(values),
        repetitions=len(values),
        note=note,
    )


def median_percent(
    values: Sequence[float], seconds: Sequence[float], floor_seconds: float = 0.0, note: str = ""
) -> Figure:
    """The median of `values`, which are in percent, beside the durations that they are from."""
    return Figure(
        value=statistics.median(values),
        unit="%",
        low=min(values),
        high=max(values),
        repetitions=len(values),
        seconds=statistics.median(seconds),
        floor_seconds=floor_seconds,
        note=note,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one part of the benchmark, which ran in a process of its own."""

    rows: dict[str, Figure]
    facts: dict[str, float | str] = field(default_factory=dict)
    skipped: str = ""
    """Reason why there are no rows; empty when there are some."""


def encode(outcome: Outcome) -> bytes:
    return msgspec.json.encode(outcome)


def run_part(measure: Callable[[int, Path], Outcome], description: str | None) -> None:
    """Run the command line of one part of a benchmark, `--bytes N --out FILE`.

    Args:
        measure: gets the bytes of state, and the folder of the file.
        description: what `--help` says.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_bytes(encode(measure(options.bytes, options.out.parent)))


def decode(data: bytes) -> Outcome:
    return msgspec.json.decode(data, type=Outcome)
