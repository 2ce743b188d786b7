"""The pods of trainers: an index by job, and the requests that create and delete them.

Every answer goes into the watch's copy, so that the next turn of a control loop sees the effect of
the previous one. This module decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.client.api import NOT_FOUND, ApiError, KubeApi
from holdfast_operator.kube.client.resources import PODS
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.pods.manifests import TrainerVolume, account_of, pod_manifest
from holdfast_operator.kube.pods.pods import TrainerPod
from holdfast_operator.kube.pods.shared_objects import EXISTS, SharedObjects, controller_of
from holdfast_operator.reconciler.observe.views import AgentState

AT_ONCE_MAX = 16
"""Number of pods of all jobs that are created at once, and likewise of pods that are deleted at
once: a deletion does not wait for thousands of creations."""

LOOK_AGAIN_S = 1.0
"""Time limit for reading pods anew: a recovery waits for it."""

TRIED = {"dryRun": "All", "fieldValidation": "Strict"}
"""How a pod is tried out."""


class PodIndex:
    """The trainers' pods by job. `on_change` is called with the key of a job whose pods changed."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._by_job: dict[str, dict[str, TrainerPod]] = {}

    def change(self, before: TrainerPod | None, now: TrainerPod | None) -> None:
        """Take in that a pod came, changed or went."""
        if before is not None:
            pods = self._by_job.get(before.job_key, {})
            pods.pop(before.name, None)
            if not pods:
                self._by_job.pop(before.job_key, None)
        if now is not None:
            self._by_job.setdefault(now.job_key, {})[now.name] = now
        for key in {pod.job_key for pod in (before, now) if pod is not None}:
            self._on_change(key)

    def of(self, key: str) -> list[TrainerPod]:
        """All pods with the job's labels, by name."""
        return [pod for _, pod in sorted(self._by_job.get(key, {}).items())]


class Trainers:
    """Creates and deletes the pods of jobs.

    Args:
        cache: the watch's copy of the pods.
        volume: how the pods get at the daemon's sockets.
        on_shared_change: called with the key of a job when an object that its pods share has
            changed.
        budgets: whether jobs get a PodDisruptionBudget.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache[TrainerPod | None],
        metrics: OperatorMetrics,
        volume: TrainerVolume,
        on_shared_change: Callable[[str], None] = lambda key: None,
        budgets: bool = True,
    ) -> None:
        self._api, self._cache, self._metrics, self._volume = api, cache, metrics, volume
        self.shared = SharedObjects(api, on_shared_change, budgets=budgets)
        """Objects that the pods of each job share."""
        self._starts = asyncio.Semaphore(AT_ONCE_MAX)
        self._stops = asyncio.Semaphore(AT_ONCE_MAX)

    async def prepare(self, job: MoETrainingJob) -> None:
        """Make the objects that the job's pods share, where they are missing.

        Raises:
            ApiError: when the API server refuses one, or it belongs to another owner.
        """
        await self.shared.make(job)

    def lacks(self, job: MoETrainingJob) -> bool:
        """Whether an object that the job's pods share is known to be missing; costs no request."""
        return self.shared.lacks(job)

    async def try_out(self, job: MoETrainingJob) -> None:
        """Ask the API server whether it would accept the job's pods, without making one. Unknown
        fields are refused: in a real pod the server would drop them silently.

        Raises:
            ApiError: when it would refuse them.
        """
        body = pod_manifest(job, 0, "any", 0, self._volume)
        if not account_of(job):
            # Admission looks for the job's own account, which is made with the first pods.
            body["spec"]["serviceAccountName"] = "default"
        async with self._starts:
            await self._api.create(PODS, job.metadata.namespace, body, **TRIED)

    async def start(self, job: MoETrainingJob, member: int, node: str, attempt: int) -> bool:
        """Create the member's pod. An existing pod of its name that the job owns counts as that
        pod; returns False when the name belongs to another owner's pod.

        Raises:
            ApiError: when the API server refuses it.
        """
        body = pod_manifest(job, member, node, attempt, self._volume)
        async with self._starts:
            try:
                self._cache.put_written(await self._api.create(PODS, job.metadata.namespace, body))
                self._metrics.add("pods_created")
            except ApiError as error:
                if error.reason != EXISTS:
                    raise
                name = body["metadata"]["name"]
                there = await self._api.get(PODS, job.metadata.namespace, name)
                if controller_of(there).get("uid") != job.metadata.uid:
                    return False
                self._cache.put(there)
        return True

    async def look_again(self, pods: Collection[TrainerPod]) -> bool:
        """Read pods from the API server, since the watch may be behind. Returns whether one of them
        has changed; pods that cannot be read within `LOOK_AGAIN_S` stay as they are known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await asyncio.gather(*(self._look_again(pod) for pod in pods))
        return any(self._cache.get(pod.namespace, pod.name) != pod for pod in pods)

    async def _look_again(self, pod: TrainerPod) -> None:
        with suppress(ApiError):
            self._cache.put(await self._api.get(PODS, pod.namespace, pod.name))

    async def stop(self, pods: Iterable[TrainerPod], *, force: bool = False) -> None:
        """Delete pods; with `force`, without waiting for their nodes.

        Raises:
            ApiError: when the API server refuses it.
        """
        await asyncio.gather(*(self._stop(pod, force) for pod in pods))

    async def _stop(self, pod: TrainerPod, force: bool) -> None:
        # A pod that has ended needs no grace; but a sidecar may still upload its trainer's files.
        force = force or (pod.state is AgentState.EXITED and not pod.others_run)
        async with self._stops:
            try:
                answer = await self._api.delete(
                    PODS, pod.namespace, pod.name, uid=pod.uid, grace_s=0 if force else pod.grace_s
                )
            except ApiError as error:
                if error.status != NOT_FOUND and error.reason != "Conflict":
                    raise
                self._cache.remove(pod.namespace, pod.name)
                return
        self._metrics.add("pods_deleted", force=str(force).lower())
        if force or answer.get("kind") != "Pod":
            self._cache.remove(pod.namespace, pod.name)
        elif self._cache.get(pod.namespace, pod.name) is not None:
            self._cache.put(answer)
