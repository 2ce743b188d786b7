"""The control loop of one job: observe, reconcile, write the status, carry out; and again.

Level-triggered: it looks when something has changed and when a deadline may have passed. Its memory
may be lost at any time: what must not be lost is in the status before the loop acts on it. It
decides nothing about failures.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.schema import COPY_ANNOTATION, RESUME_ANNOTATION
from holdfast_operator.kube.acting import Acting
from holdfast_operator.kube.api import FORBIDDEN, ApiError, Object
from holdfast_operator.kube.finalizer import FINALIZER
from holdfast_operator.kube.nodes import Wants, wants_of
from holdfast_operator.kube.pacing import pause_s
from holdfast_operator.kube.pods import TrainerPod, adopted_agents, agents, pod_names
from holdfast_operator.kube.queueing import Queueing
from holdfast_operator.kube.recovery_log import RecoveryLog
from holdfast_operator.kube.status import recoveries_of, refusal_status, status_of
from holdfast_operator.kube.status_writer import StatusWriter
from holdfast_operator.kube.world import LoopContext
from holdfast_operator.reconciler.conditions import INSECURE
from holdfast_operator.reconciler.counters import from_document
from holdfast_operator.reconciler.reconcile import reconcile
from holdfast_operator.reconciler.renewal import JobStand, stand_of
from holdfast_operator.reconciler.views import (
    Condition,
    ControlState,
    Decision,
    Event,
    NodeView,
    Observed,
    Suspension,
)

_log = logging.getLogger(__name__)

SOON_S = 0.01
"""Shortest rest between two looks, so that one look serves changes that come together."""
DUTY = 4.0
"""Rest after a look, as a multiple of the time for which that look kept the process busy, whatever
wakes the loop. Waiting for the API server counts as rest."""
REFUSED_S = 30.0
"""Seconds until a job that the cluster refuses is tried again: no event announces that it would be
accepted now."""
FINALIZER_S = 30.0
"""Pause of a job that has no finalizer yet: until it has, nothing is done that the job would leave
behind. The finalizer wakes the loop when it is added."""
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.5, 30.0
CANDIDATES_MIN = 16

_PERMANENT = (400, 422)
"""HTTP statuses of refusals that stay the same however often a pod is tried."""


class JobLoop:
    """The control loop of one job.

    Args:
        resource: the job, in the API's form.
    """

    def __init__(self, world: LoopContext, resource: Object) -> None:
        self._world, self._resource = world, resource
        self._wake = asyncio.Event()
        self._woken_at = world.clock()
        self._rested_at = world.clock()
        self._edition: object = None
        """What was last parsed of the job; see `_edition`."""
        self._job: MoETrainingJob | None = None
        self.wants: Wants | None = None
        """Requirements of the job's pods on a node; None until a valid document was read."""
        self._refusal: tuple[str, str] | None = None
        status = resource.get("status") or {}
        now = world.clock()
        self._state = ControlState.remembering(
            from_document(status.get("counters") or {}, now=now, wall=world.clocks.at_wall(now))
        )
        self._recovery_log = RecoveryLog(world.metrics, recoveries_of(status))
        self._members_before = frozenset(m["node"] for m in status.get("members") or [])
        self._writer = StatusWriter(
            world.api,
            resource,
            clock=world.clock,
            interval_s=self._status_s,
            count=lambda result: world.metrics.add("status_writes", result=result),
        )
        self._acting = Acting(world, _attempts(status))
        self._queueing = Queueing(world.queues)
        self._suspension: Suspension | None = None
        """Why the job's queue keeps it from running."""
        self.looked_at = world.clock()

    @property
    def key(self) -> str:
        metadata = self._resource["metadata"]
        return f"{metadata['namespace']}.{metadata['name']}"

    @property
    def uid(self) -> str:
        return str(self._resource["metadata"]["uid"])

    @property
    def status(self) -> Object:
        """The newest status that was written."""
        return self._writer.written

    @property
    def heartbeat_s(self) -> float | None:
        """Heartbeat interval that the job asks for; None until a valid document was read."""
        if self._job is None:
            return None
        return self._job.spec.failure_policy.detection.heartbeat_seconds

    @property
    def holds_requests(self) -> bool:
        """Whether the job's pods take up the amounts that they request."""
        held = self._suspension is not None
        return self._job is not None and not self._job.spec.suspend and not held

    def see(self, resource: Object) -> None:
        """Use a newer version of the job from now on."""
        changed = _edition(resource) != self._edition
        self._resource = resource
        self._writer.see(resource)
        if changed:
            self.wake()

    def wake(self) -> None:
        """Look soon."""
        if not self._wake.is_set():
            self._woken_at = self._world.clock()
            self._wake.set()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            await self._look_repeatedly()
        finally:
            self._acting.close()
            await self._writer.close()

    async def _look_repeatedly(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            self._wake.clear()
            try:
                pause = await self._turn()
                backoff_s = BACKOFF_S_MIN
            except ApiError as error:
                _log.warning("%s: %s; trying again in %.1f s", self.key, error, backoff_s)
                pause, backoff_s = backoff_s, min(2 * backoff_s, BACKOFF_S_MAX)
            except Exception:
                # The failure of one job must not end the loops of all others.
                _log.exception("%s: the control loop failed; it continues", self.key)
                pause, backoff_s = backoff_s, min(2 * backoff_s, BACKOFF_S_MAX)
            self.looked_at = self._world.clock()
            rest_s = min(BACKOFF_S_MAX, max(SOON_S, self._rested_at - self.looked_at))
            await asyncio.sleep(rest_s)
            await self._wait(pause - rest_s)

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._wake.wait()
        except TimeoutError:
            self._woken_at = self._world.clock()

    async def _turn(self) -> float:
        """Do one turn; returns the seconds to rest after it."""
        metadata = self._resource["metadata"]
        if FINALIZER not in (metadata.get("finalizers") or ()):
            return FINALIZER_S
        if _edition(self._resource) != self._edition or self._refusal is not None:
            await self._admit()
        if self._refusal is not None:
            return await self._refuse(*self._refusal)
        assert self._job is not None
        ended = self._state.outcome is not None
        refusal = self._queueing.refusal(self._job, ended=ended)
        if refusal is not None:
            return await self._refuse(*refusal)
        return await self._look(self._job)

    # --- admission ----------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Parse the document, and ask the API server whether it would accept the job's pods."""
        resource = self._resource
        edition = _edition(resource)
        try:
            job = parse_job(resource)
        except InvalidJobError as error:
            self._refusal, self._edition = ("InvalidSpec", str(error)), edition
            return
        fresh = self._job is None and not self._pods()
        changed = self._refusal is not None or _template(self._job) != _template(job)
        if (fresh or changed) and not job.spec.trainer.external:
            try:
                await self._world.trainers.try_out(job)
            except ApiError as error:
                if error.status not in (FORBIDDEN, *_PERMANENT):
                    raise
                word = "InvalidTemplate" if error.status in _PERMANENT else "PodsRefused"
                self._refusal, self._edition = (word, str(error)), edition
                return
        self._job, self.wants, self._refusal = job, wants_of(job), None
        self._edition = edition

    async def _refuse(self, reason: str, message: str) -> float:
        now = self._world.clocks.text(self._world.clock())
        status = refusal_status(self._resource, reason, message, now)
        if await self._writer.write(status):
            self._world.recorder.post(
                self._resource, Event(reason=reason, message=message, warning=True)
            )
        return REFUSED_S

    # --- looking ------------------------------------------------------------------------------

    async def _look(self, asked: MoETrainingJob) -> float:
        ended = self._state.outcome is not None
        turn = await self._queueing.look(asked, ended=ended)
        job, wants = turn.job, turn.wants
        self.wants, self._suspension = wants, turn.suspension
        world, now = self._world, self._world.clock()
        began_s = world.worked_s()
        before = self._state
        if world.attention.listened_since(before.looked_at):
            # The loop paused between looks on purpose; heartbeats were read all the time.
            before = replace(before, looked_at=now)
        pods = self._pods()
        observed = self._observe(job, wants, pods)
        decision = reconcile(job, observed, before, now, world.locations)
        decision = replace(decision, conditions=(*decision.conditions, *self._surroundings()))
        self._state = decision.state
        world.metrics.observe("reconcile_seconds", world.clock() - self._woken_at)
        for event in decision.events:
            world.recorder.post(self._resource, event)
        self._recovery_log.follow(job, before, observed, decision, world.clocks.at_wall(now))
        status = self._status_of(job, observed, decision, pods, now)
        self._rested_at = world.clock() + DUTY * (world.worked_s() - began_s)
        # Written before anything is done: an operator that starts again needs it.
        remembered = await self._writer.write(status)
        ours = [pod for pod in pods if not pod.adopted]
        failed = await self._acting.carry_out(job, before, decision, ours, observed, remembered)
        pending, text = len(self._acting.pending), world.clocks.text(now)
        there = self._pods()  # also those that were created meanwhile
        failed += await self._queueing.follow(asked, there, pending, observed, decision, text)
        for event in failed:
            world.recorder.post(self._resource, event)
        late = world.attention.late()
        return pause_s(job, decision, late=late, failed=bool(failed), now=world.clock())

    def _surroundings(self) -> list[Condition]:
        """Conditions that the job's surroundings impose on it."""
        found = [INSECURE] if self._world.insecure else []
        members = () if self._state.membership is None else self._state.membership.members
        outdated = self._world.outdated(member.node for member in members)
        return found if outdated is None else [*found, outdated]

    def stand(self) -> JobStand | None:
        """Standing of the job for the replacement of its daemons; None when there is none."""
        if self._job is None or self._state.membership is None:
            if not self._members_before:
                return None
            groups = (tuple(sorted(self._members_before)),)
            return JobStand(key=self.key, groups=groups, hold="its daemons have not connected yet")
        server, now = self._world.server, self._world.clock()
        names = [member.node for member in self._state.membership.members]
        nodes = {name: server.view(name, self.key) or NodeView(name=name) for name in names}
        observed = Observed(nodes=nodes, suspension=self._suspension)
        return stand_of(self._job, self._state, observed, now)

    def _pods(self) -> list[TrainerPod]:
        """The job's pods, without those of an earlier job of its name; where another controller
        makes them, all that have the job's label."""
        found = self._world.pods.of(self.key)
        if self._job is not None and self._job.spec.trainer.external:
            return [pod for pod in found if pod.adopted]
        return [pod for pod in found if pod.owner == self.uid and not pod.adopted]

    def _observe(self, job: MoETrainingJob, wants: Wants, pods: list[TrainerPod]) -> Observed:
        near = {pod.node for pod in pods} | self._members_before
        near |= {node for _, node in self._state.joining}
        if self._state.membership is not None:
            self._members_before = frozenset()
            near |= {member.node for member in self._state.membership.members}
        wanted = job.spec.nodes + job.spec.failure_policy.spares
        external = job.spec.trainer.external
        others = 0 if external else max(CANDIDATES_MIN, 2 * wanted)
        nodes = self._world.candidate_nodes.views(self.key, wants, near, others)
        found = (
            adopted_agents(pods, self._state.membership)
            if external
            else agents(pods, self._acting.pending)
        )
        return Observed(nodes=nodes, agents=found, suspension=self._suspension)

    def _status_of(
        self,
        job: MoETrainingJob,
        observed: Observed,
        decision: Decision,
        pods: list[TrainerPod],
        now: float,
    ) -> Object:
        return status_of(
            job,
            observed,
            decision,
            previous=self._writer.written,
            pods=pod_names(pods, decision.state.membership),
            recoveries=self._recovery_log.recoveries,
            clocks=self._world.clocks,
            now=now,
        )

    def _status_s(self) -> float:
        members = self._job.spec.nodes if self._job is not None else 0
        return max(self._world.status_s(), members / 100)


def _edition(resource: Object) -> object:
    """What changes with the job, but not with its status: the version of its spec, its labels,
    which may name a queue, and a user's requests."""
    metadata = resource["metadata"]
    annotations = metadata.get("annotations") or {}
    asked = [annotations.get(name) for name in (COPY_ANNOTATION, RESUME_ANNOTATION)]
    return metadata.get("generation"), metadata.get("labels") or {}, asked


def _template(job: MoETrainingJob | None) -> Object | None:
    return None if job is None else job.spec.trainer.template


def _attempts(status: Object) -> dict[int, int]:
    """Attempt of each member's newest pod, by member, read from a status."""
    found = {}
    for member in [*(status.get("members") or ()), *(status.get("joining") or ())]:
        attempt = re.search(r"-(\d+)$", member.get("pod", ""))
        if attempt is not None:
            found[member["index"]] = int(attempt[1])
    return found
