"""What a metric is, as data: the form of the lists that daemon and operator expose.

Collectors, documentation and dashboards are made from such lists, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError


class MetricType(StrEnum):
    """What is done with a metric's values."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """One metric, as data."""

    name: str
    """Without the prefix; a counter's exposition adds `_total`."""
    type: MetricType
    help: str
    unit: str = ""
    """`bytes`, `seconds`, or nothing for a plain count."""
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(label, the values it may take) for labels whose values are known beforehand."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in `unit`."""
    prefix: str = "holdfast_"
    """Of the part of Holdfast that exposes it."""

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
        """The name in the exposition."""
        suffix = "_total" if self.type is MetricType.COUNTER else ""
        return f"{self.prefix}{self.name}{suffix}"
