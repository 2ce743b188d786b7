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
    PODS,
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
    job_of_pod,
    kueue_priority,
    next_write,
    priority_of,
    suspension_by_queue,
    workload_manifest,
    workload_name,
)
from holdfast_operator.kube.pods.pods import TrainerPod
from holdfast_operator.reconciler.observe.lookups import agent_at
from holdfast_operator.reconciler.observe.remembered import was_placed
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    ClusterView,
    ControlState,
    Decision,
    Event,
    Refusal,
    Suspension,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Queues:
    """Kueue's objects, which all control loops share."""

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
    unread: Refusal | None = None
    """Why it could not be read: then the job runs on with the quota that it has."""


class JobQueue:
    """The Workload of one job.

    Args:
        queues: None where the operator works without Kueue.
    """

    def __init__(self, api: KubeApi, queues: Queues | None) -> None:
        self._api, self._queues = api, queues
        self._decision: tuple[MoETrainingJob, object, QueueDecision] | None = None
        """The last job and admission, and what follows from them: flavors are read once."""
        self._pod: Object | None = None
        """A pod of the job, read in place of a Workload that could not be."""

    def refusal(
        self, job: MoETrainingJob, state: ControlState, pods: Sequence[TrainerPod]
    ) -> Refusal | None:
        """Why a queued job cannot be carried out; None when it can. A job that runs has its quota:
        it is recovered though its Workload cannot be read."""
        runs = was_placed(state) and not state.suspended and bool(pods or self._pod)
        return None if runs else self._unread(job, ended=state.outcome is not None)

    def _unread(self, job: MoETrainingJob, *, ended: bool) -> Refusal | None:
        """Why the decision of the job's queue cannot be read; None when it can, or no queue has to
        decide."""
        if job.kueue_queue is None or job.spec.suspend or ended or self._are_known():
            return None
        asks = f"the job asks for Kueue's queue {job.kueue_queue}"
        if self._queues is None:
            why = "the operator works without: set kueue.enabled in the chart's values"
            return Refusal(reason="KueueIsOff", message=f"{asks}, and {why}")
        version = f"{WORKLOADS.group}/{WORKLOADS.version}"
        message = f"{asks}, and no Workload of {version} can be read: install Kueue"
        return Refusal(reason="KueueUnknown", message=message)

    async def read_decision(
        self, job: MoETrainingJob, pods: Sequence[TrainerPod], *, ended: bool
    ) -> QueueDecision:
        """Read what the queue has decided. The job is one without a `refusal`.

        Args:
            ended: whether the job has an outcome: then no queue keeps it any more.

        Raises:
            ApiError: when a flavor cannot be read, or the pod that is read without its Workload.
        """
        unread = self._unread(job, ended=ended)
        if unread is not None:
            return await self._as_before(job, pods, unread)
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
        if self._queues is None or not self._queues.are_known():
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
            await self._write(self._queues.workloads, job, workload, job_state)
        except ApiError as error:
            if error.status == CONFLICT or (error.status == NOT_FOUND and workload is not None):
                return []  # it has changed, and its watch wakes the loop
            return [Event(reason="ActionFailed", message=f"{error}; trying again", warning=True)]
        return []

    def _are_known(self) -> bool:
        return self._queues is not None and self._queues.are_known()

    def _workload(self, job: MoETrainingJob) -> KueueWorkload | None:
        if self._queues is None:
            return None
        return self._queues.workloads.get(job.metadata.namespace, workload_name(job))

    async def _begin(self, job: MoETrainingJob, workload: KueueWorkload | None) -> QueueDecision:
        if workload is None:
            return QueueDecision(job=job, wants=wants_of(job), suspension=None)
        flavors = [await self._api.get(RESOURCE_FLAVORS, "", name) for name in workload.flavors]
        try:
            admitted = admitted_job(job, workload, flavors)
        except InvalidJobError as error:
            suspension = Suspension(reason="AdmissionConflict", message=str(error))
            return QueueDecision(job=job, wants=wants_of(job), suspension=suspension)
        return QueueDecision(job=admitted, wants=wants_of(admitted), suspension=None)

    async def _as_before(
        self, job: MoETrainingJob, pods: Sequence[TrainerPod], unread: Refusal
    ) -> QueueDecision:
        """Have the job run on with what an earlier admission has added to its newest pod."""
        if self._pod is None:
            newest = max(pods, key=lambda pod: pod.attempt)
            self._pod = await self._api.get(PODS, newest.namespace, newest.name)
        admitted = job_of_pod(job, self._pod)
        return QueueDecision(job=admitted, wants=wants_of(admitted), suspension=None, unread=unread)

    async def _write(
        self,
        workloads: Cache[KueueWorkload],
        job: MoETrainingJob,
        workload: KueueWorkload | None,
        state: JobState,
    ) -> None:
        namespace, name = job.metadata.namespace, workload_name(job)
        match next_write(job, workload, state):
            case Create():
                body = workload_manifest(job, await self._priority(job))
                workloads.put_written(await self._api.create(WORKLOADS, namespace, body))
            case Delete():
                assert workload is not None
                await self._api.delete(WORKLOADS, namespace, name, uid=workload.uid)
            case WriteStatus(status=status):
                assert workload is not None
                body = {"metadata": {"resourceVersion": workload.version}, "status": status}
                found = await self._api.patch(WORKLOADS, namespace, name, body, "status")
                workloads.put_written(found)
            case None:
                pass

    async def _priority(self, job: MoETrainingJob) -> Object:
        name = job.metadata.labels.get(PRIORITY_LABEL)
        if name is not None:
            return kueue_priority(await self._api.get(WORKLOAD_PRIORITIES, "", name))
        return priority_of(job, (await self._api.list(PRIORITIES))["items"])
