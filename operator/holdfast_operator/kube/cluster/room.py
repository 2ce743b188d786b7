"""Resources that pods other than trainers use on their nodes: other people's pods and our daemons.

Trainers are counted by the nodes that jobs have chosen, even before their pods exist. This module
counts everything else that the operator may see: with watched namespaces, the pods in these
namespaces and in its own. The scheduler has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_operator.kube.client.amounts import Amounts, amounts, total
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import JOB_LABEL
from holdfast_operator.kube.pods.placeholders import PLACEHOLDER_LABEL

SELECTOR = {
    "labelSelector": f"!{JOB_LABEL},!{PLACEHOLDER_LABEL}",
    "fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed",
}
"""Pods that take something from a node, but for trainers and what keeps room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPod:
    """A pod that is on a node, and what it takes there."""

    key: tuple[str, str]
    """(namespace, name)."""
    node: str
    requests: Amounts


def read_placed(raw: Object) -> PlacedPod:
    """Read a pod from the API's form."""
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    return PlacedPod(
        key=(metadata["namespace"], metadata["name"]),
        node=spec.get("nodeName") or "",
        requests=amounts(spec),
    )


class Room:
    """Amounts taken on each node. The watches of pods feed it by `change`; the turns of jobs read
    it."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[tuple[str, str], Amounts]] = {}
        self._sums: dict[str, Amounts] = {}
        """Amounts taken on nodes that some job has asked about since their pods last changed: jobs
        ask often, and pods change rarely."""

    def change(self, before: PlacedPod | None, now: PlacedPod | None) -> None:
        """Take in that a pod came, changed or went."""
        for each in (before, now):
            if each is not None:
                self._sums.pop(each.node, None)
        if before is not None:
            there = self._pods.get(before.node, {})
            there.pop(before.key, None)
            if not there:
                self._pods.pop(before.node, None)
        if now is not None and now.node:
            self._pods.setdefault(now.node, {})[now.key] = now.requests

    def taken(self, node: str) -> Amounts:
        """Amounts that the pods on `node` take, without trainers."""
        if node not in self._sums:
            self._sums[node] = total(self._pods.get(node, {}).values())
        return self._sums[node]
