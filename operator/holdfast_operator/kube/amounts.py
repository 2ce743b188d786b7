"""Amounts of resources: what pods request and nodes have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast_operator.kube.api import Object

Amounts = tuple[tuple[str, float], ...]
"""(resource, amount in its base unit), sorted by resource; hashable."""

_FACTORS = {
    **{"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15},
    **{"E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50},
    "Ei": 2.0**60,
}


def amount(text: str | float) -> float:
    """A Kubernetes quantity as a number; 0 for a text that is none."""
    if isinstance(text, int | float):
        return float(text)
    digits = text.rstrip("KMGTPEikmnu")
    try:
        return float(digits) * _FACTORS.get(text[len(digits) :], 1.0)
    except ValueError:
        return 0.0


def amounts(pod_spec: Object) -> Amounts:
    """Amounts that a pod requests: requests of all its containers, or limits where only those are
    given."""
    asked: list[Amounts] = []
    for container in pod_spec.get("containers") or []:
        resources = container.get("resources") or {}
        wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        asked.append(tuple((name, amount(text)) for name, text in wanted.items()))
    return total(asked)


def total(parts: Iterable[Amounts]) -> Amounts:
    """The sum, resource by resource."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part:
            sums[name] = sums.get(name, 0.0) + value
    return tuple(sorted(sums.items()))


def lacking(wanted: Amounts, there: Mapping[str, float], taken: Amounts) -> str:
    """The first resource of which less is left than wanted; empty when all fit. A resource that the
    node does not list counts as 0."""
    used = dict(taken)
    for name, value in wanted:
        if value > there.get(name, 0.0) - used.get(name, 0.0):
            return name
    return ""
