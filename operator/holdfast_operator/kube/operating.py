"""One replica of the operator, with its wiring: it waits for its Lease, then leads until it
ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from holdfast_core.suspect_nodes import SuspectPolicy
from holdfast_operator.control.server import ControlServer
from holdfast_operator.kube.client.api import Api
from holdfast_operator.kube.client.endpoints import Endpoints, endpoint_slice
from holdfast_operator.kube.client.events import Recorder
from holdfast_operator.kube.client.leader import Leader
from holdfast_operator.kube.client.pacing import HEARTBEAT_S_MAX
from holdfast_operator.kube.client.resources import (
    CONTROLLER_REVISIONS,
    NODES,
    PODS,
    WORKLOADS,
    Resource,
)
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.kube.client.watches import Cache, Watch
from holdfast_operator.kube.cluster import room
from holdfast_operator.kube.cluster.attention import Attention
from holdfast_operator.kube.cluster.candidates import CandidateNodes
from holdfast_operator.kube.cluster.daemons import (
    DaemonPod,
    Daemons,
    TemplateRevision,
    read_daemon,
    read_revision,
    with_daemon,
    without_daemon,
)
from holdfast_operator.kube.cluster.idle_nodes import IdleNodes
from holdfast_operator.kube.cluster.node_record import NodeRecord
from holdfast_operator.kube.cluster.nodes import KubeNode, read_node
from holdfast_operator.kube.cluster.notices import NOTICES
from holdfast_operator.kube.cluster.room import PlacedPod, Room, read_placed
from holdfast_operator.kube.cluster.suspects import SuspectNodes
from holdfast_operator.kube.health import Health
from holdfast_operator.kube.job.fleet import Fleet
from holdfast_operator.kube.job.handlers import carry_jobs
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.kueue.queueing import Queues
from holdfast_operator.kube.kueue.workloads import SELECTOR, KueueWorkload, read_workload
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.options import Options
from holdfast_operator.kube.pods.manifests import TRAINER_SELECTOR
from holdfast_operator.kube.pods.placeholders import (
    PLACEHOLDER_LABEL,
    Placeholder,
    Placeholders,
    read_placeholder,
)
from holdfast_operator.kube.pods.pods import TrainerPod, read_pod
from holdfast_operator.kube.pods.trainers import PodIndex, Trainers
from holdfast_operator.kube.upgrade.daemon_upgrade import DaemonUpgrade
from holdfast_protos.connections.identity import Identity

_log = logging.getLogger(__name__)

OF_JOBS = {"labelSelector": TRAINER_SELECTOR}
"""Selects the objects that have the label of a job."""
FIRST_LISTS_S = 10.0
"""Time for the first lists that jobs can do without: those of Workloads, for which queued jobs wait
anyway, and of other people's pods, beside which the scheduler finds room or does not."""
MISSING_S = 5.0
"""Pause between two counts of nodes without a daemon."""
LAST_EVENTS_S = 3.0
"""Time limit for posting the last events."""


