"""Figures from the operator's exposition and from samples of its process. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "holdfast_operator_"

Key = tuple[str, frozenset[tuple[str, str]]]
"""Key of a sample: its name without the prefix, and its labels."""


@dataclass(frozen=True, slots=True)
class Exposition:
    """The operator's metrics at one time, or their increase between two times."""

    samples: Mapping[Key, float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The exposition in the text that the operator returned."""
        families = text_string_to_metric_families(text)
        return cls(
            {
                (each.name.removeprefix(PREFIX), frozenset(each.labels.items())): each.value
                for family in families
                for each in family.samples
            }
        )

    def since(self, before: Exposition) -> Exposition:
        """Increase since `before`; meaningful only for counters and histograms."""
        return Exposition(
            {key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()}
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum of all samples of that name with these labels, whatever other labels they have."""
        wanted = set(labels.items())
        return sum(v for (found, has), v in self.samples.items() if found == name and wanted <= has)

    def by(self, name: str, *labels: str) -> dict[str, float]:
        """Samples of that name that are not 0, added up by the values of these labels."""
        found: dict[str, float] = {}
        for (sample, pairs), value in self.samples.items():
            if sample == name and value:
                has = dict(pairs)
                word = " ".join(has[label] for label in labels)
                found[word] = found.get(word, 0.0) + value
        return dict(sorted(found.items()))

    def quantile(self, name: str, q: float) -> float | None:
        """Quantile `q` of a histogram, in seconds: interpolated within its bucket, and the last
        bound where it lies beyond. None when nothing was observed."""
        buckets = sorted(
            (float(dict(pairs)["le"]), value)
            for (sample, pairs), value in self.samples.items()
            if sample == f"{name}_bucket"
        )
        if not buckets or not buckets[-1][1]:
            return None
        rank = q * buckets[-1][1]
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= rank and count > below:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (rank - below) / (count - below)
            low, below = bound, count
        return low


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The operator's process at one time."""

    at: float
    """Seconds since the first sample."""
    cpu_s: float
    rss_bytes: int


def halves(samples: Sequence[Sample]) -> dict[str, float]:
    """Processor time per second of wall time, and mean resident memory, in both halves."""
    if len(samples) < 4:
        return {}
    middle = len(samples) // 2
    first, second = samples[: middle + 1], samples[middle:]
    return {
        "cpu_share_first_half": _share(first),
        "cpu_share_second_half": _share(second),
        "rss_bytes_first_half": statistics.fmean(each.rss_bytes for each in first),
        "rss_bytes_second_half": statistics.fmean(each.rss_bytes for each in second),
    }


def _share(samples: Sequence[Sample]) -> float:
    return (samples[-1].cpu_s - samples[0].cpu_s) / (samples[-1].at - samples[0].at)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and maximum, in the unit of the values; nothing without values."""
    if not values:
        return {}
    return {"count": len(values), "median": statistics.median(values), "max": max(values)}
