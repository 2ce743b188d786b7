"""A cluster in one process: the real handlers, control loops and Control service, on an API server
in memory, with daemons and a kubelet that do as they are asked."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import deepcopy
from typing import Any, cast

import aiohttp
from fake_api import FakeApi
from fake_server import FakeServer

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership, are_two_jobs
from holdfast_operator.control.server import ControlServer
from holdfast_operator.kube.client.api import Api, ApiError, Object
from holdfast_operator.kube.client.events import Recorder
from holdfast_operator.kube.client.resources import JOBS, PODS, WORKLOADS, Resource
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.kube.client.watches import Cache, Watch
from holdfast_operator.kube.cluster.attention import Attention
from holdfast_operator.kube.cluster.candidates import CandidateNodes
from holdfast_operator.kube.cluster.node_record import NodeRecord
from holdfast_operator.kube.cluster.nodes import KubeNode, read_node
from holdfast_operator.kube.cluster.room import Room
from holdfast_operator.kube.job.fleet import Fleet
from holdfast_operator.kube.job.handlers import carry_jobs
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.kueue.queueing import Queues
from holdfast_operator.kube.kueue.workloads import KueueWorkload, read_workload
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.pods.manifests import TrainerVolume
from holdfast_operator.kube.pods.placeholders import (
    PLACEHOLDER_LABEL,
    Placeholders,
    read_placeholder,
)
from holdfast_operator.kube.pods.pods import TrainerPod, read_pod
from holdfast_operator.kube.pods.shared_objects import controller_of
from holdfast_operator.kube.pods.trainers import PodIndex, Trainers
from holdfast_operator.reconciler.observe.views import Condition
from holdfast_protos import codec, control_pb2, values_pb2
from holdfast_protos.changes import changed

WAIT_S = 30.0


class NotedApi(FakeApi):
    """An API that reports every write, and refuses the requests that a test selects."""

    def __init__(
        self, written: Callable[[Resource, Object], None], gone: Callable[[Object], None]
    ) -> None:
        super().__init__()
        self._written, self._gone = written, gone
        self._refusals: dict[tuple[str, str], ApiError] = {}
        self._rules: dict[tuple[str, str], Callable[[str], ApiError | None]] = {}
        self.address = ""

    async def credentials(self) -> dict[str, str]:
        return {"server": self.address}

    def counting(self) -> aiohttp.TraceConfig:
        return aiohttp.TraceConfig()

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Object,
        subresource: str = "",
    ) -> Object:
        before = self.objects.get((resource.plural, namespace, name), {})
        found = await super().patch(resource, namespace, name, body, subresource)
        if found.get("kind") == "Status":
            self._gone(before)
        return found

    def refuse_next(self, verb: str, resource: Resource, error: ApiError) -> None:
        """Refuse the next request of this verb and resource."""
        self._refusals[verb, resource.plural] = error

    def refuse_always(self, verb: str, resource: Resource, error: ApiError) -> None:
        """Refuse all requests of this verb and resource, until `accept`."""
        self.refuse_each(verb, resource, lambda name: error)

    def accept(self, verb: str, resource: Resource) -> None:
        """Accept requests of this verb and resource again."""
        del self._rules[verb, resource.plural]

    def refuse_each(
        self, verb: str, resource: Resource, refusal: Callable[[str], ApiError | None]
    ) -> None:
        """Ask `refusal` about each request of this verb and resource, by the object's name."""
        self._rules[verb, resource.plural] = refusal

    def _note(self, verb: str, resource: Resource, name: str) -> None:
        super()._note(verb, resource, name)
        rule = self._rules.get((verb, resource.plural))
        error = rule(name) if rule is not None else None
        if error is not None:
            raise error
        refusal = self._refusals.pop((verb, resource.plural), None)
        if refusal is not None:
            raise refusal

    def put(self, resource: Resource, body: Object) -> Object:
        found = super().put(resource, body)
        self._written(resource, found)
        return found


class StandingWatch:
    """A watch whose copy the cluster feeds itself."""

    def __init__(self) -> None:
        self.synced = asyncio.Event()
        self.synced.set()

    async def run(self) -> None:
        await asyncio.Event().wait()


