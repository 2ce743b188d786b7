"""Carries out what was decided for one job, by requests to the API server and the daemons.

Everything may fail and be tried again: the next look sees what is there and decides anew. So what
failed is told and otherwise forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence

from holdfast_core.jobs import MoETrainingJob
from holdfast_operator.kube.api import NOT_FOUND, ApiError
from holdfast_operator.kube.pods import TrainerPod
from holdfast_operator.kube.resources import JOBS
from holdfast_operator.kube.trainers import GRACE_S
from holdfast_operator.kube.world import World
from holdfast_operator.lookups import node_of
from holdfast_operator.views import (
    AgentState,
    ControlState,
    Decision,
    DeleteJob,
    DropJob,
    Event,
    FenceNode,
    Observed,
    Outcome,
    PublishMembership,
    StartAgent,
    StopAgent,
)

_log = logging.getLogger(__name__)

STUCK_S = GRACE_S + 4.0
"""A pod that is being stopped for longer, on a node whose daemon is silent, is not waited for."""
STARTING_S = 0.5
"""No more pods are created in one turn once it takes longer: thousands take long, and a failure
must not wait for them. The next look starts the rest."""
STARTS_AT_ONCE = 64


class Acting:
    """The hands of one job's control loop.

    Args:
        attempts: member → the highest attempt that was ever started.
    """

    def __init__(self, world: World, attempts: dict[int, int]) -> None:
        self._world, self._attempts = world, attempts
        self._prepared_for, self._to_prepare = "", False
        self._lost_at: dict[int, float] = {}
        """Member → last heartbeat of the node that it was lost with, until its pod is made."""
        self._stopping_since: dict[str, float] = {}

    async def carry_out(
        self,
        job: MoETrainingJob,
        before: ControlState,
        decision: Decision,
        pods: Sequence[TrainerPod],
        observed: Observed,
        remembered: bool,
    ) -> list[Event]:
        """Carry out the actions of `decision`, in order where order matters.

        Args:
            before: what was known when it was made.
            remembered: what must not be forgotten is stored. Without that, no memory is freed.

        Returns:
            what could not be done.
        """
        began = self._world.clock()
        self._note_losses(before, decision, observed)
        failed: list[Event] = []
        later: list[Coroutine[None, None, None]] = [self._clear_stuck(pods, observed)]
        starts: list[StartAgent] = []
        fenced = {action.node for action in decision.actions if isinstance(action, FenceNode)}
        for action in decision.actions:
            match action:
                case PublishMembership(membership=membership):
                    self._world.server.publish(membership)
                case FenceNode(node=node):
                    there = [pod for pod in pods if pod.node == node]
                    await self._try(self._world.trainers.stop(there, force=True), failed)
                case StopAgent(member=member, node=node) if node not in fenced:
                    there = [p for p in pods if (p.member, p.node) == (member, node)]
                    going = [p for p in there if p.state is not AgentState.STOPPING]
                    later.append(self._world.trainers.stop(going))
                case StartAgent():
                    starts.append(action)
                case DropJob() if remembered:
                    self._world.server.drop(job.key)
                case DeleteJob():
                    later.append(self._delete(job))
                case _:
                    pass  # told as an event and a condition
        self._to_prepare |= bool(starts)
        if self._to_prepare:
            await self._try(self._prepare(job), failed)
        await asyncio.gather(
            self._start_all(job, starts, failed), *(self._try(work, failed) for work in later)
        )
        if decision.actions:
            self._world.metrics.observe("act_seconds", self._world.clock() - began)
        if before.outcome is None and decision.state.outcome is not None:
            outcome: Outcome = decision.state.outcome
            self._world.metrics.add("jobs_ended", outcome=outcome.value)
        return failed

    async def _try(self, work: Coroutine[None, None, None], failed: list[Event]) -> None:
        try:
            await work
        except ApiError as error:
            _log.warning("an action failed: %s", error)
            name = getattr(work, "__name__", "")
            self._world.metrics.add("action_failures", action=name.strip("_"))
            event = Event(reason="ActionFailed", message=f"{error}; trying again", warning=True)
            if event not in failed:
                failed.append(event)

    async def _prepare(self, job: MoETrainingJob) -> None:
        if self._prepared_for != job.metadata.uid:
            await self._world.trainers.prepare(job)
            self._prepared_for = job.metadata.uid
        self._to_prepare = False  # what failed is tried again, though all pods are there by then

    async def _start_all(
        self, job: MoETrainingJob, starts: Sequence[StartAgent], failed: list[Event]
    ) -> None:
        began = self._world.clock()
        for first in range(0, len(starts), STARTS_AT_ONCE):
            if self._world.clock() - began >= STARTING_S:
                return
            now = starts[first : first + STARTS_AT_ONCE]
            work = (self._start(job, each.member, each.node) for each in now)
            await asyncio.gather(*(self._try(each, failed) for each in work))

    async def _start(self, job: MoETrainingJob, member: int, node: str) -> None:
        seen = [pod.attempt for pod in self._world.pods.of(job.key) if pod.member == member]
        attempt = max([self._attempts.get(member, 0), *seen]) + 1
        self._attempts[member] = attempt
        await self._world.trainers.start(job, member, node, attempt)
        lost_at = self._lost_at.pop(member, None)
        if lost_at is not None:
            self._world.metrics.observe("replacement_seconds", self._world.clock() - lost_at)

    async def _delete(self, job: MoETrainingJob) -> None:
        try:
            await self._world.api.delete(
                JOBS, job.metadata.namespace, job.metadata.name, uid=job.metadata.uid
            )
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise

    async def _clear_stuck(self, pods: Sequence[TrainerPod], observed: Observed) -> None:
        """Nobody confirms the end of a pod on a node that is gone, so that it would stay."""
        now = self._world.clock()
        stopping = {pod.uid: pod for pod in pods if pod.state is AgentState.STOPPING}
        self._stopping_since = {uid: self._stopping_since.get(uid, now) for uid in stopping}
        stuck = []
        for uid, pod in stopping.items():
            node = observed.nodes.get(pod.node)
            alive = node is not None and node.connected and not node.gone
            if not alive and now - self._stopping_since[uid] >= STUCK_S:
                stuck.append(pod)
        if stuck:
            await self._world.trainers.stop(stuck, force=True)

    def _note_losses(self, before: ControlState, decision: Decision, observed: Observed) -> None:
        fenced = {action.node for action in decision.actions if isinstance(action, FenceNode)}
        for place in before.membership.members if before.membership is not None else ():
            if place.node in fenced:
                self._lost_at[place.index] = node_of(observed, place).heard_at
