"""Kueue beside a job's control loop: reads its queue's decision, and keeps its Workload up to date.

Level-triggered like the loop: each write follows from the present state (`workloads`), and after a
failed write the next turn decides again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.client.api import CONFLICT, NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import (
    PRIORITIES,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITIES,
    WORKLOADS,
)
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.cluster.nodes import Wants, wants_of
from holdfast_operator.kube.kueue.workloads import (
    PRIORITY_LABEL,
    Create,
    Delete,
    JobState,
    KueueWorkload,
    WriteStatus,
    admitted_job,
    kueue_priority,
    next_write,
    priority_of,
    suspension_by_queue,
    workload_manifest,
    workload_name,
)
from holdfast_operator.kube.pods.pods import TrainerPod
from holdfast_operator.reconciler.observe.lookups import agent_at
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    ClusterView,
    Decision,
    Event,
    Refusal,
    Suspension,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Queues:
    """Kueue's objects, which all control loops share."""

    api: KubeApi
    workloads: Cache[KueueWorkload]
    """The watch's copy of the Workloads of jobs."""
    are_known: Callable[[], bool]
    """Whether the Workloads have been read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDecision:
    """What the job's queue has decided, as of one turn of its control loop."""

    job: MoETrainingJob
    """The job, with what its admission adds to the pods."""
    wants: Wants
    suspension: Suspension | None


class JobQueue:
    """The Workload of one job."""

    def __init__(self, queues: Queues | None) -> None:
        self._queues = queues
        self._decision: tuple[MoETrainingJob, object, QueueDecision] | None = None
        """The last job and admission, and what follows from them: flavors are read once."""

    def refusal(self, job: MoETrainingJob, *, ended: bool) -> Refusal | None:
        """Why a queued job cannot be carried out; None when it can."""
        if job.kueue_queue is None or job.spec.suspend or ended:
            return None
        if self._queues is not None and self._queues.are_known():
            return None
        asks = f"the job asks for Kueue's queue {job.kueue_queue}"
        if self._queues is None:
            why = "the operator works without: set kueue.enabled in the chart's values"
            return Refusal(reason="KueueIsOff", message=f"{asks}, and {why}")
        version = f"{WORKLOADS.group}/{WORKLOADS.version}"
        message = f"{asks}, and no Workload of {version} can be read: install Kueue"
        return Refusal(reason="KueueUnknown", message=message)

    async def read_decision(self, job: MoETrainingJob, *, ended: bool) -> QueueDecision:
        """Read what the queue has decided.

        Args:
            ended: whether the job has an outcome: then no queue keeps it any more.

        Raises:
            ApiError: when a flavor cannot be read.
        """
        workload, suspension = None, None
        if job.kueue_queue is not None and not job.spec.suspend and not ended:
            workload = self._workload(job)
            suspension = suspension_by_queue(job, workload)
        admission = None
        if workload is not None and suspension is None:
            admission = (workload.uid, workload.admission, workload.checks)
        if self._decision is None or self._decision[:2] != (job, admission):
            decided = await self._begin(job, workload if admission else None)
            self._decision = (job, admission, decided)
        decided = self._decision[2]
        return decided if suspension is None else replace(decided, suspension=suspension)

    async def follow(
        self,
        job: MoETrainingJob,
        pods: Sequence[TrainerPod],
        pending: int,
        observed: ClusterView,
        decision: Decision,
        now: str,
    ) -> list[Event]:
        """Bring the Workload up to date; returns an event for a write that failed.

        Args:
            pending: number of pods that are still to be created.
        """
        if self._queues is None:
            return []
        workload, state = self._workload(job), decision.state
        members = () if state.membership is None else state.membership.members
        agents = [agent_at(observed, member) for member in members]
        job_state = JobState(
            stopped=not pending and all(pod.state is AgentState.EXITED for pod in pods),
            ready=bool(agents)
            and all(a is not None and a.state is AgentState.RUNNING for a in agents),
            outcome=state.outcome,
            reason=state.outcome_reason,
            now=now,
        )
        try:
            await self._write(self._queues, job, workload, job_state)
        except ApiError as error:
            if error.status == CONFLICT or (error.status == NOT_FOUND and workload is not None):
                return []  # it has changed, and its watch wakes the loop
            return [Event(reason="ActionFailed", message=f"{error}; trying again", warning=True)]
        return []

    def _workload(self, job: MoETrainingJob) -> KueueWorkload | None:
        if self._queues is None:
            return None
        return self._queues.workloads.get(job.metadata.namespace, workload_name(job))

    async def _begin(self, job: MoETrainingJob, workload: KueueWorkload | None) -> QueueDecision:
        if workload is None:
            return QueueDecision(job=job, wants=wants_of(job), suspension=None)
        assert self._queues is not None
        api = self._queues.api
        flavors = [await api.get(RESOURCE_FLAVORS, "", name) for name in workload.flavors]
        try:
            admitted = admitted_job(job, workload, flavors)
        except InvalidJobError as error:
            suspension = Suspension(reason="AdmissionConflict", message=str(error))
            return QueueDecision(job=job, wants=wants_of(job), suspension=suspension)
        return QueueDecision(job=admitted, wants=wants_of(admitted), suspension=None)

    async def _write(
        self, queues: Queues, job: MoETrainingJob, workload: KueueWorkload | None, state: JobState
    ) -> None:
        namespace, name = job.metadata.namespace, workload_name(job)
        match next_write(job, workload, state):
            case Create():
                body = workload_manifest(job, await self._priority(queues, job))
                queues.workloads.put_written(await queues.api.create(WORKLOADS, namespace, body))
            case Delete():
                assert workload is not None
                await queues.api.delete(WORKLOADS, namespace, name, uid=workload.uid)
            case WriteStatus(status=status):
                assert workload is not None
                body = {"metadata": {"resourceVersion": workload.version}, "status": status}
                found = await queues.api.patch(WORKLOADS, namespace, name, body, "status")
                queues.workloads.put_written(found)
            case None:
                pass

    async def _priority(self, queues: Queues, job: MoETrainingJob) -> Object:
        name = job.metadata.labels.get(PRIORITY_LABEL)
        if name is not None:
            return kueue_priority(await queues.api.get(WORKLOAD_PRIORITIES, "", name))
        return priority_of(job, (await queues.api.list(PRIORITIES))["items"])
