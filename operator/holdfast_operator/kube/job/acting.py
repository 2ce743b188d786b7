"""Carries out the decisions for one job, by requests to the API server and messages to the daemons.

Any action may fail: the next turn of the control loop observes the result and decides again. So a
failure is reported as an event and otherwise forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.client.api import NOT_FOUND, ApiError
from holdfast_operator.kube.client.resources import JOBS
from holdfast_operator.kube.job.starting import PodStarter
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.pods.pods import TrainerPod
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.lookups import node_of
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    ClusterView,
    ControlState,
    Decision,
    DeleteJob,
    DropJob,
    Event,
    FenceNode,
    Inspect,
    PersistNow,
    PublishMembership,
    StartAgent,
    StopAgent,
)

_log = logging.getLogger(__name__)

STUCK_S = 4.0
"""Longest wait, after its grace, for a pod that is being stopped on a node whose daemon is
silent."""


_Work = partial[Coroutine[Any, Any, None]]
"""One action; its failures are counted under the name of its method."""


class ActionExecutor:
    """Carries out the decisions of one job's control loop.

    Args:
        attempts: by member, the highest attempt that was ever started.
    """

    def __init__(self, world: LoopContext, attempts: dict[int, int]) -> None:
        self._world = world
        self._starting = PodStarter(world, attempts)
        self._stopping_since: dict[str, float] = {}

    @property
    def attempts(self) -> Mapping[int, int]:
        """The highest attempt that was ever started, by member."""
        return self._starting.attempts

    @property
    def pending(self) -> tuple[StartAgent, ...]:
        """Agents whose pods do not exist yet."""
        return self._starting.pending

    @property
    def refusal(self) -> ApiError | None:
        """Why the API server makes no pod of a member that needs one; None when it does."""
        return self._starting.refusal

    async def carry_out(
        self,
        job: MoETrainingJob,
        before: ControlState,
        decision: Decision,
        pods: Sequence[TrainerPod],
        observed: ClusterView,
        remembered: bool,
    ) -> list[Event]:
        """Carry out the actions of `decision`, in order where order matters. Pods are still being
        created when it returns.

        Args:
            before: the state that it was decided from.
            remembered: whether what must not be lost is stored; if not, no memory is freed.

        Returns:
            events for actions that failed, and for pods whose creation got no answer since the
            last call; see also `refusal`.
        """
        # Publish memberships and fence nodes at once; collect the other requests.
        began = self._world.clock()
        self._note_losses(before, decision, observed)
        failed: list[Event] = []
        later: list[_Work] = [partial(self._clear_stuck, pods, observed)]
        starts = [action for action in decision.actions if isinstance(action, StartAgent)]
        stops: set[tuple[int, str]] = set()
        fenced = {action.node for action in decision.actions if isinstance(action, FenceNode)}
        for action in decision.actions:
            match action:
                case PublishMembership(membership=membership):
                    self._world.server.publish(membership)
                case FenceNode(node=node):
                    self._starting.take_back(s for s in self.pending if s.node == node)
                    there = [pod for pod in pods if pod.node == node]
                    stop = partial(self._world.trainers.stop, there, force=True)
                    await self._try(stop, failed)
                case StopAgent(member=member, node=node) if node not in fenced:
                    stops.add((member, node))
                case DropJob(up_to_epoch=epoch) if remembered:
                    self._world.server.drop(job.key, up_to_epoch=epoch)
                case PersistNow():
                    self._world.server.persist(job.key)
                case Inspect(epoch=epoch, number=number):
                    self._world.server.inspect(job.key, epoch, number)
                case DeleteJob():
                    later.append(partial(self._delete, job))
                case _:
                    pass  # reported as an event and a condition
        # Cancel the creation of pods that are to be stopped, and then create the missing ones.
        if stops:
            self._starting.take_back(StartAgent(member=m, node=n) for m, n in stops)
            there = [pod for pod in pods if (pod.member, pod.node) in stops]
            going = [pod for pod in there if pod.state is not AgentState.STOPPING]
            later.append(partial(self._world.trainers.stop, going))
        self._starting.want(job, starts)
        if any(pod.state is not AgentState.EXITED for pod in pods):
            self._starting.mend(job)
        await asyncio.gather(*(self._try(work, failed) for work in later))
        for error in self._starting.failures():
            # What the API server has answered is a condition: an event for each try, each about
            # another pod, would be one every few seconds.
            self._fail(error, "start", [] if error.status else failed)
        if decision.actions:
            self._world.metrics.observe("act_seconds", self._world.clock() - began)
        if before.outcome is None and decision.state.outcome is not None:
            outcome: Outcome = decision.state.outcome
            self._world.metrics.add("jobs_ended", outcome=outcome.value)
        return failed

    async def _try(self, work: _Work, failed: list[Event]) -> None:
        try:
            await work()
        except ApiError as error:
            self._fail(error, work.func.__name__.strip("_"), failed)

    def _fail(self, error: ApiError, action: str, failed: list[Event]) -> None:
        _log.warning("an action failed: %s", error)
        self._world.metrics.add("action_failures", action=action)
        event = Event(reason="ActionFailed", message=f"{error}; trying again", warning=True)
        if event not in failed:
            failed.append(event)

    def close(self) -> None:
        """Create no more pods."""
        self._starting.close()

    async def _delete(self, job: MoETrainingJob) -> None:
        try:
            await self._world.api.delete(
                JOBS, job.metadata.namespace, job.metadata.name, uid=job.metadata.uid
            )
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise

    async def _clear_stuck(self, pods: Sequence[TrainerPod], observed: ClusterView) -> None:
        """Force the deletion of pods on nodes that are gone: no kubelet confirms their end, so they
        would stay."""
        now = self._world.clock()
        stopping = {pod.uid: pod for pod in pods if pod.state is AgentState.STOPPING}
        self._stopping_since = {uid: self._stopping_since.get(uid, now) for uid in stopping}
        stuck = []
        for uid, pod in stopping.items():
            node = observed.nodes.get(pod.node)
            alive = node is not None and node.connected and not node.gone
            if not alive and now - self._stopping_since[uid] >= pod.grace_s + STUCK_S:
                stuck.append(pod)
        if stuck:
            await self._world.trainers.stop(stuck, force=True)

    def _note_losses(self, before: ControlState, decision: Decision, observed: ClusterView) -> None:
        fenced = {action.node for action in decision.actions if isinstance(action, FenceNode)}
        after = decision.state.membership
        for member in before.membership.members if before.membership is not None else ():
            replaced = {index for index, _ in decision.state.joining}
            stays = after is not None and (after.has(member.index) or member.index in replaced)
            if member.node in fenced and stays:
                self._starting.note_loss(member.index, node_of(observed, member).heartbeat_at)
