"""The cluster, the operator, its daemons and the observed pods of one benchmark run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, simulated_node
from operator_process import OperatorProcess

from benchmarks.operator_scale.figures import Exposition, Sample
from holdfast_operator.kube.client.api import Api, ApiError, Object, connect
from holdfast_operator.kube.client.resources import JOBS, NODES, PODS
from holdfast_operator.kube.client.watches import Cache, Watch
from holdfast_operator.kube.pods.manifests import TRAINER_SELECTOR

NAMESPACE = "bench"
SAMPLE_S = 0.5
AT_ONCE = 16
KILLED = 137


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """The observed fields of a trainer's pod."""

    name: str
    job: str
    member: str
    node: str
    phase: str

    @property
    def job_and_member(self) -> tuple[str, str]:
        """Job and member, which a replacement shares with the pod that it replaces."""
        return self.job, self.member


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The observed fields of a job."""

    name: str
    phase: str
    epoch: int


class _Uncounted:
    def request(self, verb: str, resource: str, code: str) -> None:
        """Do nothing: the benchmark's own requests are not counted."""


async def add_nodes(cluster: Cluster, count: int) -> None:
    """Add nodes `sim-1` to `sim-<count>`; return when all are Ready."""
    api = await connect(_Uncounted(), str(cluster.kubeconfig))
    names = [f"sim-{number}" for number in range(1, count + 1)]
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> None:
        async with slots:
            await api.create(NODES, "", simulated_node(name))

    await asyncio.gather(*map(one, names[1:]))
    await api.close()
    cluster.wait_ready(names)


class World:
    """Async context manager that runs the watches, the samples and the daemons' process."""

    def __init__(self, cluster: Cluster, operator: OperatorProcess, nodes: int) -> None:
        self._cluster, self._operator, self._nodes = cluster, operator, nodes
        self.pods: Cache[Pod] = Cache(_read_pod, self._pod_changed)
        self.jobs: Cache[Job] = Cache(_read_job, lambda before, now: None)
        self.created_at: dict[str, float] = {}
        """Time at which the watch first showed a pod, by name."""
        self.placed: dict[tuple[str, str], str] = {}
        """Newest pod by (job, member)."""
        self.epochs: dict[tuple[str, int, str], float] = {}
        """Time at which the first ("published") or last ("everywhere") daemon had a membership, by
        (job's key, epoch, event)."""
        self.samples: list[Sample] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._began = time.monotonic()

    async def __aenter__(self) -> World:
        self.api: Api = await connect(_Uncounted(), str(self._cluster.kubeconfig))
        self._daemons = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.operator_scale.players"),
            *(self._operator.control, str(self._nodes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        works = [
            self._watch(PODS, self.pods, {"labelSelector": TRAINER_SELECTOR}).run(),
            self._watch(JOBS, self.jobs, {}).run(),
            self._listen(),
            self._sample(),
        ]
        self._tasks = [asyncio.create_task(work) for work in works]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._daemons.stdin is not None
        self._daemons.stdin.close()
        await self._daemons.wait()
        await self.api.close()

    # --- actions -------------------------------------------------------------------------------

    async def create(self, jobs: list[Object]) -> None:
        """Create `jobs`, a few at a time."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(job: Object) -> None:
            async with slots:
                await self.api.create(JOBS, NAMESPACE, job)

        await asyncio.gather(*map(one, jobs))

    async def delete_jobs(self) -> None:
        """Delete every job; return when the last pod is gone."""
        for namespace, name in list(self.jobs.all()):
            await self.api.delete(JOBS, namespace, name)
        await self.until("all jobs to be gone", lambda: not self.jobs.all() and not self.pods.all())

    async def fail(self, name: str) -> float:
        """Kill a pod's process: its daemon sees the sessions end, and its kubelet writes the exit
        status. Returns the time in monotonic seconds."""
        pod = self.pods.get(NAMESPACE, name)
        assert pod is not None
        ended = {"exitCode": KILLED, "reason": "Error"}
        status = {"name": "trainer", "image": "none", "imageID": "", "ready": False}
        state = {**status, "restartCount": 0, "state": {"terminated": ended}}
        body: Object = {"status": {"phase": "Failed", "containerStatuses": [state]}}
        at = time.monotonic()
        self._tell("lose", pod.job, pod.node)
        with suppress(ApiError):  # it may have been replaced before its kubelet reports
            await self.api.patch(PODS, NAMESPACE, name, body, subresource="status")
        return at

    def players_cpu_s(self) -> float:
        """Processor time of the process that plays all daemons."""
        return _sample(self._daemons.pid, 0.0).cpu_s

    def metrics(self) -> Exposition:
        """The operator's current metrics."""
        return Exposition.parse(self._operator.ask("/metrics"))

    # --- conditions ----------------------------------------------------------------------------

    async def until(self, what: str, true: Callable[[], object], timeout_s: float = 180.0) -> None:
        """Return once `true()` holds.

        Raises:
            TimeoutError: naming `what` was awaited.
        """
        deadline = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
            await asyncio.sleep(0.05)

    def running(self, wanted: int) -> int:
        """Number of jobs seen running with all their pods; `wanted` is for all jobs."""
        pods = sum(pod.phase == "Running" for pod in self.pods.all().values())
        return pods >= wanted and all(job.phase == "Running" for job in self.jobs.all().values())

    # --- observations --------------------------------------------------------------------------

    def _pod_changed(self, before: Pod | None, now: Pod | None) -> None:
        if now is None:
            return
        if before is None:
            self.created_at[now.name] = time.monotonic()
            self.placed[now.job_and_member] = now.name
        runs = now.phase == "Running" and (before is None or before.phase != "Running")
        if runs:
            self._tell("begin", now.job, now.node)

    def _tell(self, word: str, job: str, node: str) -> None:
        assert self._daemons.stdin is not None
        self._daemons.stdin.write(f"{word} {NAMESPACE}.{job} {node}\n".encode())

    async def _listen(self) -> None:
        assert self._daemons.stdout is not None
        while line := await self._daemons.stdout.readline():
            event = json.loads(line)
            key = (event["job"], event["epoch"], event["event"])
            self.epochs.setdefault(key, event["at"])

    async def _sample(self) -> None:
        while True:
            self.samples.append(_sample(self._operator.pid, time.monotonic() - self._began))
            await asyncio.sleep(SAMPLE_S)

    def _watch(self, resource: Any, cache: Any, query: dict[str, str]) -> Watch:
        return Watch(
            self.api,
            resource,
            cache,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            on_restart=lambda kind: None,
            namespace=NAMESPACE,
            query=query,
        )


def _read_pod(raw: Object) -> Pod:
    metadata, labels = raw["metadata"], raw["metadata"]["labels"]
    return Pod(
        name=metadata["name"],
        job=labels["holdfast.dev/job"],
        member=labels["holdfast.dev/member"],
        node=metadata["annotations"]["holdfast.dev/node"],
        phase="Ending" if "deletionTimestamp" in metadata else raw["status"].get("phase", ""),
    )


def _read_job(raw: Object) -> Job:
    status = raw.get("status") or {}
    return Job(
        name=raw["metadata"]["name"],
        phase=status.get("phase", ""),
        epoch=status.get("epoch", 0),
    )


def _sample(pid: int, at: float) -> Sample:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    cpu_s = (int(words[11]) + int(words[12])) / ticks
    return Sample(at=at, cpu_s=cpu_s, rss_bytes=int(words[21]) * page)
