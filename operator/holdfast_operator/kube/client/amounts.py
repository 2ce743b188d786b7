"""Amounts of resources: what pods request and nodes have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast_operator.kube.client.api import Object

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
    """Amounts that a pod requests, as the scheduler counts them: those of its containers and
    sidecars, or of an init container that needs more beside the sidecars before it; those of the
    whole pod where it gives them; and its overhead. Limits count where only those are given."""
    running = total(_asked(each) for each in pod_spec.get("containers") or [])
    sidecars: Amounts = ()
    peaks: dict[str, float] = {}
    for each in pod_spec.get("initContainers") or []:
        here = total([sidecars, _asked(each)])
        peaks = {**peaks, **{name: max(value, peaks.get(name, 0.0)) for name, value in here}}
        if each.get("restartPolicy") == "Always":
            sidecars = here
    wanted = dict(total([running, sidecars]))
    wanted |= {name: max(value, wanted.get(name, 0.0)) for name, value in peaks.items()}
    wanted |= dict(_asked(pod_spec))
    overhead = pod_spec.get("overhead") or {}
    return total([tuple(wanted.items()), tuple((k, amount(v)) for k, v in overhead.items())])


def _asked(of: Object) -> Amounts:
    """Amounts in the `resources` of a container, or of a pod."""
    resources = of.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return tuple((name, amount(text)) for name, text in wanted.items())


def total(parts: Iterable[Amounts]) -> Amounts:
    """The sum, resource by resource."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part:
            sums[name] = sums.get(name, 0.0) + value
    return tuple(sorted(sums.items()))


def lacking(wanted: Amounts, there: Mapping[str, float], taken: Amounts) -> str:
    """The first resource that is short; empty when all fit. A resource that the node does not list
    counts as 0."""
    used = dict(taken)
    for name, value in wanted:
        if value > there.get(name, 0.0) - used.get(name, 0.0):
            return name
    return ""
