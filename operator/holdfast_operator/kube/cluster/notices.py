"""Taints and conditions that announce the end of a node. Pure.

Clouds, autoscalers and their add-ons each use a taint or a condition of their own; Kubernetes
defines none. More can be named on the operator's command line.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast_operator.kube.client.api import Object

NOTICES = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/spot-itn",
        "cloud.google.com/impending-node-termination",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "remediator.aks.microsoft.com/unschedulable",
    }
)
"""Keys of taints, and types of conditions. Those that also announce a mere pause are not listed,
such as AKS's condition VMEventScheduled."""


def notice_of(raw: Object, names: Collection[str] = NOTICES) -> str:
    """Reason why the node will be taken away soon, in words; empty when none was announced."""
    for taint in (raw.get("spec") or {}).get("taints") or []:
        if taint.get("key") in names:
            return f"taint {taint['key']}"
    for condition in (raw.get("status") or {}).get("conditions") or []:
        if condition.get("type") in names and condition.get("status") == "True":
            why = condition.get("message") or condition.get("reason") or ""
            return f"condition {condition['type']}" + (f" ({why})" if why else "")
    return ""
