"""Carrying out a decision does not keep a job's control loop from looking for long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest
from samples import make_job

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.kube.client.api import ApiError
from holdfast_operator.kube.job.acting import ActionExecutor
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    ControlState,
    Decision,
    Event,
    FenceNode,
    NodeView,
    PersistNow,
    StartAgent,
)

REFUSAL = ApiError("no room in the quota", status=403)
SILENCE = ApiError("no answer", status=0)


class StuckTrainers:
    """No pod is ever created; with a `refusal`, each request fails at once."""

    def __init__(self, refusal: ApiError | None = None) -> None:
        self._refusal = refusal

    async def prepare(self, job: MoETrainingJob) -> None: ...

    def lacks(self, job: MoETrainingJob) -> bool:
        return False

    async def start(self, job: MoETrainingJob, member: int, node: str, attempt: int) -> bool:
        if self._refusal is not None:
            raise self._refusal
        return await asyncio.Event().wait()


def carry_out_twice(
    trainers: StuckTrainers,
) -> tuple[list[Event], list[Event], ApiError | None]:
    """Events about what two turns could not do, and why no pods are made."""
    time = itertools.count(0, 100)
    world = SimpleNamespace(
        clock=lambda: next(time),
        trainers=trainers,
        pods=SimpleNamespace(of=lambda key: []),
        metrics=OperatorMetrics(),
    )
    actions = tuple(StartAgent(member=m, node=f"n{m}") for m in range(2000))
    decision = Decision(actions=actions, state=ControlState(), conditions=(), events=())
    seen = ClusterView(nodes={}, agents=())

    async def scenario() -> tuple[list[Event], list[Event], ApiError | None]:
        hands = ActionExecutor(cast(LoopContext, world), {})
        turns = []
        for _ in range(2):
            work = hands.carry_out(make_job(), ControlState(), decision, [], seen, True)
            turns.append(await asyncio.wait_for(work, 30.0))
            for _ in range(10):
                await asyncio.sleep(0)
        refusal = hands.refusal
        hands.close()
        return turns[0], turns[1], refusal

    return asyncio.run(scenario())


def test_a_turn_does_not_wait_for_pods_that_are_being_created() -> None:
    assert carry_out_twice(StuckTrainers()) == ([], [], None)


def test_a_following_turn_reports_once_that_pods_were_not_created() -> None:
    *turns, refusal = carry_out_twice(StuckTrainers(SILENCE))
    for events in turns:
        assert [(event.reason, event.warning) for event in events] == [("ActionFailed", True)]
        assert "no answer; trying again" in events[0].message
    assert refusal is None


def test_what_the_api_server_refuses_is_no_event_of_a_turn() -> None:
    assert carry_out_twice(StuckTrainers(REFUSAL)) == ([], [], REFUSAL)


def test_a_copy_is_asked_for_of_the_jobs_daemons() -> None:
    asked: list[str] = []
    world = SimpleNamespace(
        clock=lambda: 0.0, metrics=OperatorMetrics(), server=SimpleNamespace(persist=asked.append)
    )
    decision = Decision(actions=(PersistNow(),), state=ControlState())
    job, seen = make_job(), ClusterView(nodes={}, agents=())

    async def scenario() -> list[Event]:
        hands = ActionExecutor(cast(LoopContext, world), {})
        return await hands.carry_out(job, ControlState(), decision, [], seen, True)

    assert asyncio.run(scenario()) == []
    assert asked == [job.key]


class WillingTrainers:
    """Every pod is created at once."""

    async def prepare(self, job: MoETrainingJob) -> None: ...

    def lacks(self, job: MoETrainingJob) -> bool:
        return False

    async def start(self, job: MoETrainingJob, member: int, node: str, attempt: int) -> bool:
        return True

    async def stop(self, pods: Iterable[object], *, force: bool = False) -> None: ...


def members(*indices: int) -> Membership:
    found = tuple(
        Member(index=i, node=f"n{i}", memory_id="m", peer_address="a:1", bulk_address="a:2")
        for i in indices
    )
    return Membership(job="moe", epoch=1, members=found, nproc_per_node=1, groups=(indices,))


@pytest.mark.parametrize(("after", "replaced"), [((0, 1, 2), 1), ((0, 1), 0)])
def test_a_pod_replaces_a_lost_one_only_where_its_member_did_not_leave(
    after: tuple[int, ...], replaced: int
) -> None:
    """A member that joins hours later replaces nothing."""
    metrics = OperatorMetrics()
    world = SimpleNamespace(
        clock=lambda: 9.0,
        trainers=WillingTrainers(),
        pods=SimpleNamespace(of=lambda key: []),
        metrics=metrics,
    )
    seen = ClusterView(nodes={"n2": NodeView(name="n2", heartbeat_at=4.0)})
    before = ControlState(membership=members(0, 1, 2))
    lost = Decision(actions=(FenceNode(node="n2"),), state=ControlState(membership=members(*after)))
    later = Decision(actions=(StartAgent(member=2, node="new"),), state=lost.state)

    async def scenario() -> None:
        hands = ActionExecutor(cast(LoopContext, world), {})
        await hands.carry_out(make_job(), before, lost, [], seen, True)
        await hands.carry_out(make_job(), lost.state, later, [], seen, True)
        while hands.pending:
            await asyncio.sleep(0)

    asyncio.run(scenario())
    count = metrics.registry.get_sample_value("holdfast_operator_replacement_seconds_count")
    assert count == replaced
