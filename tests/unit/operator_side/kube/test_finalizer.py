"""Freeing of a deleted job's memory, which never holds the job back for long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from samples import job_resource

from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.kube.job.finalizer import PATIENCE_S, free_memory
from holdfast_operator.kube.pods.pods import TrainerPod
from holdfast_operator.reconciler.observe.views import NodeView

DELETED_AT = 1_700_000_000.0


@dataclass
class Server:
    """The daemons that hold something of the job. One that is connected frees it when asked twice,
    and one in `away` was connected before."""

    holding: set[str] = field(default_factory=set)
    connected: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    drops: int = 0

    def drop(self, key: str) -> None:
        assert key == "team.moe"
        self.drops += 1
        if self.drops > 1:
            self.holding -= self.connected

    def holders(self, key: str) -> frozenset[str]:
        return frozenset(self.holding)

    def view(self, name: str, key: str) -> NodeView | None:
        if name not in self.connected | self.away:
            return None
        return NodeView(name=name, connected=name in self.connected)


class Pods:
    """No pods."""

    def of(self, key: str) -> list[TrainerPod]:
        return []

    async def stop(self, pods: list[TrainerPod]) -> None:
        assert pods == []


@dataclass
class World:
    """The parts of the operator that freeing needs. Its clock moves on with each request."""

    server: Server
    clocks: ClockPair
    pods: Pods = field(default_factory=Pods)
    trainers: Pods = field(default_factory=Pods)

    def clock(self) -> float:
        return self.server.drops * PATIENCE_S / 2


def drops(server: Server, *members: str, ahead_s: float = 0.0, homes: tuple[str, ...] = ()) -> int:
    """Free the memory of a job with these members, and return how often that was asked for. The
    operator's clock is ahead of the API server's."""
    clocks = ClockPair(now=0.0, wall=DELETED_AT + ahead_s)
    resource: dict[str, Any] = job_resource()
    resource["metadata"]["deletionTimestamp"] = "2023-11-14T22:13:20Z"
    resource["status"] = {"members": [{"node": member} for member in members]}
    resource["status"]["counters"] = {"homes": list(homes)}
    asyncio.run(free_memory(World(server, clocks), resource))  # type: ignore[arg-type]
    return server.drops


def test_freeing_ends_once_no_daemon_holds_anything_of_the_job() -> None:
    server = Server(holding={"n0"}, connected={"n0"})
    assert drops(server, "n0") == 2
    assert not server.holding


@pytest.mark.parametrize("ahead_s", [0.0, 86400.0, -86400.0])
def test_freeing_waits_a_limited_time_for_a_daemon_that_has_not_connected_yet(
    ahead_s: float,
) -> None:
    assert drops(Server(), "n0", ahead_s=ahead_s) == 2


def test_freeing_waits_for_daemons_of_members_that_no_daemon_has_reported_yet() -> None:
    assert drops(Server(), homes=("n0",)) == 2


def test_freeing_does_not_wait_for_a_daemon_that_has_disconnected() -> None:
    assert drops(Server(holding={"n0"}, away={"n0"}), "n0") == 1
