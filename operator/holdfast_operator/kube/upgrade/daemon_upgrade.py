"""Upgrades the daemons: deletes their pods, which their DaemonSet leaves to the operator
(OnDelete). `holdfast_operator.reconciler.upgrade_plan` decides which, and when.

Its memory may be lost at any time: pods carry their version, and show whether they are ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from holdfast_core.snapshots.generations import Generation
from holdfast_operator.kube.client.api import NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import PODS
from holdfast_operator.kube.cluster.daemons import DaemonPod, TemplateRevision
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.reconciler.observe.views import Condition, Event
from holdfast_operator.reconciler.upgrade_plan import (
    DaemonState,
    JobRequirements,
    UpgradePlan,
    outdated_condition,
    plan_upgrade,
)

_log = logging.getLogger(__name__)

TICK_S = 1.0
CATCH_UP_S = 60.0
"""Once a daemon is back, the next one of its job waits for a snapshot that is newer than what was
protected before, but not for longer than this: saves may be rare."""
ABSENT_S = 60.0
"""Seconds for which a node whose daemon's pod was deleted is expected to get a new one."""
REPORTED_AFTER_S = 30.0
"""Seconds of waiting after which it is reported as an event."""


class DaemonUpgrade:
    """Replaces daemons of an older version. `run` it as a task.

    Args:
        namespace: namespace of the daemons' pods.
        pods: daemons' pods, by namespace and name.
        revisions: revisions of their DaemonSet.
        jobs: what jobs require of it; None while not all jobs are known yet.
        changed: called with nodes whose daemons became outdated, or are so no more.
        post: posts an event about an object.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        *,
        pods: Callable[[], Mapping[Any, DaemonPod]],
        revisions: Callable[[], Mapping[Any, TemplateRevision]],
        jobs: Callable[[], Iterable[JobRequirements] | None],
        changed: Callable[[frozenset[str]], None],
        post: Callable[[Object, Event], None],
        metrics: OperatorMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._api, self._namespace = api, namespace
        self._pods, self._revisions, self._jobs = pods, revisions, jobs
        self._changed, self._post_about = changed, post
        self._metrics, self._clock = metrics, clock
        self._deleted: set[str] = set()
        """Uids of the pods that this process deleted, until they are gone."""
        self._awaited: dict[str, tuple[Generation, float]] = {}
        """Key of a job → what was protected when one of its daemons was replaced, and when one was
        last seen away."""
        self._waits_since: dict[str, tuple[str, float]] = {}
        self._plan = UpgradePlan()
        self._replaced: dict[str, float] = {}
        """Node → when this process deleted its daemon, until all are replaced."""

    def condition(self, nodes: Iterable[str]) -> Condition | None:
        """Condition of a job with members on `nodes`; None when all their daemons are new."""
        return outdated_condition(self._plan, nodes)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(TICK_S)

    async def turn(self) -> None:
        """Decide once, and act on the decision."""
        newest = _newest(self._revisions().values())
        if newest is None:
            return
        pods = _by_node(pod for pod in self._pods().values() if pod.owner == newest.owner)
        self._deleted &= {pod.uid for pod in pods.values()}
        states = {node: self._state_of(pod, newest) for node, pod in pods.items()}
        for node, at in self._replaced.items():
            if node not in states and self._clock() - at < ABSENT_S:
                states[node] = DaemonState(outdated=False, serves=False, begun=False)
        before, self._plan = self._plan, await self._decide(states, pods, newest)
        now_old = self._plan.outdated
        self._metrics.set("daemons_outdated", len(now_old))
        if before.outdated != now_old:
            self._changed(before.outdated ^ now_old)
        if self._replaced and not now_old and all(each.serves for each in states.values()):
            self._replaced = {}
            text = f"all {len(states)} daemons are of revision {newest.revision} and ready"
            self._post(newest, "DaemonsRenewed", text)

    async def _decide(
        self,
        states: Mapping[str, DaemonState],
        pods: Mapping[str, DaemonPod],
        newest: TemplateRevision,
    ) -> UpgradePlan:
        if not any(state.outdated for state in states.values()):
            self._awaited, self._waits_since = {}, {}
            return UpgradePlan(total=len(states))
        jobs = self._jobs()
        if jobs is None:
            return self._plan
        requirements = list(jobs)
        plan = plan_upgrade(states, [self._catching_up(job, states) for job in requirements])
        for node in plan.renew:
            await self._replace(pods[node], plan, newest)
            for job in requirements:
                if job.protected is not None and any(node in group for group in job.groups):
                    self._awaited[job.key] = (job.protected, self._clock())
        self._record_waiting(plan, newest)
        return plan

    def _state_of(self, pod: DaemonPod, newest: TemplateRevision) -> DaemonState:
        ending = pod.ending or pod.uid in self._deleted
        return DaemonState(
            outdated=pod.revision != newest.revision,
            serves=pod.ready and not ending,
            begun=pod.begun,
            ending=ending,
        )

    def _catching_up(
        self, job: JobRequirements, states: Mapping[str, DaemonState]
    ) -> JobRequirements:
        """The job's requirements, on hold if one of its daemons was replaced and no newer snapshot
        is protected yet."""
        if job.key not in self._awaited:
            return job
        generation, away_at = self._awaited[job.key]
        members = {node for group in job.groups for node in group}
        if any(node in job.weak or not _serves(states.get(node)) for node in members):
            self._awaited[job.key] = (generation, self._clock())
            return job
        newer = job.protected is not None and job.protected > generation
        if newer or job.protected is None or self._clock() - away_at >= CATCH_UP_S:
            del self._awaited[job.key]
            return job
        return replace(job, hold=job.hold or "its next snapshot is not protected yet")

    async def _replace(self, pod: DaemonPod, plan: UpgradePlan, newest: TemplateRevision) -> None:
        try:
            await self._api.delete(PODS, self._namespace, pod.name, uid=pod.uid)
        except ApiError as error:
            if error.status != NOT_FOUND:
                self._metrics.add("action_failures", action="RenewDaemon")
                _log.warning("cannot replace the daemon on %s: %s", pod.node, error)
            return
        self._deleted.add(pod.uid)
        self._replaced[pod.node] = self._clock()
        why = "" if pod.begun else ", at once, because it never started"
        self._post(
            newest,
            "RenewingDaemon",
            f"the daemon on {pod.node} is replaced by one of revision {newest.revision}{why}; "
            f"{plan.progress}",
        )

    def _record_waiting(self, plan: UpgradePlan, newest: TemplateRevision) -> None:
        now = self._clock()
        self._waits_since = {
            node: known
            if (known := self._waits_since.get(node, ("", 0.0)))[0] == why
            else (why, now)
            for node, why in plan.waiting.items()
        }
        for node, (why, since) in sorted(self._waits_since.items()):
            if now - since >= REPORTED_AFTER_S:
                self._post(newest, "DaemonWaits", f"the daemon on {node} keeps its version: {why}")
                return

    def _post(self, newest: TemplateRevision, reason: str, message: str) -> None:
        _log.info("%s: %s", reason, message)
        metadata = {"name": newest.owner_name, "namespace": self._namespace, "uid": newest.owner}
        about = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata}
        self._post_about(about, Event(reason=reason, message=message))


def _serves(state: DaemonState | None) -> bool:
    return state is not None and state.serves


def _newest(revisions: Iterable[TemplateRevision]) -> TemplateRevision | None:
    return max((r for r in revisions if r.owner), key=lambda r: r.number, default=None)


def _by_node(pods: Iterable[DaemonPod]) -> dict[str, DaemonPod]:
    """The daemon of each node. A pod that is not being deleted takes precedence."""
    ordered = sorted((pod for pod in pods if pod.node), key=lambda pod: not pod.ending)
    return {pod.node: pod for pod in ordered}
