"""Where a job's pods come from: the operator makes them, or it follows those of another controller.

The control loop chooses a source when it reads the job, and nothing asks afterwards which one it
is. The rules have a strategy of their own for the same two cases (`reconciler.rules.PodStrategy`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.kube.cluster.nodes import Wants
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.pods.pods import TrainerPod, adopted_agents, agents
from holdfast_operator.reconciler.observe.views import AgentView, NodeView, StartAgent

CANDIDATES_MIN = 16


class PodSource(ABC):
    """Where the pods of a job come from: what its control loop asks of the cluster for them."""

    def __init__(self, world: LoopContext) -> None:
        self._world = world

    @abstractmethod
    async def try_out(self, job: MoETrainingJob) -> None:
        """Ask the API server whether it would accept the job's pods.

        Raises:
            ApiError: when it would refuse them.
        """

    @abstractmethod
    def pods(self, key: str, uid: str) -> list[TrainerPod]:
        """List the pods of the job `key`, whose uid is `uid`."""

    @abstractmethod
    def agents(
        self,
        pods: Iterable[TrainerPod],
        membership: Membership | None,
        pending: Iterable[StartAgent],
    ) -> tuple[AgentView, ...]:
        """List the agents in `pods`, and those whose pods are `pending`."""

    @abstractmethod
    def nodes(
        self, job: MoETrainingJob, wants: Wants, near: Collection[str]
    ) -> dict[str, NodeView]:
        """Views of the nodes that the reconciler has to see: the nodes named in `near`, nodes that
        hold something of the job, and nodes that a member could move to."""

    @abstractmethod
    def refusals(self, job: MoETrainingJob, wants: Wants) -> tuple[tuple[str, int], ...]:
        """Reasons why nodes cannot take a member of a job without a membership, each with the
        number of nodes."""


class OwnPods(PodSource):
    """Pods that the operator makes, on nodes that it chooses."""

    async def try_out(self, job: MoETrainingJob) -> None:
        await self._world.trainers.try_out(job)

    def pods(self, key: str, uid: str) -> list[TrainerPod]:
        """The job's pods, without those of an earlier job of its name."""
        return [p for p in self._world.pods.of(key) if p.owner == uid and not p.adopted]

    def agents(
        self,
        pods: Iterable[TrainerPod],
        membership: Membership | None,
        pending: Iterable[StartAgent],
    ) -> tuple[AgentView, ...]:
        return agents(pods, pending)

    def nodes(
        self, job: MoETrainingJob, wants: Wants, near: Collection[str]
    ) -> dict[str, NodeView]:
        wanted = job.spec.nodes + job.spec.failure_policy.spares
        others = max(CANDIDATES_MIN, 2 * wanted)
        return self._world.candidate_nodes.views(job.key, wants, near, others)

    def refusals(self, job: MoETrainingJob, wants: Wants) -> tuple[tuple[str, int], ...]:
        return self._world.candidate_nodes.refusals(job.key, wants)


class FollowedPods(PodSource):
    """Pods that another controller makes, on nodes that the scheduler chooses."""

    async def try_out(self, job: MoETrainingJob) -> None:
        """Ask nothing: another controller has the template of these pods."""

    def pods(self, key: str, uid: str) -> list[TrainerPod]:
        """All pods with the job's label that the operator has not made."""
        return [pod for pod in self._world.pods.of(key) if pod.adopted]

    def agents(
        self,
        pods: Iterable[TrainerPod],
        membership: Membership | None,
        pending: Iterable[StartAgent],
    ) -> tuple[AgentView, ...]:
        return adopted_agents(pods, membership)

    def nodes(
        self, job: MoETrainingJob, wants: Wants, near: Collection[str]
    ) -> dict[str, NodeView]:
        return self._world.candidate_nodes.views(job.key, wants, near, others=0)

    def refusals(self, job: MoETrainingJob, wants: Wants) -> tuple[tuple[str, int], ...]:
        return ()
