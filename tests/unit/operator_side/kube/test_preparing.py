"""What a failed request leads to: it is told, and tried again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fake_api import FakeApi
from samples import make_job

from holdfast_operator.kube.acting import Acting
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.metrics import Metrics
from holdfast_operator.kube.pods import TrainerPod, read_pod
from holdfast_operator.kube.trainers import PodIndex, Trainers
from holdfast_operator.kube.watches import Cache
from holdfast_operator.views import ControlState, Decision, Event, Observed, StartAgent


@dataclass
class World:
    """What acting needs of the operator."""

    api: FakeApi = field(default_factory=FakeApi)
    metrics: Metrics = field(default_factory=Metrics)
    pods: PodIndex = field(default_factory=lambda: PodIndex(lambda key: None))

    def __post_init__(self) -> None:
        cache: Cache[TrainerPod | None] = Cache(read_pod, self.pods.change)
        self.trainers = Trainers(self.api, cache, self.metrics)

    def clock(self) -> float:
        return 0.0

    def acting(self) -> Acting:
        return Acting(self, {})  # type: ignore[arg-type]


def carry_out(acting: Acting, *actions: Any) -> list[Event]:
    state = ControlState()
    decision = Decision(state=state, actions=actions)
    work = acting.carry_out(make_job(), state, decision, [], Observed(nodes={}), True)
    return asyncio.run(work)


def test_what_pods_share_is_made_though_the_first_try_failed_and_the_pods_are_there() -> None:
    world = World()
    acting = world.acting()
    world.api.refuse = ApiError("not now", status=500)
    (told,) = carry_out(acting, StartAgent(member=0, node="n0"))
    assert (told.reason, told.message) == ("ActionFailed", "not now; trying again")
    assert ("roles", "team", "moe-trainer") not in world.api.objects
    assert ("pods", "team", "moe-0-1") in world.api.objects
    assert carry_out(acting) == []
    assert ("roles", "team", "moe-trainer") in world.api.objects
    count = len(world.api.requests)
    carry_out(acting)
    assert len(world.api.requests) == count
