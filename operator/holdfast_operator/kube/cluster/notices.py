"""Taints and conditions that announce the end of a node, and conditions that name a problem. Pure.

Clouds, autoscalers and their add-ons each use a taint or a condition of their own for the end of a
node; Kubernetes defines none. More can be named on the operator's command line. A problem does not
end a node: members stay where they are, and new ones prefer other nodes.
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

PROBLEMS = frozenset(
    {
        # of the kubelet and of network plugins
        "DiskPressure",
        "MemoryPressure",
        "NetworkUnavailable",
        "PIDPressure",
        # of node-problem-detector
        "ContainerRuntimeProblem",
        "ContainerRuntimeUnhealthy",
        "CorruptDockerOverlay2",
        "FilesystemCorruptionProblem",
        "FrequentContainerdRestart",
        "FrequentDockerRestart",
        "FrequentKubeletRestart",
        "FrequentUnregisterNetDevice",
        "KernelDeadlock",
        "KubeletProblem",
        "KubeletUnhealthy",
        "ReadonlyFilesystem",
        # of NVSentinel
        "GpuDriverWatch",
        "GpuInforomWatch",
        "GpuMcuWatch",
        "GpuMemWatch",
        "GpuNvlinkWatch",
        "GpuNvswitchFatalWatch",
        "GpuPcieWatch",
        "GpuPmuWatch",
        "GpuPowerWatch",
        "GpuSmWatch",
        "GpuThermalWatch",
        "SysLogsGPUFallenOff",
        "SysLogsSXIDError",
        "SysLogsXIDError",
    }
)
"""Types of conditions that are `True` while something is wrong with the node."""


def problem_of(raw: Object) -> str:
    """The first problem that the node's conditions name, in words; empty without one."""
    conditions = (raw.get("status") or {}).get("conditions") or []
    true = {c.get("type") for c in conditions if c.get("status") == "True"}
    return next((f"condition {kind}" for kind in sorted(PROBLEMS & true)), "")


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
