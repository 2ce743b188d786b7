"""By which words of a node's object its end is announced. Pure.

Clouds, autoscalers and their add-ons say so with a taint or a condition, each in its own words;
Kubernetes has no word for it. More can be named on the operator's command line.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast_operator.kube.api import Object

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
"""Keys of taints, and types of conditions. Not among them is what announces a pause as well, such
as AKS's condition VMEventScheduled."""


def notice_of(raw: Object, names: Collection[str] = NOTICES) -> str:
    """Why the node will be taken away soon, in words; empty when nobody says so."""
    for taint in (raw.get("spec") or {}).get("taints") or []:
        if taint.get("key") in names:
            return f"taint {taint['key']}"
    for condition in (raw.get("status") or {}).get("conditions") or []:
        if condition.get("type") in names and condition.get("status") == "True":
            why = condition.get("message") or condition.get("reason") or ""
            return f"condition {condition['type']}" + (f" ({why})" if why else "")
    return ""
