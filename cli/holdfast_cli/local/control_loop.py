"""The control loop of a local run: observe, reconcile, report, act; and again.

It is the adapter between the pure reconciler and a local run's processes, daemons and files. It
decides nothing. Its memory may be lost at any time (`ControlState`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from holdfast_cli.local.directory import RunDirectory, replace_file
from holdfast_cli.local.node_record import NodeRecord
from holdfast_cli.local.reporting import status_of
from holdfast_cli.local.status import Status, TimedEvent, encode, read_status
from holdfast_cli.local.supervisor import Supervisor
from holdfast_core.errors import HoldfastError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.control.server import ControlServer
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.reconciler.observe.counters import from_document
from holdfast_operator.reconciler.observe.views import (
    Action,
    ClusterView,
    ControlState,
    Decision,
    DeleteJob,
    DropJob,
    Fail,
    FenceNode,
    Inspect,
    NodeView,
    PersistNow,
    PublishMembership,
    StartAgent,
    StartStandby,
    StopAgent,
    StopStandby,
    Succeed,
)
from holdfast_operator.reconciler.reconcile import reconcile
from holdfast_operator.reconciler.report.recoveries import Recoveries

STATUS_S = 0.5
"""Least seconds between writes of the status file, unless the epoch changes or events are new."""
EVENTS_KEPT = 200
"""Number of events in the status file, the newest."""
EVENTS_IN_MEMORY_MAX = 10_000
"""Number of events of a run that the process keeps, the newest."""


class Journal:
    """The events of a run, oldest first. `on_event` is called with each event as it happens."""

    def __init__(self, on_event: Callable[[TimedEvent], None] | None) -> None:
        self._on_event = on_event
        self.events: list[TimedEvent] = []

    def post(self, reason: str, message: str, warning: bool = False) -> None:
        event = TimedEvent(time=time.time(), reason=reason, message=message, warning=warning)
        self.events.append(event)
        del self.events[:-EVENTS_IN_MEMORY_MAX]
        if self._on_event is not None:
            self._on_event(event)


class ControlLoop:
    """The control loop of one job, with an agent waiting on `standbys` of its spares."""

    def __init__(
        self,
        job: MoETrainingJob,
        directory: RunDirectory,
        server: ControlServer,
        supervisor: Supervisor,
        journal: Journal,
        standbys: int,
    ) -> None:
        self._job, self._directory, self._standbys = job, directory, standbys
        self._server, self._supervisor = server, supervisor
        self._journal = journal
        self._state = ControlState()
        self._recoveries = Recoveries()
        self._node_record = NodeRecord(directory.node_failures_file)
        self._clocks = ClockPair(now=time.monotonic(), wall=time.time())
        self._written_at = float("-inf")
        self._job_document: dict[str, Any] = {}
        self.status: Status | None = None
        """The newest status; None before the first look."""

    def look(self) -> bool:
        """Observe once and act; returns whether there were actions and the job has not ended."""
        self._supervisor.keep_daemons()
        problem = self._node_record.synchronise()
        if problem:
            self._journal.post("NodeRecordUnreadable", f"{problem}; nothing depends on it", True)
        observed = self._observe()
        decision = reconcile(
            self._job, observed, self._state, time.monotonic(), standbys=self._standbys
        )
        # The next control loop must not repeat the events of this one.
        forced = decision.state.epoch != self._state.epoch or bool(decision.events)
        self._state = decision.state
        for event in decision.events:
            self._journal.post(event.reason, event.message, event.warning)
        wall = time.time()
        self._node_record.note(
            (each.node, each.failure(self._job.key, wall)) for each in decision.blamed
        )
        story = self._recoveries.follow(observed, decision, wall)
        if story is not None:
            self._journal.post(story.reason, story.message, story.warning)
        self._report(observed, decision, forced=forced)
        for action in decision.actions:
            self._carry_out(action)
        return bool(decision.actions) and self._state.outcome is None

    def _observe(self) -> ClusterView:
        reported = self._server.views(self._job.key)
        # Asked once: of a node that is lost meanwhile, agents must not vanish before the node does.
        dead = {name for name in self._supervisor.run.nodes if self._supervisor.is_dead(name)}
        nodes = {}
        for name in self._supervisor.run.nodes:
            node = reported.get(name) or NodeView(name=name)
            if name in dead:
                # Stands in for hardware: the node is gone, whatever its processes reported last.
                node = replace(node, connected=False, gone=True)
            elif self._daemon_returns(name, node):
                node = replace(node, returning=True)
            nodes[name] = replace(
                node,
                disruption=self._directory.notice(name),
                rating=self._node_record.rating(name),
            )
        return ClusterView(
            nodes=nodes,
            agents=self._supervisor.agents(dead),
            standbys=self._supervisor.standbys(dead),
        )

    def _daemon_returns(self, name: str, node: NodeView) -> bool:
        """Whether the daemon is about to come back: it has started or ended since its newest
        heartbeat, or its process is on its way to one of both, as in an upgrade."""
        supervisor = self._supervisor
        if supervisor.daemon_changed_at(name) > node.heartbeat_at:
            return True
        return not node.connected and supervisor.daemon_runs(name)

    def _carry_out(self, action: Action) -> None:
        match action:
            case PublishMembership(membership=membership):
                self._server.publish(membership)
            case StartAgent(member=member, node=node):
                self._supervisor.start_agent(member, node)
            case StopAgent(member=member, node=node):
                self._supervisor.stop_agent(member, node)
            case StartStandby(node=node):
                self._supervisor.start_standby(node)
            case StopStandby(node=node):
                self._supervisor.stop_standby(node)
            case FenceNode(node=node):
                self._supervisor.fence(node)
            case DropJob(up_to_epoch=epoch):
                self._server.drop(self._job.key, up_to_epoch=epoch)
            case PersistNow():
                self._server.persist(self._job.key)
            case Inspect(epoch=epoch, number=number):
                self._server.inspect(self._job.key, epoch, number)
            case Succeed() | Fail() | DeleteJob():
                pass  # reported as an event and a condition; the caller deletes the job

    # --- the status file ----------------------------------------------------------------------

    def _report(self, observed: ClusterView, decision: Decision, *, forced: bool) -> None:
        now = time.monotonic()
        self.status = status_of(
            observed,
            decision,
            self._job,
            self._supervisor.run,
            directory=self._directory,
            clocks=self._clocks,
            now=now,
            pid=os.getpid(),
            events=self._journal.events[-EVENTS_KEPT:],
            recoveries=self._recoveries.all,
            previous=self._job_document,
        )
        self._job_document = self.status.job_document
        if forced or now - self._written_at >= STATUS_S:
            self._written_at = now
            try:
                replace_file(self._directory.status_file, encode(self.status))
            except OSError:
                return  # readers see an older status; the next look tries again

    def remember(self) -> None:
        """Take over counters, events and recoveries of an earlier control loop from its status
        file. Without the file, any node may hold the job."""
        self._state = dataclasses.replace(self._state, homes=tuple(self._supervisor.run.nodes))
        try:
            earlier = read_status(self._directory.status_file)
        except HoldfastError:
            return
        if earlier.local.job == self._job.key:
            counters = from_document(earlier.counters, now=time.monotonic(), wall=time.time())
            self._state = ControlState.remembering(counters)
            self._journal.events = list(earlier.local.events)
            self._recoveries.all = list(earlier.local.recoveries)
            self._job_document = earlier.job_document
