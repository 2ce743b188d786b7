"""Taints, conditions and labels that announce the end of a node, and conditions that name a
problem. Pure.

Clouds, autoscalers and their add-ons each use something of their own for the end of a node;
Kubernetes defines nothing. More can be named on the operator's command line. A problem does not
end a node: members stay where they are, and new ones prefer other nodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from holdfast_operator.kube.client.api import Object

NOTICES = frozenset(
    {
        "PreemptScheduled",
        "PreemptionScheduled",
        "RebootScheduled",
        "RedeployScheduled",
        "TerminateScheduled",
        "ToBeDeletedByClusterAutoscaler",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/spot-itn",
        "cloud.google.com/impending-node-termination",
        "cloudprovider.azure.microsoft.com/draining",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "medik8s.io/drain",
        "remediator.aks.microsoft.com/unschedulable",
        "remediator.kubernetes.azure.com/unschedulable",
    }
)
"""Keys of taints, and types of conditions. Those that announce a mere pause are not listed, such as
AKS's condition FreezeScheduled."""

LABELS: Mapping[str, Collection[str]] = {
    "cloud.google.com/active-node-maintenance": {"ONGOING"},
    "dgxc.nvidia.com/nvsentinel-state": {
        *("quarantined", "draining", "drain-succeeded", "drain-failed"),
        *("remediating", "remediation-succeeded", "remediation-failed"),
    },
}
"""Labels, with the values that announce the end: of GKE while a host is taken for maintenance, and
of NVSentinel from the fault until it takes the node back, and the label away: after a remediation
that has succeeded, the node has yet to reboot."""

_VM_EVENT = "VMEventScheduled"
"""Condition of AKS for any event of a virtual machine; only its message tells which."""
_END_OF_VM = re.compile(r"\b(?:Preempt|Redeploy|Terminate|Reboot)\b")

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
        # of AKS on nodes with GPUs
        "GPUClockThrottling",
        "GPUMissing",
        "IBLinkFlapping",
        "NVLinkStatusInactive",
        "UnhealthyNvidiaDCGMServices",
        "UnhealthyNvidiaDevicePlugin",
        "XIDErrors",
        # of Nebius
        "NebiusBootDiskIOError",
        "NebiusGPUError",
    }
)
"""Types of conditions that are `True` while something is wrong with the node."""

UNREADY = frozenset(
    {
        # of EKS's node monitoring agent
        "AcceleratedHardwareReady",
        "ContainerRuntimeReady",
        "KernelReady",
        "NetworkingReady",
        "StorageReady",
    }
)
"""Types of conditions that are `False` while something is wrong with the node. One that is missing,
or unknown, names no problem."""


def problem_of(raw: Object) -> str:
    """The first problem that the node's conditions name, in words; empty without one."""
    conditions = (raw.get("status") or {}).get("conditions") or []
    true = {c.get("type") for c in conditions if c.get("status") == "True"}
    false = {c.get("type") for c in conditions if c.get("status") == "False"}
    found = [f"condition {kind}" for kind in sorted(PROBLEMS & true)]
    found += [f"condition {kind} is False" for kind in sorted(UNREADY & false)]
    return found[0] if found else ""


def notice_of(raw: Object, names: Collection[str] = NOTICES) -> str:
    """Reason why the node will be taken away soon, in words; empty when none was announced."""
    for taint in (raw.get("spec") or {}).get("taints") or []:
        if taint.get("key") in names:
            return f"taint {taint['key']}"
    for condition in (raw.get("status") or {}).get("conditions") or []:
        kind, why = condition.get("type"), condition.get("message") or condition.get("reason") or ""
        announced = kind in names or (kind == _VM_EVENT and _END_OF_VM.search(why))
        if announced and condition.get("status") == "True":
            return f"condition {kind}" + (f" ({why})" if why else "")
    labels = (raw.get("metadata") or {}).get("labels") or {}
    for name, values in LABELS.items():
        if labels.get(name) in values:
            return f"label {name}={labels[name]}"
    return ""