class Daemon:
    """The daemon of one node: in the epoch that it received, and healthy once its pod runs."""

    def __init__(self, node: str, server: ControlServer) -> None:
        self.node, self._server = node, server
        self.memberships: dict[str, Membership] = {}
        self.at_work, self.lost = set[str](), set[str]()
        """Jobs whose ranks run here, and jobs whose rank was lost in the current epoch."""
        self.refused: dict[str, str] = {}
        """Job → why the saves of its rank are refused, so that it has no session."""
        self.stopped: set[str] = set()
        """Jobs whose rank here is stopped in the current epoch, so that all of them hang."""
        self._inspected: dict[str, int] = {}
        """Job → number of its newest inspection."""
        self.protected: dict[str, Generation] = {}
        """Job → its newest protected generation: the recovery line of the epochs after it."""
        self._beats: asyncio.Queue[control_pb2.Heartbeat] = asyncio.Queue()
        self.beat()

    def beat(self) -> None:
        """Send a heartbeat."""
        found = control_pb2.Heartbeat(
            protocol_version=codec.PROTOCOL_VERSION,
            node=self.node,
            memory_id=f"memory of {self.node}",
            peer_address=f"{self.node}:1",
            bulk_address=f"{self.node}:2",
        )
        for job in self.at_work:
            known = self.memberships.get(job)
            if known is None or known.member_on(self.node) is None:
                found.awaited.append(job)
        for job, membership in self.memberships.items():
            state = found.jobs.add(job=job, epoch=membership.epoch, verified=True, has_line=True)
            state.uid = membership.uid
            state.revision = membership.revision
            state.membership.CopyFrom(codec.membership_to_proto(membership))
            state.line.reason = "decided"
            self._report_protection(state, membership)
            has_member = membership.member_on(self.node) is not None
            if has_member and job in self.at_work | self.lost:
                lost = job in self.lost
                rank = self._rank(membership)
                if job in self._inspected:
                    state.inspection.number = self._inspected[job]
                    state.inspection.answered = True
                    state.inspection.processes.add(rank=rank, state="T")
                state.problem = self.refused.get(job, "")
                state.ranks.add(
                    rank=rank,
                    idle_s=1e6 if job in self.stopped else 0.0,
                    state="OFFLINE" if lost or job in self.refused else "HEALTHY",
                    step=1,
                    lost=lost,
                    unprotected=job in self.refused,
                )
        self._beats.put_nowait(found)

    def _report_protection(self, state: control_pb2.JobState, membership: Membership) -> None:
        protected = self.protected.get(membership.job)
        if protected is not None:
            state.protected.CopyFrom(codec.generation_to_proto(protected))
            if protected.epoch < membership.epoch:
                state.line.generation.CopyFrom(state.protected)

    def _rank(self, membership: Membership) -> int:
        return next(m.index for m in membership.members if m.node == self.node)

    async def converse(self) -> None:
        """Exchange messages with the control server until cancelled."""

        async def beats() -> AsyncIterator[control_pb2.Heartbeat]:
            while True:
                yield await self._beats.get()

        async for encoded in self._server.Connect(beats(), cast(Any, None)):
            message = control_pb2.ControlMessage.FromString(encoded)
            if message.HasField("membership"):
                self._adopt(message.membership)
            elif message.HasField("change"):
                base = codec.membership_to_proto(self.memberships[message.change.job])
                whole = changed(base, message.change)
                assert whole is not None
                self._adopt(whole)
            elif message.HasField("inspect"):
                self._inspected[message.inspect.job] = message.inspect.number
            elif message.HasField("drop"):
                self._drop(message.drop.job, message.drop.uid)
            self.beat()

    def _drop(self, job: str, uid: str) -> None:
        known = self.memberships.get(job)
        if not uid or (known is not None and known.uid == uid):
            self.memberships.pop(job, None)
            self.protected.pop(job, None)
        if not uid:
            self.at_work.discard(job)

    def _adopt(self, message: values_pb2.Membership) -> None:
        membership = codec.membership_from_proto(message)
        known = self.memberships.get(message.job)
        if known is not None and are_two_jobs(known.uid, membership.uid):
            self.protected.pop(message.job, None)
        self.memberships[message.job] = membership
        self.lost.discard(message.job)
        self.stopped.discard(message.job)
        self._inspected.pop(message.job, None)
        if membership.member_on(self.node) is None:
            self.at_work.discard(message.job)


