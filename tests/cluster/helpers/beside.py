"""Jobs of any number of nodes that train side by side, and what each of them must not lose.

A job smaller than its cluster has other nodes to be placed on: what is done wrongly with it shows
there first.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import Cluster
from holdfast_system import Job
from jobs import OUTPUT, PACE, lend_folder, make_folder, trainer_job
from machine import ClusterError

from holdfast_cli.demo.report import LoggedStep, read_log
from holdfast_operator.kube.client.api import Object

STEPS = 100_000
"""More than anybody waits for."""
ARGUMENTS = (*PACE, "--seq", "32", "--dim", "32", "--log-file", f"{OUTPUT}/log.jsonl")
DETECTION = {"heartbeatSeconds": 0.5, "missedHeartbeats": 10, "hangSeconds": 120}
RUNS_S = 300.0
SAFE_STEPS = 3
"""Steps after which a job has something to lose."""


class Beside:
    """A job that trains as long as nobody ends it."""

    def __init__(self, cluster: Cluster, nodes: int, namespace: str = "default") -> None:
        self.nodes, self.name = nodes, f"of-{nodes}"
        self.folder: Path = cluster.home / "shared" / f"{namespace}-{self.name}"
        kind = {"type": "RAIM5", "raim5": {"groupSize": nodes}} if nodes > 1 else {"type": "None"}
        document = trainer_job(
            self.name,
            namespace=namespace,
            steps=STEPS,
            memory="1200Mi",
            arguments=ARGUMENTS,
            nodes=nodes,
            parallelism={"dp": nodes, "ep": nodes},
            redundancy=kind,
            failurePolicy={"spares": 0, "detection": DETECTION, "maxRestarts": 1000},
        )
        document["spec"]["snapshot"] |= {"memoryPerNode": "128Mi"}
        lend_folder(document["spec"]["trainer"]["template"]["spec"], self.folder)
        self.job = Job(cluster, document)

    def begin(self) -> None:
        """Start the job, with nothing left of an earlier one."""
        with suppress(ClusterError):
            self.job.delete()
        make_folder(self.folder)
        self.job.apply()

    def log(self) -> list[LoggedStep]:
        return read_log(self.folder / "log.jsonl")

    def runs_on(self, step: int = 0) -> Object:
        """The status, once the job is Running and something after `step` is safe.

        Raises:
            ClusterError: when it has failed, or does not come so far.
        """
        what = f"{self.name} to have step {step + SAFE_STEPS} safe"
        return self.job.wait(what, lambda s: self._is_safe_after(s, step), RUNS_S)

    def _is_safe_after(self, status: dict[str, Any], step: int) -> bool:
        return status.get("phase") == "Running" and safe_step(status) >= step + SAFE_STEPS

    def irreplaceable(self) -> list[str]:
        """Nodes whose memory nothing could replace."""
        alone = self.nodes == 1
        return [m["node"] for m in self.job.status().get("members", ()) if alone]

    def restored_after(self, epoch: int) -> dict[int, int]:
        """Epoch after `epoch` → the step that it went on from, for those that trained."""
        first: dict[int, int] = {}
        for line in self.log():
            if line.epoch > epoch:
                first.setdefault(line.epoch, line.step - 1)
        return first


def safe_step(status: dict[str, Any]) -> int:
    """The newest step that the operator has stored as safe: protected, or complete in a job without
    redundancy."""
    saved = (status.get("counters") or {}).get("saved")
    return int(str(saved).partition(".")[2]) if saved else 0
