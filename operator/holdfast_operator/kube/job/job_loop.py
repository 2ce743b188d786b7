"""The control loop of one job. Each turn observes, reconciles, writes the status, and acts.

Level-triggered: it takes a turn when something has changed and when a deadline may have passed. Its
memory may be lost at any time: whatever must survive is in the status before the loop acts on it.
It decides nothing about failures.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from dataclasses import replace

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.schema import COPY_ANNOTATION, RESUME_ANNOTATION
from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.pacing import heartbeats_s, pause_s
from holdfast_operator.kube.cluster.nodes import Wants, wants_of
from holdfast_operator.kube.job.acting import ActionExecutor
from holdfast_operator.kube.job.finalizer import FINALIZER
from holdfast_operator.kube.job.pod_source import FollowedPods, OwnPods, PodSource
from holdfast_operator.kube.job.recovery_log import RecoveryLog
from holdfast_operator.kube.job.starting import RETRY_S
from holdfast_operator.kube.job.status import (
    ATTEMPTS,
    recoveries_of,
    refusal_status,
    status_of,
)
from holdfast_operator.kube.job.status_writer import StatusWriter
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.kueue.queueing import JobQueue
from holdfast_operator.kube.pods.pods import TrainerPod, pod_names
from holdfast_operator.kube.pods.shared_objects import BEING_COLLECTED
from holdfast_operator.reconciler.observe.counters import from_document
from holdfast_operator.reconciler.observe.remembered import was_placed
from holdfast_operator.reconciler.observe.versions import without_earlier_jobs
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    Condition,
    ConditionType,
    ControlState,
    Decision,
    Event,
    EventReason,
    NodeView,
    PublishMembership,
    Refusal,
    Suspension,
)
from holdfast_operator.reconciler.reconcile import reconcile
from holdfast_operator.reconciler.report.conditions import INSECURE
from holdfast_operator.reconciler.upgrade_plan import JobRequirements, requirements_of

_log = logging.getLogger(__name__)

SOON_S = 0.01
"""Shortest rest between two turns, so that one turn serves changes that come together."""
DUTY = 4.0
"""Rest after a turn, whatever wakes the loop, as a multiple of the time for which the turn kept the
process busy. Waiting for the API server counts as rest."""
REFUSED_S = 30.0
"""Seconds until the cluster is asked again about a job whose pods it refuses: no event announces
that it would now accept them."""
FINALIZER_S = 30.0
"""Pause of a job that has no finalizer yet: until it has, nothing is done that the job would leave
behind. The finalizer wakes the loop when it is added."""
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.5, 30.0

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
        """Version of the job that was last parsed; see `_edition`."""
        self._job: MoETrainingJob | None = None
        self._source: PodSource = OwnPods(world)
        self.wants: Wants | None = None
        """Requirements of the job's pods on a node; None until a valid document was read."""
        self._refusal: Refusal | None = None
        """Why the newest version of the job cannot be carried out."""
        self._refused_pods: ApiError | None = None
        """The API server's refusal of the job's pods as they are now; None while it accepts
        them."""
        self._ask_again_at = self._woken_at
        status = resource.get("status") or {}
        now = world.clock()
        self._state = _remembered(status, now, world.clocks.at_wall(now))
        self._recovery_log = RecoveryLog(world.metrics, recoveries_of(status))
        self._writer = StatusWriter(
            world.api,
            resource,
            clock=world.clock,
            interval_s=self._status_s,
            count=lambda result: world.metrics.add("status_writes", result=result),
        )
        self._acting = ActionExecutor(world, _attempts(status))
        self._queue = JobQueue(world.api, world.queues)
        self._suspension: Suspension | None = None
        """Why the job's queue keeps it from running."""
        self._unread: Refusal | None = None
        """Why the decision of its queue could not be read in the last turn."""
        self.looked_at = world.clock()
        self.has_looked = False
        """Whether a turn has succeeded, so that the job's requirements are known."""

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
        """Take a turn soon."""
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
            else:
                self.has_looked = True
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
        due = self._refusal is not None and self._world.clock() >= self._ask_again_at
        if due or _edition(self._resource) != self._edition:
            await self._admit()
        if self._job is None:  # no version of it could ever be read
            assert self._refusal is not None
            return await self._refuse(self._refusal)
        refusal = self._queue.refusal(self._job, self._state, self._pods())
        if refusal is not None:
            return await self._refuse(refusal)
        return await self._look(self._job)

    # --- admission ----------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Parse the document, and ask the API server whether it would accept the job's pods. The
        loop continues with a refused job: its deadlines count, and what runs already is cared for,
        by the last version that could be read."""
        resource = self._resource
        edition = _edition(resource)
        self._ask_again_at = self._world.clock() + REFUSED_S
        try:
            job = parse_job(resource)
        except InvalidJobError as error:
            self._refusal = Refusal(reason="InvalidSpec", message=str(error))
            self._edition = edition
            self._report(self._refusal)
            return
        refusal = self._refused_pods = None
        fresh = self._job is None and not self._pods()
        changed = self._refusal is not None or _template(self._job) != _template(job)
        source = FollowedPods(self._world) if job.spec.trainer.external else OwnPods(self._world)
        if fresh or changed:
            try:
                await source.try_out(job)
            except ApiError as error:
                if not error.status:
                    raise
                permanent = error.status in _PERMANENT
                word = "InvalidTemplate" if permanent else ConditionType.PODS_REFUSED.value
                refusal = Refusal(reason=word, message=str(error))
                if permanent:
                    self._report(refusal)
                else:
                    self._refused_pods = error
                if not error.is_final:
                    self._ask_again_at = self._world.clock() + RETRY_S
        self._job, self._source = job, source
        self.wants, self._refusal = wants_of(job), refusal
        self._edition = edition
        wanted_s = job.spec.failure_policy.detection.heartbeat_seconds
        if wanted_s < self._world.server.heartbeat_s:
            # Before the job is looked at: at a slower pace its daemons would seem silent.
            self._world.server.set_heartbeat_s(heartbeats_s(wanted_s))

    async def _refuse(self, refusal: Refusal) -> float:
        now = self._world.clocks.text(self._world.clock())
        status = refusal_status(self._resource, refusal.reason, refusal.message, now)
        if await self._writer.write(status):
            self._report(refusal)
        return REFUSED_S

    def _report(self, refusal: Refusal) -> None:
        event = Event(reason=refusal.reason, message=refusal.message, warning=True)
        self._world.recorder.post(self._resource, event)

    def _note_unread(self, unread: Refusal | None) -> None:
        """Report once that the job runs on without its queue."""
        if unread is not None and unread != self._unread:
            message = f"{unread.message}; until then the job runs on with the quota that it has"
            self._report(Refusal(reason=unread.reason, message=message))
        self._unread = unread

    # --- a turn -------------------------------------------------------------------------------

    async def _look(self, asked: MoETrainingJob) -> float:
        # Observe: the queue's decision, then pods, nodes and heartbeats.
        ended = self._state.outcome is not None
        queue = await self._queue.read_decision(asked, self._pods(), ended=ended)
        job, wants = queue.job, queue.wants
        self.wants, self._suspension = wants, queue.suspension
        self._note_unread(queue.unread)
        world, now = self._world, self._world.clock()
        began_s = world.worked_s()
        before = self._state
        if world.attention.listened_since(before.looked_at):
            # The loop paused between turns on purpose; heartbeats were read all the time.
            before = replace(before, looked_at=now)
        pods = self._pods()
        observed = self._observe(job, wants, pods)

        # Decide, and tell people about it.
        decision = reconcile(job, observed, before, now, world.locations)
        if decision.state.counted > before.counted and await self._look_again(decision, pods):
            pods = self._pods()
            observed = self._observe(job, wants, pods)
            decision = reconcile(job, observed, before, now, world.locations)
        decision = replace(decision, conditions=(*decision.conditions, *self._surroundings()))
        self._state = decision.state
        world.metrics.observe("reconcile_seconds", world.clock() - self._woken_at)
        for event in decision.events:
            world.recorder.post(self._resource, event)
        wall = world.clocks.at_wall(now)
        story = self._recovery_log.follow(job, before, observed, decision, wall)
        if story is not None:
            world.recorder.post(self._resource, story)
        self._note_failures(job, before, decision, wall)
        self._report_refused_pods(decision)

        # Remember, before anything is done: an operator that starts again needs the status.
        status = self._status_of(job, observed, decision, pods, now)
        self._rested_at = world.clock() + DUTY * (world.worked_s() - began_s)
        remembered = await self._writer.write(status)
        if not remembered and before.membership is None and _begins(decision):
            # The next control loop would take the job for one that was never placed.
            self._state = before
            return BACKOFF_S_MIN

        # Act: the job's own pods first, then placeholders and the Workload that follow from them.
        ours = [pod for pod in pods if not pod.adopted]
        failed = await self._acting.carry_out(job, before, decision, ours, observed, remembered)
        pending, text = len(self._acting.pending), world.clocks.text(now)
        await world.placeholders.keep(job, decision.shortage)
        if self._refusal is None or decision.state.membership is not None:
            there = self._pods()  # also those that were created meanwhile
            failed += await self._queue.follow(asked, there, pending, observed, decision, text)
        for event in failed:
            world.recorder.post(self._resource, event)

        # Rest until a deadline may have passed; events wake the loop earlier.
        late = world.attention.late()
        unmade = bool(failed) or self._acting.refusal is not None
        now = world.clock()
        pause = pause_s(job, decision, late=late, failed=unmade, now=now)
        due_at = self._writer.due_at
        return pause if due_at is None else min(pause, max(0.0, due_at - now))

    def _note_failures(
        self, job: MoETrainingJob, before: ControlState, decision: Decision, wall: float
    ) -> None:
        """Count what has failed on which node, what has hung, and what was avoided, and have it
        remembered."""
        metrics, record = self._world.metrics, self._world.node_record
        for failure in decision.blamed:
            metrics.add("node_failures", kind=failure.kind.value)
        hang = decision.state.hang
        if hang is not None and decision.state.hung_at != before.hung_at:
            metrics.add("hangs", kind=str(hang.kind))
        avoided = [event for event in decision.events if event.reason == EventReason.NODE_AVOIDED]
        metrics.add("nodes_avoided", len(avoided))
        if record is not None and decision.blamed:
            record.note((each.node, each.failure(job.key, wall)) for each in decision.blamed)

    def _surroundings(self) -> list[Condition]:
        """Conditions that the job's surroundings impose on it."""
        found = [INSECURE] if self._world.insecure else []
        members = () if self._state.membership is None else self._state.membership.members
        outdated = self._world.outdated(member.node for member in members)
        found += [] if outdated is None else [outdated]
        refused = self._refusal_of_pods()
        return found if refused is None else [*found, refused]

    def _refusal_of_pods(self) -> Condition | None:
        """Condition of a job whose pods the API server refuses; None while it accepts them."""
        error = self._acting.refusal or self._refused_pods
        if error is None:
            return None
        return Condition(
            type=ConditionType.PODS_REFUSED,
            status=True,
            reason=error.reason or "Refused",
            message=f"{error}; tried again within {REFUSED_S:.0f} s",
        )

    def _report_refused_pods(self, decision: Decision) -> None:
        """Post one event when pods begin to be refused, or for another reason: the words differ
        with each try."""
        kind = ConditionType.PODS_REFUSED
        before = self._writer.written.get("conditions") or []
        known = {each.get("reason") for each in before if each.get("type") == kind}
        for condition in decision.conditions:
            new = condition.type is kind and condition.reason not in known
            if new and condition.reason != BEING_COLLECTED:  # it passes
                self._report(Refusal(reason=kind.value, message=condition.message))

    def upgrade_requirements(self) -> JobRequirements | None:
        """What the job requires of the replacement of its daemons; None when nothing."""
        server, now = self._world.server, self._world.clock()
        if self._job is None or self._state.membership is None:
            if self._state.outcome is not None or not was_placed(self._state):
                return None
            homes = self._state.homes or tuple(sorted(server.nodes()))
            hold = "its daemons have not connected yet"
            return JobRequirements(key=self.key, groups=(homes,), hold=hold)
        names = [member.node for member in self._state.membership.members]
        nodes = {name: server.view(name, self.key) or NodeView(name=name) for name in names}
        observed = ClusterView(nodes=nodes, suspension=self._suspension)
        return requirements_of(self._job, self._state, observed, now)

    async def _look_again(self, decision: Decision, pods: list[TrainerPod]) -> bool:
        """Before a recovery counts, read the pods of the members that have failed: daemons may
        report that ranks died before the watch reports that the cluster took their pod away, which
        does not count. Returns whether one of the pods has changed."""
        before, now = self._state.membership, decision.state.membership
        if before is None or now is None:
            return False
        failed = {*now.restarting, *map(now.member_of, now.restarting_ranks)}
        nodes = {member.node for member in before.members if member.index in failed}
        unexplained = [pod for pod in pods if pod.node in nodes and not pod.disruption]
        return await self._world.trainers.look_again(unexplained)

    def _pods(self) -> list[TrainerPod]:
        return self._source.pods(self.key, self.uid)

    def _observe(self, job: MoETrainingJob, wants: Wants, pods: list[TrainerPod]) -> ClusterView:
        near = {pod.node for pod in pods} | {node for _, node in self._state.joining}
        near.update(self._state.homes)
        membership = self._state.membership
        observed = ClusterView(
            nodes=self._source.nodes(job, wants, near),
            agents=self._source.agents(pods, membership, self._acting.pending),
            suspension=self._suspension,
            refusals=self._source.refusals(job, wants) if membership is None else (),
            refusal=self._refusal,
        )
        return without_earlier_jobs(observed, self.uid)

    def _status_of(
        self,
        job: MoETrainingJob,
        observed: ClusterView,
        decision: Decision,
        pods: list[TrainerPod],
        now: float,
    ) -> Object:
        status = status_of(
            job,
            observed,
            decision,
            previous=self._writer.written,
            pods=pod_names(pods, decision.state.membership),
            recoveries=self._recovery_log.recoveries,
            clocks=self._world.clocks,
            now=now,
        )
        if attempts := self._acting.attempts:
            status["counters"][ATTEMPTS] = {str(member): n for member, n in attempts.items()}
        return status

    def _status_s(self) -> float:
        members = self._job.spec.nodes if self._job is not None else 0
        return max(self._world.status_s(), members / 100)


