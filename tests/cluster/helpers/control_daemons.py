"""Daemons that only speak Control: the real protocol, with no memory and no trainers behind it.

One event loop on a thread serves all of them. Ranks are at work as soon as their daemon knows a
membership and the API server knows a pod for them, whether or not it runs: like real ones, they
never come before their pod. Tests lose ranks, silence daemons and let steps pass.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
import grpc.aio

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.kube.client.api import connect
from holdfast_operator.kube.client.resources import PODS
from holdfast_operator.kube.client.watches import Cache, Watch
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.pods.manifests import TRAINER_SELECTOR
from holdfast_operator.kube.pods.pods import TrainerPod, read_pod
from holdfast_operator.kube.pods.trainers import PodIndex
from holdfast_operator.reconciler.observe.views import AgentState
from holdfast_protos import codec, control_pb2, control_pb2_grpc

REDIAL_S = 0.1

CLOSING_S = 0.25
"""aiohttp ends TLS connections beside its `close`, without a sign when it has; its guide asks for
such a pause."""


@dataclass
class Daemon:
    """What one daemon knows. Tests change it from their own thread, field by field."""

    node: str
    memory_id: str
    silent: bool = False
    memberships: dict[str, Membership] = field(default_factory=dict)
    lost: set[tuple[str, int, int]] = field(default_factory=set)
    """(job, epoch, rank) of ranks whose sessions ended."""
    dropped: list[str] = field(default_factory=list)
    persisted: list[str] = field(default_factory=list)
    """Jobs of which a copy in durable storage was asked for, once for each time."""
    heartbeat_s: float = 1.0


class ControlDaemons:
    """A daemon for each node, all dialling `address`. A context manager.

    Args:
        kubeconfig: of the cluster that the pods are in, in `namespace`.
    """

    def __init__(
        self, address: str, nodes: Iterable[str], kubeconfig: Path, namespace: str
    ) -> None:
        self._address, self._kubeconfig, self._namespace = address, kubeconfig, namespace
        self._pods = PodIndex(lambda _: None)
        self.daemons = {node: Daemon(node, f"memory-of-{node}") for node in nodes}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="daemons", daemon=True)
        self._began = time.monotonic()
        self.steps_s = 0.2
        """Time of one step."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def of(self, job: str) -> dict[str, Membership]:
        """Node → the membership that its daemon has of `job`."""
        return {
            name: daemon.memberships[job]
            for name, daemon in self.daemons.items()
            if job in daemon.memberships
        }

    def lose_rank(self, job: str, rank: int) -> None:
        """The rank's session ends."""
        for daemon in self.daemons.values():
            membership = daemon.memberships.get(job)
            if membership is not None:
                daemon.lost.add((job, membership.epoch, rank))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        lives = (self._live(each) for each in self.daemons.values())
        tasks = [self._loop.create_task(each) for each in (self._watch_pods(), *lives)]
        self._loop.run_forever()
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(CLOSING_S))
        self._loop.close()

    async def _watch_pods(self) -> None:
        cache: Cache[TrainerPod | None] = Cache(read_pod, self._pods.change)
        api = await connect(OperatorMetrics(), str(self._kubeconfig))
        watch = Watch(
            api,
            PODS,
            cache,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            on_restart=lambda _: None,
            namespace=self._namespace,
            query={"labelSelector": TRAINER_SELECTOR},
        )
        try:
            await watch.run()
        finally:
            await api.close()

    async def _live(self, daemon: Daemon) -> None:
        while True:
            if not daemon.silent:
                with suppress(grpc.aio.AioRpcError):
                    await self._converse(daemon)
            await asyncio.sleep(REDIAL_S)

    async def _converse(self, daemon: Daemon) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(channel)
            async for message in stub.Connect(self._heartbeats(daemon)):
                self._receive(daemon, message)

    async def _heartbeats(self, daemon: Daemon) -> AsyncIterator[control_pb2.Heartbeat]:
        while not daemon.silent:
            yield self._heartbeat(daemon)
            await asyncio.sleep(min(daemon.heartbeat_s, REDIAL_S))

    def _receive(self, daemon: Daemon, message: control_pb2.ControlMessage) -> None:
        if message.HasField("membership"):
            new = codec.membership_from_proto(message.membership)
            known = daemon.memberships.get(new.job)
            if known is None or (known.epoch, known.revision) < (new.epoch, new.revision):
                daemon.memberships[new.job] = new
        elif message.HasField("drop"):
            daemon.memberships.pop(message.drop.job, None)
            daemon.dropped.append(message.drop.job)
        elif message.HasField("persist"):
            daemon.persisted.append(message.persist.job)
        elif message.HasField("welcome"):
            daemon.heartbeat_s = message.welcome.heartbeat_s

    def _heartbeat(self, daemon: Daemon) -> control_pb2.Heartbeat:
        return control_pb2.Heartbeat(
            protocol_version=codec.PROTOCOL_VERSION,
            node=daemon.node,
            memory_id=daemon.memory_id,
            incarnation=1,
            peer_address=f"{daemon.node}:7701",
            bulk_address=f"{daemon.node}:7702",
            memory_budget_bytes=1 << 30,
            jobs=[self._job(daemon, each) for each in list(daemon.memberships.values())],
        )

    def _job(self, daemon: Daemon, membership: Membership) -> control_pb2.JobState:
        member = membership.member_on(daemon.node)
        has_pod = any(
            (pod.member, pod.node) == (member, daemon.node) and pod.state is not AgentState.STOPPING
            for pod in self._pods.of(membership.job)
        )
        ranks = membership.ranks_of(member) if member is not None and has_pod else ()
        step = 1 + int((time.monotonic() - self._began) / self.steps_s)
        newest = codec.generation_to_proto(Generation(epoch=membership.epoch, step=step))
        state = control_pb2.JobState(
            job=membership.job,
            epoch=membership.epoch,
            membership=codec.membership_to_proto(membership),
            verified=True,
            has_line=True,
            protected=newest,
            complete=newest,
        )
        state.line.reason = "as the test says"
        if membership.epoch > 1:
            before = Generation(epoch=membership.epoch - 1, step=1)
            state.line.generation.CopyFrom(codec.generation_to_proto(before))
        for rank in ranks:
            lost = (membership.job, membership.epoch, rank) in daemon.lost
            state.ranks.add(
                rank=rank,
                state="OFFLINE" if lost else "HEALTHY",
                step=step,
                pid=1,
                lost=lost,
                restored_from="local" if membership.epoch > 1 else "none",
            )
        return state
