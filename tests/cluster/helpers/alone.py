"""A script of the examples without Holdfast and without faults, in one pod: runs that lose what
Holdfast protects are compared with it."""

from __future__ import annotations

from pathlib import Path

import jobs
from cluster import Cluster
from machine import ClusterError, wait_for

_RUN_S = 600.0


def train_alone(
    cluster: Cluster, script: str, folder: Path, *arguments: str, processes: int = 1
) -> None:
    """Run `examples/<script>` to its end, in a world of so many processes.

    Args:
        folder: where it finds `jobs.OUTPUT`, on this machine.

    Raises:
        ClusterError: when it fails, with what it wrote.
    """
    jobs.make_folder(folder)
    name = f"alone-{folder.name}"
    launcher = ["python", "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    container = {
        "name": "trainer",
        "command": [*launcher, f"examples/{script}", *arguments],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    pod = {"restartPolicy": "Never", "containers": [container]}
    jobs.fit(pod, f"{1 + processes}Gi")
    jobs.lend_folder(pod, folder)
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod})

    def phase() -> str:
        found = str(cluster.get("pod", name)["status"].get("phase"))
        return found if found in ("Succeeded", "Failed") else ""

    try:
        if wait_for(f"{script} to end", phase, _RUN_S) == "Failed":
            raise ClusterError(f"{script} failed: {cluster.kubectl('logs', name)[-2000:]}")
    finally:
        cluster.kubectl("delete", "pod", name, "--grace-period=0", "--force")