def _begins(decision: Decision) -> bool:
    """Whether the job is placed now."""
    return any(isinstance(action, PublishMembership) for action in decision.actions)


def _edition(resource: Object) -> object:
    """Identify the version of everything in the job but its status: its spec, its labels, which may
    name a queue, and a user's requests."""
    metadata = resource["metadata"]
    annotations = metadata.get("annotations") or {}
    asked = [annotations.get(name) for name in (COPY_ANNOTATION, RESUME_ANNOTATION)]
    return metadata.get("generation"), metadata.get("labels") or {}, asked


def _template(job: MoETrainingJob | None) -> Object | None:
    return None if job is None else job.spec.trainer.template


def _remembered(status: Object, now: float, wall: float) -> ControlState:
    """Restore the state of a control loop from `status`. If its counters cannot be read, or are of
    a version that did not name the members' nodes, the rest of the status has to do: a job that was
    placed must not look like one that never was."""
    counters = from_document(status.get("counters") or {}, now=now, wall=wall)
    members = sorted(status.get("members") or (), key=lambda member: int(member["index"]))
    return replace(
        ControlState.remembering(counters),
        epoch=max(counters.epoch, int(status.get("epoch") or 0)),
        homes=counters.homes or tuple(member["node"] for member in members),
    )


def _attempts(status: Object) -> dict[int, int]:
    """Attempt of each member's newest pod, by member, read from a status: the counted ones, and
    those in names of pods, as earlier versions did not count."""
    found: dict[int, int] = {}
    with suppress(AttributeError, TypeError, ValueError):
        kept = (status.get("counters") or {}).get(ATTEMPTS) or {}
        found = {int(member): int(attempt) for member, attempt in kept.items()}
    for member in [*(status.get("members") or ()), *(status.get("joining") or ())]:
        attempt = re.search(r"-(\d+)$", member.get("pod", ""))
        if attempt is not None:
            found[member["index"]] = max(int(attempt[1]), found.get(member["index"], 0))
    return found
