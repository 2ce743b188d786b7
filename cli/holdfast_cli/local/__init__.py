"""Runs a `MoETrainingJob` on virtual nodes of this machine, under the operator's reconciler.

A virtual node is a directory on a tmpfs, a loopback address, a daemon process and, where a member
lives, an agent process with the ranks below it.
"""

from holdfast_cli.local.cluster import LocalCluster, LocalSettings
from holdfast_cli.local.commands import Commands
from holdfast_cli.local.directory import default_directory
from holdfast_cli.local.status import (
    LocalMemberStatus,
    NodeStatus,
    RankStatus,
    Status,
    TimedEvent,
    read_status,
)
from holdfast_operator.reconciler.report.recoveries import Recovery

__all__ = [
    "Commands",
    "LocalCluster",
    "LocalMemberStatus",
    "LocalSettings",
    "NodeStatus",
    "RankStatus",
    "Recovery",
    "Status",
    "TimedEvent",
    "default_directory",
    "read_status",
]
