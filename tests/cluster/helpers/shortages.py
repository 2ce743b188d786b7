"""What a job may have to do without for a while: Redis, room in memory, a disk that is fast.

Each is a fault for `survival.Run`: it begins in the middle of training, is watched while it lasts,
and ends before the next one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import breakage
from holdfast_system import Job
from machine import ClusterError, wait_for
from redis import RedisError
from redis_catalogue import Catalogued, catalogued
from survival import Fault, Run

WAIT_S = 90.0
STEPS_WITHOUT = 10
"""Steps that training has to go on for while something is missing."""
DISK_BYTES_S = 1 << 20
"""Of a slow disk: a thousandth of what a node has usually."""
_PROBE_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FullMemory:
    """What was seen of a job while the memory of one of its nodes took nothing more."""

    degraded: dict[str, Any]
    """Its condition of that name."""
    failed_saves: float
    """What the node's daemon has counted."""
    failed_parity: float
    """Likewise, of parity blocks. Which of the two finds no room first is chance. The other may
    then never fail: slots wait for their parity, and a save without a slot is skipped."""
    steps: int
    """That training went on for meanwhile."""
    recoveries: int
    """That there were meanwhile."""


@dataclass(kw_only=True, slots=True)
class Shortages:
    """The script, and what was seen."""

    slow_node: str
    slow_device: str
    """The disk of that node."""
    catalogue: dict[str, Catalogued] = field(default_factory=dict)
    """Contents of Redis "before" it was taken away, and "afterwards"."""
    full: FullMemory | None = None
    write_s: float = 0.0
    """What 2 MiB took on the slow disk."""

    @property
    def script(self) -> tuple[Fault, ...]:
        return (
            Fault(
                kind="no-redis",
                at=0.1,
                inject=self._take_redis_away,
                restarts=False,
                after=self._bring_redis_back,
            ),
            Fault(kind="crash-in-full-memory", at=0.3, inject=self._crash_in_full_memory),
            Fault(kind="slow-disk", at=0.5, inject=self._slow_down, restarts=False),
            Fault(kind="pod-on-slow-disk", at=0.6, inject=self._delete_pod, after=_end),
        )

    # --- Redis ------------------------------------------------------------------------------------

    def _take_redis_away(self, run: Run) -> str:
        self.catalogue["before"] = _wait_catalogue(run)
        run.holdfast.scale_redis(0)
        return "Redis, for a while"

    def _bring_redis_back(self, run: Run) -> None:
        run.holdfast.scale_redis(1)
        self.catalogue["afterwards"] = _wait_catalogue(run)

    # --- memory -----------------------------------------------------------------------------------

    def _crash_in_full_memory(self, run: Run) -> str:
        """A file of another process takes all the room, and a rank crashes."""
        job = run.job
        _, node = job.member(1)
        before = job.status()
        with run.cluster.fill_memory(node):
            degraded = wait_for("the job to say it", lambda: _no_space(job), WAIT_S)
            step = job.status()["step"]
            after = _wait_steps(job, step)
            metrics = run.holdfast.metrics_of(node)
            self.full = FullMemory(
                degraded=degraded,
                failed_saves=_sum_of(r'saves_failed_total\{cause="storage",', metrics),
                failed_parity=_sum_of(r"parity_failures_total\{", metrics),
                steps=after["step"] - step,
                recoveries=after["recoveries"] - before["recoveries"],
            )
            os.kill(job.rank_process(1), signal.SIGKILL)
            recovered = job.wait(
                "a recovery",
                lambda s: s["recoveries"] > after["recoveries"] and s["phase"] == "Running",
                WAIT_S,
            )
            _wait_steps(job, recovered["step"])
        wait_for("the job to say that it is over", lambda: not _no_space(job), WAIT_S)
        return f"rank 1 while the memory of {node} was full"

    # --- disk -------------------------------------------------------------------------------------

    def _slow_down(self, run: Run) -> str:
        run.lasting.enter_context(breakage.throttled(self.slow_device, DISK_BYTES_S))
        began = time.monotonic()
        file = "/var/lib/kubelet/probe"
        run.cluster.run_on_node(
            *(self.slow_node, "dd", "if=/dev/zero", f"of={file}"),
            *(f"bs={_PROBE_BYTES}", "count=1", "conv=fsync"),
        )
        self.write_s = time.monotonic() - began
        return f"speed of the disk of {self.slow_node}"

    def _delete_pod(self, run: Run) -> str:
        """Its successor is made on that disk."""
        members = run.job.status()["members"]
        pods = [each["pod"] for each in members if each["node"] == self.slow_node]
        if not pods:
            raise ClusterError(f"no member is on {self.slow_node}")
        run.cluster.kubectl("delete", "pod", pods[0], "-n", run.job.namespace, "--wait=false")
        return f"pod {pods[0]} on a slow disk"


def _wait_steps(job: Job, step: int) -> dict[str, Any]:
    """The status once training has gone on from `step`."""
    return job.wait("training to go on", lambda s: s["step"] >= step + STEPS_WITHOUT, WAIT_S)


def _end(run: Run) -> None:
    run.lasting.close()


def _no_space(job: Job) -> dict[str, Any]:
    """The condition that shows that the memory of a node is full; empty when none does."""
    condition = job.condition("Degraded")
    full = condition.get("status") == "True" and "No space left" in condition["message"]
    return condition if full else {}


def _sum_of(series: str, metrics: str) -> float:
    found = re.findall(rf"^holdfast_{series}[^}}]*\}} (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


def _wait_catalogue(run: Run) -> Catalogued:
    """Contents of the catalogue, once it has caught up with the job."""
    job = run.job
    now = job.status()
    nodes = {member["node"] for member in now["members"]}

    def caught_up() -> Catalogued | None:
        with suppress(ClusterError, RedisError):  # it is being started
            found = catalogued(run.holdfast, f"{job.namespace}.{job.name}")
            steps = [generation.step for generation in found.protected.values()]
            if nodes <= found.nodes and len(steps) == len(nodes):
                return found if min(steps) >= now["protectedStep"] else None
        return None

    found = wait_for("the catalogue to know what the daemons know", caught_up, WAIT_S)
    assert found is not None
    return found
