"""The finalizer: it frees memory, and never holds a job back for long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from samples import job_resource

from holdfast_operator.kube.finalizer import FINALIZER, PATIENCE_S, TURN_S, Finalizer
from holdfast_operator.kube.times import ClockPair
from holdfast_operator.reconciler.views import NodeView

DELETED_AT = 1_700_000_000.0


@dataclass
class Server:
    """Who holds something of the job."""

    holding: set[str] = field(default_factory=set)
    connected: set[str] = field(default_factory=set)
    dropped: list[str] = field(default_factory=list)

    def drop(self, key: str) -> None:
        self.dropped.append(key)

    def holders(self, key: str) -> frozenset[str]:
        return frozenset(self.holding)

    def view(self, name: str, key: str) -> NodeView | None:
        return NodeView(name=name, connected=name in self.connected)


@dataclass
class World:
    """What a farewell needs of the operator."""

    server: Server = field(default_factory=Server)
    now: float = 0.0
    clocks: ClockPair = field(default_factory=lambda: ClockPair(now=0.0, wall=DELETED_AT))
    patches: list[list[str]] = field(default_factory=list)

    @property
    def api(self) -> World:
        return self

    def clock(self) -> float:
        return self.now

    async def patch(self, resource: Any, namespace: str, name: str, body: Any) -> None:
        assert body["metadata"]["resourceVersion"] == "7"
        self.patches.append(body["metadata"]["finalizers"])

    def farewell(self, *expected: str) -> Finalizer:
        return Finalizer(self, frozenset(expected))  # type: ignore[arg-type]


def deleted(*finalizers: str) -> dict[str, Any]:
    resource = job_resource()
    resource["metadata"] |= {
        "deletionTimestamp": "2023-11-14T22:13:20Z",
        "finalizers": list(finalizers),
    }
    return resource


def test_the_finalizer_is_put_on_a_job_once_and_others_stay() -> None:
    world = World()
    resource = job_resource()
    resource["metadata"]["finalizers"] = ["example.com/theirs"]
    farewell = world.farewell()
    asyncio.run(farewell.keep(resource))
    asyncio.run(farewell.keep(resource))
    assert world.patches == [["example.com/theirs", FINALIZER]]


def test_the_job_goes_when_no_daemon_holds_anything_of_it() -> None:
    world = World(Server(holding={"n0"}, connected={"n0"}))
    farewell = world.farewell()
    resource = deleted(FINALIZER, "example.com/theirs")
    assert asyncio.run(farewell.turn(resource, [])) == TURN_S
    assert world.server.dropped == ["team.moe"]
    assert world.patches == []
    world.server.holding.clear()
    asyncio.run(farewell.turn(resource, []))
    assert world.patches == [["example.com/theirs"]]
    assert asyncio.run(farewell.turn(deleted("example.com/theirs"), [])) is None


def test_a_daemon_that_was_not_heard_yet_is_waited_for_but_not_for_ever() -> None:
    world = World()
    farewell = world.farewell("n0")
    asyncio.run(farewell.turn(deleted(FINALIZER), []))
    assert world.patches == []
    world.now = PATIENCE_S
    asyncio.run(farewell.turn(deleted(FINALIZER), []))
    assert world.patches == [[]]


def test_a_daemon_that_is_away_does_not_hold_the_job_back() -> None:
    world = World(Server(holding={"n0"}))
    asyncio.run(world.farewell().turn(deleted(FINALIZER), []))
    assert world.patches == [[]]
