"""Failed requests are reported, and tried again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fake_api import FakeApi
from samples import make_job

from holdfast_operator.kube.client.api import ApiError
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.job.acting import ActionExecutor
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.pods.manifests import TrainerVolume
from holdfast_operator.kube.pods.pods import TrainerPod, read_pod
from holdfast_operator.kube.pods.trainers import PodIndex, Trainers
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    ControlState,
    Decision,
    Event,
    StartAgent,
)


@dataclass
class World:
    """What acting needs of the operator."""

    api: FakeApi = field(default_factory=FakeApi)
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)
    pods: PodIndex = field(default_factory=lambda: PodIndex(lambda key: None))
    now: float = 0.0

    def __post_init__(self) -> None:
        cache: Cache[TrainerPod | None] = Cache(read_pod, self.pods.change)
        self.trainers = Trainers(self.api, cache, self.metrics, TrainerVolume.CSI)

    def clock(self) -> float:
        self.now += 100.0
        return self.now

    def acting(self) -> ActionExecutor:
        return ActionExecutor(self, {})  # type: ignore[arg-type]


def carry_out(acting: ActionExecutor, *turns: list[StartAgent]) -> list[list[Event]]:
    """What each of the turns could not do; what each began has ended before the next."""

    async def scenario() -> list[list[Event]]:
        events = []
        for actions in turns:
            state = ControlState()
            decision = Decision(state=state, actions=tuple(actions))
            events.append(
                await acting.carry_out(make_job(), state, decision, [], ClusterView(nodes={}), True)
            )
            while len(tasks := asyncio.all_tasks()) > 1:
                await asyncio.gather(*(tasks - {asyncio.current_task()}))
        return events

    return asyncio.run(scenario())


SHARED = ("services", "serviceaccounts", "roles", "rolebindings", "poddisruptionbudgets")


def test_what_pods_share_is_made_before_them_though_the_first_try_failed() -> None:
    world = World()
    acting = world.acting()
    world.api.refuse = ApiError("not now", status=0)
    start = [StartAgent(member=0, node="n0")]
    events = [event for turn in carry_out(acting, start, []) for event in turn]
    assert [(each.reason, each.message) for each in events] == [
        ("ActionFailed", "not now; trying again")
    ]
    assert not world.api.objects
    assert carry_out(acting, start) == [[]]
    made = [kind for verb, kind, _ in world.api.requests[1:] if verb == "create"]
    assert made == [*SHARED, "pods"]
    carry_out(acting, [StartAgent(member=1, node="n1")])
    assert [kind for _, kind, _ in world.api.requests[2 + len(SHARED) :]] == ["pods"]
