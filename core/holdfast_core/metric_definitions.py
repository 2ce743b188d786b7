"""Definitions of metrics, as data: the form of the lists that daemon and operator expose.

Collectors, documentation and dashboards are made from these lists, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError


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

    @property
    def exposed_name(self) -> str:
        """Name under which the metric is exposed."""
        suffix = "_total" if self.type is MetricType.COUNTER else ""
        return f"{self.prefix}{self.name}{suffix}"