class SmallCluster:
    """A cluster for one test; use `on_a_cluster`. Times are real, but nothing waits for them."""

    def __init__(self, nodes: int, *, insecure: bool = False, kueue: bool = False) -> None:
        self._count = nodes
        self._node_versions = itertools.count(1)
        self.fleet, self.metrics = Fleet(), OperatorMetrics()
        self.api = NotedApi(self._written, self._gone)
        self.http = FakeServer(self.api)
        self.passed_s = 0.0
        """Seconds by which the operator's clock is ahead."""

        def clock() -> float:
            return time.monotonic() + self.passed_s

        self.server = ControlServer(heartbeat_s=60.0, clock=clock, on_evidence=self.fleet.wake)
        self.nodes: Cache[KubeNode] = Cache(read_node, lambda before, now: None)
        self._index = PodIndex(lambda key: self.fleet.wake((key,)))
        self.pods: Cache[TrainerPod | None] = Cache(read_pod, self._index.change)
        self.workloads: Cache[KueueWorkload] = Cache(read_workload, self._workload_changed)
        self.knows_workloads = True
        """Whether the operator has read the Workloads."""
        queues = Queues(
            workloads=self.workloads,
            are_known=lambda: self.knows_workloads,
        )
        self.outdated: Condition | None = None
        """Condition to report for daemons of an older version."""
        self.runs_pods = True
        """Whether pods run once they are created."""
        self.trainers = Trainers(
            self.api,
            self.pods,
            self.metrics,
            TrainerVolume.CSI,
            on_shared_change=lambda key: self.fleet.wake((key,)),
        )
        self._shared: dict[Resource, Cache[Any]] = {}
        """Copies of the objects that the pods of jobs share."""
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: dict[str, asyncio.Task[None]] = {}
        """Each daemon's stream to the operator."""
        self._carrying: asyncio.Task[None]
        self.daemons: dict[str, Daemon] = {}
        self.recorder = Recorder(
            self.api, instance="op", clock=clock, wall=time.time, on_drop=lambda: None
        )
        self.node_record = NodeRecord(
            self.api, namespace="hf", name="holdfast-nodes", wall=time.time
        )
        self.fleet.begin(self._context(clock, queues if kueue else None, insecure=insecure))

    def _context(
        self, clock: Callable[[], float], queues: Queues | None, *, insecure: bool
    ) -> LoopContext:
        """What the control loops of all jobs share."""
        return LoopContext(
            api=self.api,
            server=self.server,
            attention=Attention(self.server, clock=clock, wake=self.fleet.wake),
            candidate_nodes=CandidateNodes(
                self.server,
                self.nodes,
                Room(),
                daemon_returns=lambda node, heartbeat_at: False,
                requests_of=self.fleet.requests_of,
                rating_of=self.node_record.rating,
                clock=clock,
            ),
            pods=self._index,
            trainers=self.trainers,
            placeholders=Placeholders(
                self.api,
                Cache(read_placeholder, lambda before, now: None),
                are_known=lambda: True,
                clock=clock,
            ),
            recorder=self.recorder,
            metrics=self.metrics,
            clock=clock,
            worked_s=time.thread_time,
            clocks=ClockPair(now=clock(), wall=time.time()),
            locations=None,
            queues=queues,
            node_record=self.node_record,
            insecure=insecure,
            outdated=lambda nodes: self.outdated if list(nodes) else None,
            status_s=lambda: 0.0,
        )

    async def run(self, test: Callable[[SmallCluster], Awaitable[None]]) -> None:
        """Run `test`, then end everything."""
        self._tasks.append(asyncio.create_task(self.recorder.run()))
        self._tasks.append(asyncio.create_task(self.trainers.shared.run(self._watch_shared)))
        for number in range(self._count):
            self.add_node(f"n{number}")
        try:
            async with self.http.serve() as self.api.address:
                await self.start_operator()
                try:
                    await test(self)
                finally:
                    await self.stop_operator()
        finally:
            tasks = [*self._tasks, *self._streams.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def start_operator(self) -> None:
        """Have kopf begin a control loop for each job."""
        begun, api = asyncio.Event(), cast(Api, self.api)
        carrying = carry_jobs(api, self.fleet, namespaces=(), begun=begun.set)
        self._carrying = asyncio.create_task(carrying)
        await begun.wait()

    async def stop_operator(self) -> None:
        """End the control loops of all jobs, as at the end of the process."""
        self._carrying.cancel()
        await asyncio.wait([self._carrying])

    # --- actions of users and kubelets --------------------------------------------------------

    def add_node(self, name: str) -> None:
        """Add a node, whose daemon connects."""
        self.cordon(name, on=False)
        self.daemons[name] = Daemon(name, self.server)
        self.connect(name)

    def connect(self, name: str) -> None:
        """Connect the node's daemon; it keeps what it has."""
        daemon = self.daemons[name]
        daemon.beat()
        self._streams[name] = asyncio.create_task(daemon.converse())

    async def disconnect(self, name: str) -> None:
        """Cut the node's daemon off from the operator."""
        self._streams[name].cancel()
        await asyncio.wait([self._streams[name]])

    def cordon(self, name: str, *, on: bool = True) -> None:
        """Have the node take no more pods, or take them again."""
        ready = [{"type": "Ready", "status": "True"}]
        self.nodes.put(
            {
                "metadata": {"name": name, "resourceVersion": str(next(self._node_versions))},
                "spec": {"unschedulable": on},
                "status": {"conditions": ready, "allocatable": {"cpu": "4"}},
            }
        )

    def protect(self, job: str, generation: Generation) -> None:
        """Have all daemons report that a generation of the job is protected."""
        for daemon in self.daemons.values():
            daemon.protected[job] = generation
            daemon.beat()

    def apply(self, resource: Object) -> None:
        """Create the job, or replace it and keep its status."""
        metadata = resource["metadata"]
        before = self.api.objects.get((JOBS.plural, metadata["namespace"], metadata["name"]))
        kept = {} if before is None else {"status": before.get("status") or {}}
        self.api.put(JOBS, {**deepcopy(resource), **kept})

    def delete(self, resource: Object) -> None:
        """Ask for the job's deletion."""
        found = self.job(resource)
        metadata = {**found["metadata"], "deletionTimestamp": "2099-01-01T00:00:00Z"}
        self.api.put(JOBS, {**found, "metadata": metadata})

    def pass_time(self, seconds: float) -> None:
        """Move the operator's clock; all daemons send a heartbeat then."""
        self.passed_s += seconds
        for daemon in self.daemons.values():
            daemon.beat()

    def delete_object(self, resource: Resource, name: str, namespace: str = "team") -> None:
        """Delete an object that the pods of a job share."""
        del self.api.objects[resource.plural, namespace, name]
        self._shared[resource].remove(namespace, name)
        self._tell_soon()

    def collect_garbage(self) -> list[str]:
        """Delete what belongs to jobs that are not there; returns its kinds."""
        jobs = [o for (kind, *_), o in self.api.objects.items() if kind == JOBS.plural]
        living = {job["metadata"]["uid"] for job in jobs}
        gone = [
            (resource, namespace, name)
            for (kind, namespace, name), body in self.api.objects.items()
            for resource in self._shared
            if resource.plural == kind and controller_of(body).get("uid") not in living
        ]
        for resource, namespace, name in gone:
            self.delete_object(resource, name, namespace)
        return [resource.plural for resource, _, _ in gone]

    def job(self, resource: Object) -> Object:
        """The job as the API server has it."""
        metadata = resource["metadata"]
        return self.api.objects[(JOBS.plural, metadata["namespace"], metadata["name"])]

    def phase(self, resource: Object) -> str:
        """The phase in the job's status."""
        return str((self.job(resource).get("status") or {}).get("phase", ""))

    def run_pod(self, name: str, namespace: str = "team") -> None:
        """Let a pod run that was created while pods did not."""
        self._run_pod(self.api.objects[PODS.plural, namespace, name])

    def lose_rank(self, node: str, job: str) -> None:
        """Kill the job's rank on the node; its pod continues."""
        daemon = self.daemons[node]
        daemon.lost.add(job)
        daemon.beat()

    def evict_unseen(self, name: str, namespace: str = "team") -> None:
        """Evict a pod, and keep it from the watch, as if its news were still on the way."""
        pod = deepcopy(self.api.objects[PODS.plural, namespace, name])
        why = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        pod["status"].setdefault("conditions", []).append(why)
        pod["metadata"]["deletionTimestamp"] = "2099-01-01T00:00:00Z"
        FakeApi.put(self.api, PODS, pod)

    # --- conditions to wait for ---------------------------------------------------------------

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition()` holds; it is evaluated after every write."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def until_reported(self, condition: Callable[[], object]) -> None:
        """Return once `condition()` holds, where it depends on reports of daemons."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0)

    async def look_again(self, key: str) -> None:
        """Return once the job was reconciled once more, and the resulting actions were done: that
        is when the next look begins."""
        name = "holdfast_operator_reconcile_seconds_count"
        async with asyncio.timeout(WAIT_S):
            for _ in range(2):
                wanted = (self.metrics.registry.get_sample_value(name) or 0) + 1
                self.fleet.wake((key,))
                while (self.metrics.registry.get_sample_value(name) or 0) < wanted:
                    await asyncio.sleep(0)

    async def runs(self, resource: Object) -> None:
        """Return once the phase in the job's status is Running."""
        await self.until(lambda: self.phase(resource) == "Running")

    def _workload_changed(self, before: KueueWorkload | None, now: KueueWorkload | None) -> None:
        workload = now or before
        assert workload is not None
        self.fleet.wake((f"{workload.namespace}.{workload.job}",))

    def _watch_shared(self, resource: Resource, cache: Cache[Any]) -> list[Watch]:
        self._shared[resource] = cache
        return [cast(Watch, StandingWatch())]

    def _written(self, resource: Resource, body: Object) -> None:
        """Pass a written object on, as watches would."""
        loop = asyncio.get_running_loop()
        if resource in self._shared and "holdfast.dev/job" in body["metadata"].get("labels", {}):
            loop.call_soon(self._shared[resource].put, body)
        if resource is JOBS:
            self.http.send("MODIFIED", body)
        elif resource is PODS:
            loop.call_soon(self.pods.put, body)
            if "deletionTimestamp" in body["metadata"]:
                loop.call_soon(self._end_pod, body["metadata"])
            elif self.runs_pods and "status" not in body:
                loop.call_soon(self._run_pod, body)
        elif resource is WORKLOADS:
            metadata = body["metadata"]
            key = (metadata["namespace"], metadata["name"])
            if "deletionTimestamp" in metadata:
                loop.call_soon(self.api.objects.pop, (WORKLOADS.plural, *key))
                loop.call_soon(self.workloads.remove, *key)
            else:
                loop.call_soon(self.workloads.put, body)
        self._tell_soon()

    def _gone(self, job: Object) -> None:
        self.http.send("DELETED", job)
        self._tell_soon()

    def _tell_soon(self) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._post()))

    def _run_pod(self, body: Object) -> None:
        metadata = body["metadata"]
        if PLACEHOLDER_LABEL in metadata["labels"]:
            return  # no node is there for it
        key = f"{metadata['namespace']}.{metadata['labels']['holdfast.dev/job']}"
        if (PODS.plural, metadata["namespace"], metadata["name"]) not in self.api.objects:
            return
        running = [{"name": "trainer", "state": {"running": {}}}]
        self.api.put(PODS, {**body, "status": {"phase": "Running", "containerStatuses": running}})
        daemon = self.daemons[metadata["annotations"]["holdfast.dev/node"]]
        daemon.at_work.add(key)
        daemon.beat()

    def _end_pod(self, metadata: Object) -> None:
        self.api.objects.pop((PODS.plural, metadata["namespace"], metadata["name"]), None)
        self.pods.remove(metadata["namespace"], metadata["name"])

    async def _post(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def on_a_cluster(
    test: Callable[[SmallCluster], Awaitable[None]],
    nodes: int = 3,
    *,
    insecure: bool = False,
    kueue: bool = False,
) -> None:
    """Run `test` on a cluster of `nodes` nodes."""

    async def run() -> None:
        await SmallCluster(nodes, insecure=insecure, kueue=kueue).run(test)

    asyncio.run(run())
