"""Definitions of metrics, as data: the form of the lists that daemon and operator expose.

Collectors, documentation and dashboards are made from these lists, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from holdfast_core.errors import InvalidJobError

JOB_LABELS = ("namespace", "moejob")
"""Labels of a training job. Not `job`: Prometheus calls a group of scraped targets so."""


def job_labels(job: str) -> dict[str, str]:
    """The labels of the job with this key, `namespace.name`."""
    namespace, _, name = job.partition(".") if "." in job else ("", "", job)
    return dict(zip(JOB_LABELS, (namespace, name), strict=True))


class MetricType(StrEnum):
    """Kind of a metric, as in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """One metric, as data."""

    name: str
    """Name without the prefix; the exposition adds `_total` to a counter's."""
    type: MetricType
    help: str
    unit: str = ""
    """`bytes`, `seconds`, or nothing for a plain count."""
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(label, its possible values) for labels whose values are known beforehand."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in `unit`."""
    prefix: str = "holdfast_"
    """Prefix of the part of Holdfast that exposes the metric."""

    def __post_init__(self) -> None:
        if self.unit and not self.name.endswith(f"_{self.unit}"):
            raise InvalidJobError(f"metric {self.name} must end in its unit, {self.unit}")
        if bool(self.buckets) != (self.type is MetricType.HISTOGRAM):
            raise InvalidJobError(f"metric {self.name}: a histogram, and nothing else, has buckets")
        for label, _ in self.values:
            if label not in self.labels:
                raise InvalidJobError(f"metric {self.name} has no label {label}")

    def series(self, **given: str) -> Iterator[dict[str, str]]:
        """Labels of all series that have the labels `given`; none unless the values of each other
        label are known beforehand.

        A counter has to be exposed as 0 before it counts: Prometheus sees no increase in a series
        that begins with 1.
        """
        others, known = [each for each in self.labels if each not in given], dict(self.values)
        if all(label in known for label in others):
            for values in product(*(known[label] for label in others)):
                yield {**given, **dict(zip(others, values, strict=True))}

    @property
    def exposed_name(self) -> str:
        """Name under which the metric is exposed."""
        suffix = "_total" if self.type is MetricType.COUNTER else ""
        return f"{self.prefix}{self.name}{suffix}"