class OperatorReplica:
    """One replica of the operator. `run` it.

    Args:
        lease_api: connections for the Lease alone: behind the requests of hundreds of starting
            jobs, a renewal would come too late.
        catch_signals: makes signals call `stop`; called again after a library has replaced the
            handlers.
    """

    def __init__(
        self,
        options: Options,
        api: Api,
        lease_api: Api,
        metrics: OperatorMetrics,
        identity: Identity | None,
        catch_signals: Callable[[OperatorReplica], None],
    ) -> None:
        self._options, self._api, self._metrics = options, api, metrics
        self._catch_signals = catch_signals
        clock = time.monotonic
        self._fleet = Fleet()
        self._leader = Leader(
            lease_api,
            namespace=options.namespace,
            name=options.lease,
            identity=options.identity,
            clock=clock,
            wall=time.time,
            sleep=asyncio.sleep,
        )
        self._server = ControlServer(
            heartbeat_s=HEARTBEAT_S_MAX,
            clock=clock,
            on_evidence=self._fleet.wake,
            identity=identity,
        )
        self._pods = PodIndex(self._wake_job)
        self._pod_cache: Cache[TrainerPod | None] = Cache(read_pod, self._pods.change)
        read = partial(read_node, notices=NOTICES.union(options.notice))
        self._nodes: Cache[KubeNode] = Cache(read, self._node_changed)
        self._daemons = Daemons(clock)
        self._daemon_cache: Cache[DaemonPod] = Cache(read_daemon, self._daemons.change)
        self._watches = {
            **self._watch_each("pods", PODS, self._pod_cache, OF_JOBS),
            "nodes": self._watch(NODES, self._nodes),
            "daemons": self._watch_of_daemons(PODS, self._daemon_cache),
        }
        self._node_record = _record_in(api, options)
        self._room = Room()
        self._room_watches = self._watch_room()
        self._placeholders: Cache[Placeholder] = Cache(read_placeholder, lambda before, now: None)
        self._placeholder_watches = self._watch_each(
            "placeholders", PODS, self._placeholders, {"labelSelector": PLACEHOLDER_LABEL}
        )
        self._workloads: Cache[KueueWorkload] = Cache(read_workload, self._workload_changed)
        self._workload_watches = self._watch_each(
            "workloads", WORKLOADS, self._workloads, {"labelSelector": SELECTOR}
        )
        self._recorder = Recorder(
            api,
            instance=options.identity,
            clock=clock,
            wall=time.time,
            on_drop=lambda: metrics.add("events_dropped"),
        )
        self._revisions: Cache[TemplateRevision] = Cache(read_revision, lambda before, now: None)
        self._renewing = self._renewal()
        self._trainers = Trainers(
            api,
            self._pod_cache,
            metrics,
            options.trainer_volume,
            self._wake_job,
            budgets=options.disruption_budgets,
        )
        self._attention = Attention(self._server, clock=clock, wake=self._fleet.wake)
        self._stop = asyncio.Event()
        self._ready = False

    def health(self) -> Health:
        """Health of this replica, for probes."""
        now = time.monotonic()
        return Health(
            leads=self._leader.leads,
            ready=self._ready,
            oldest_look_s=self._fleet.oldest_look_s(now),
            watches_s=tuple((kind, now - watch.alive_at) for kind, watch in self._watches.items()),
        )

    def stop(self) -> None:
        """End soon, and let another replica lead."""
        self._stop.set()

    async def run(self) -> bool:
        """Run until `stop` is called or the Lease is lost; returns False when it is lost."""
        self._catch_signals(self)
        self._metrics.set("leader", 0)
        acquired = asyncio.create_task(self._leader.acquire())
        await _first(acquired, self._stop.wait())
        if not acquired.done():
            acquired.cancel()
            return True
        self._metrics.set("leader", 1)
        self._metrics.follow(
            "oldest_look_seconds", lambda: self._fleet.oldest_look_s(time.monotonic())
        )
        lost = asyncio.create_task(self._leader.keep())
        try:
            await _first(lost, self._lead())
        finally:
            lease_lost = lost.done()
            lost.cancel()
            if not lease_lost:
                await self._leader.release()
        if lease_lost:
            _log.error("the Lease is lost: ending, so that only one replica works")
        return not lease_lost

    async def _lead(self) -> None:
        options = self._options
        port = await self._server.start(options.listen or "[::]", options.control_port)
        target = endpoint_slice(options.service, options.namespace, options.address, port)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._server.stop)
            work: list[Coroutine[None, None, None]] = [
                *(watch.run() for watch in self._watches.values()),
                self._recorder.run(),
                self._attention.run(),
                self._show_missing_daemons(),
                Endpoints(self._api, target).run(),
                # A leader does not wait for these: what is not watched is made all the same.
                self._trainers.shared.run(self._watches_of_jobs),
            ]
            welcome = [*self._room_watches.values(), *self._placeholder_watches.values()]
            if options.kueue:
                welcome += self._workload_watches.values()
            work += [watch.run() for watch in welcome]
            if options.renew_daemons:
                work += [self._watch_revisions().run(), self._renewing.run()]
            if self._node_record is not None:
                work.append(self._node_record.run())
                self._metrics.follow("nodes_failed", self._node_record.failed_nodes)
            tasks = [asyncio.create_task(each) for each in work]
            stack.callback(lambda: [task.cancel() for task in tasks])
            for kind, watch in self._watches.items():
                await watch.synced.wait()
                _log.info("the watch of %s has its first list", kind)
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LISTS_S):
                    for watch in welcome:
                        await watch.synced.wait()
            idle_nodes = self._idle_nodes()
            self._fleet.begin(self._world(idle_nodes))
            tasks += [asyncio.create_task(each) for each in (self._fleet.run(), idle_nodes.run())]
            if (suspects := self._suspect_nodes()) is not None:
                tasks.append(asyncio.create_task(suspects.run()))
            stack.push_async_callback(self._recorder.flush, LAST_EVENTS_S)
            carrying = carry_jobs(
                self._api, self._fleet, namespaces=options.watch_namespaces, begun=self._begun
            )
            await _first(self._stop.wait(), carrying, *tasks)

    async def _show_missing_daemons(self) -> None:
        """Keep the series of nodes without a daemon up to date, until cancelled."""
        while True:
            await asyncio.sleep(MISSING_S)
            missing = without_daemon(
                self._nodes.all().values(), self._daemon_cache.all().values(), self._server.nodes()
            )
            self._metrics.replace_all("daemon_missing", {(node,): 1.0 for node in missing})

    def _begun(self) -> None:
        self._ready = True
        self._catch_signals(self)

    def _world(self, idle_nodes: IdleNodes) -> LoopContext:
        clock = time.monotonic
        return LoopContext(
            api=self._api,
            server=self._server,
            attention=self._attention,
            candidate_nodes=CandidateNodes(
                self._server,
                self._nodes,
                self._room,
                daemon_returns=self._daemons.returns,
                requests_of=self._fleet.requests_of,
                rating_of=idle_nodes.rating,
                clock=clock,
            ),
            pods=self._pods,
            trainers=self._trainers,
            placeholders=Placeholders(
                self._api,
                self._placeholders,
                are_known=partial(_are_synced, self._placeholder_watches),
                clock=clock,
            ),
            recorder=self._recorder,
            metrics=self._metrics,
            clock=clock,
            worked_s=time.thread_time,
            clocks=ClockPair(now=clock(), wall=time.time()),
            locations=self._options.storage_locations,
            queues=Queues(
                workloads=self._workloads,
                are_known=partial(_are_synced, self._workload_watches),
            )
            if self._options.kueue
            else None,
            node_record=self._node_record,
            insecure=self._options.insecure,
            watch_namespaces=self._options.watch_namespaces,
            outdated=self._renewing.condition,
            status_s=self._fleet.status_s,
        )

    def _idle_nodes(self) -> IdleNodes:
        """What is known of nodes without a job."""
        return IdleNodes(
            self._options.namespace,
            self._node_record,
            nodes=self._server.nodes,
            pods=lambda: self._daemon_cache.all().values(),
            post=self._recorder.post,
            metrics=self._metrics,
            wall=time.time,
        )

    def _suspect_nodes(self) -> SuspectNodes | None:
        """What is done to nodes that fail again and again; None when nothing is."""
        if self._node_record is None or self._options.suspect_nodes is SuspectPolicy.NONE:
            return None
        return SuspectNodes(
            self._api,
            self._options.suspect_nodes,
            self._node_record,
            nodes=lambda: self._nodes.all().values(),
            training=lambda: with_daemon(self._daemon_cache.all().values(), self._server.nodes()),
            post=self._recorder.post,
        )

    def _watch(
        self,
        resource: Resource,
        cache: Cache[Any],
        namespace: str = "",
        query: dict[str, str] | None = None,
    ) -> Watch:
        return Watch(
            self._api,
            resource,
            cache,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            on_restart=lambda kind: self._metrics.add("watch_restarts", resource=kind),
            namespace=namespace,
            query=query,
        )

    def _watch_room(self) -> dict[str, Watch]:
        """Watches of pods that take room, in the watched namespaces and our own."""
        options = self._options
        placed: Cache[PlacedPod] = Cache(read_placed, self._room.change)
        watches = self._watch_each("placed pods", PODS, placed, room.SELECTOR)
        if options.watch_namespaces and options.namespace not in options.watch_namespaces:
            watches["our own pods"] = self._watch(PODS, placed, options.namespace, room.SELECTOR)
        return watches

    def _renewal(self) -> DaemonUpgrade:
        """The upgrade of daemons; it does nothing until it is run."""
        return DaemonUpgrade(
            self._api,
            self._options.namespace,
            pods=self._daemon_cache.all,
            revisions=self._revisions.all,
            jobs=self._fleet.upgrade_requirements,
            changed=self._daemons_changed,
            post=self._recorder.post,
            metrics=self._metrics,
            clock=time.monotonic,
        )

    def _watch_each(
        self, what: str, resource: Resource, cache: Cache[Any], query: dict[str, str]
    ) -> dict[str, Watch]:
        """A watch for each namespace whose jobs are carried out, or one of all namespaces; by what
        is watched, in words."""
        return {
            f"{what} in {namespace}" if namespace else what: self._watch(
                resource, cache, namespace, query
            )
            for namespace in self._options.watch_namespaces or ("",)
        }

    def _watches_of_jobs(self, resource: Resource, cache: Cache[Any]) -> list[Watch]:
        """Watches of the objects of a kind that have the label of a job."""
        return list(self._watch_each(resource.plural, resource, cache, OF_JOBS).values())

    def _watch_of_daemons(self, resource: Resource, cache: Cache[Any]) -> Watch:
        """A watch of the objects of a kind that have the labels of daemons."""
        selector = {"labelSelector": self._options.daemon_selector}
        return self._watch(resource, cache, self._options.namespace, selector)

    def _watch_revisions(self) -> Watch:
        """The watch of template revisions. A leader does not wait for it: jobs do not need it."""
        return self._watch_of_daemons(CONTROLLER_REVISIONS, self._revisions)

    def _wake_job(self, key: str) -> None:
        self._fleet.wake((key,))

    def _daemons_changed(self, nodes: frozenset[str]) -> None:
        for node in nodes:
            self._fleet.wake(self._server.jobs_on(node))

    def _workload_changed(self, before: KueueWorkload | None, now: KueueWorkload | None) -> None:
        workload = now or before
        assert workload is not None
        self._fleet.wake((f"{workload.namespace}.{workload.job}",))

    def _node_changed(self, before: KubeNode | None, now: KubeNode | None) -> None:
        node = now or before
        assert node is not None
        self._fleet.wake(self._server.jobs_on(node.name))
        if self._server.jobs_on(node.name):
            self._fleet.wake(())


def _record_in(api: Api, options: Options) -> NodeRecord | None:
    """The record of nodes' failures; None when none is kept."""
    if not options.node_record:
        return None
    return NodeRecord(api, namespace=options.namespace, name=options.node_record, wall=time.time)


def _are_synced(watches: dict[str, Watch]) -> bool:
    """Whether all have their first lists."""
    return all(watch.synced.is_set() for watch in watches.values())


async def _first(*work: asyncio.Future[None] | Coroutine[object, object, object]) -> None:
    """Wait until the first of `work` ends, cancel what was begun here, and raise its error."""
    begun = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ours = [task for task, given in zip(begun, work, strict=True) if task is not given]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)
    for task in done:
        task.result()
