"""New daemons in place of old ones, as in an upgrade."""

from __future__ import annotations

import os
import signal

from holdfast_cli.local import LocalCluster, Status


async def renew_daemon(cluster: LocalCluster, node: str, timeout_s: float) -> None:
    """End the daemon of a node as Kubernetes ends it when the operator renews daemons; return when
    another one serves its memory."""
    before = cluster.status.local.node(node)
    assert before is not None and before.daemon_pid
    os.kill(before.daemon_pid, signal.SIGTERM)

    def back(status: Status) -> bool:
        found = status.local.node(node)
        return found is not None and found.connected and found.incarnation > before.incarnation

    await cluster.wait_for(back, timeout_s=timeout_s, what=f"another daemon on {node}")
