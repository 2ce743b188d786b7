"""Carrying out a decision does not keep a job's control loop from looking for long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from samples import make_job

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.acting import Acting
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.world import LoopContext
from holdfast_operator.reconciler.views import (
    ControlState,
    Decision,
    Event,
    Observed,
    PersistNow,
    StartAgent,
)

REFUSAL = ApiError("no room in the quota", status=403)


class StuckTrainers:
    """No pod is ever created; with `refuses`, each request fails at once."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses

    async def prepare(self, job: MoETrainingJob) -> None: ...

    async def start(self, job: MoETrainingJob, member: int, node: str, attempt: int) -> None:
        if self._refuses:
            raise REFUSAL
        await asyncio.Event().wait()


def carry_out_twice(trainers: StuckTrainers) -> tuple[list[Event], list[Event]]:
    """What two turns could not do."""
    world = SimpleNamespace(
        clock=lambda: 0.0,
        trainers=trainers,
        pods=SimpleNamespace(of=lambda key: []),
        metrics=OperatorMetrics(),
    )
    actions = tuple(StartAgent(member=m, node=f"n{m}") for m in range(2000))
    decision = Decision(actions=actions, state=ControlState(), conditions=(), events=())
    seen = Observed(nodes={}, agents=())

    async def scenario() -> tuple[list[Event], list[Event]]:
        hands = Acting(cast(LoopContext, world), {})
        turns = []
        for _ in range(2):
            work = hands.carry_out(make_job(), ControlState(), decision, [], seen, True)
            turns.append(await asyncio.wait_for(work, 30.0))
            for _ in range(10):
                await asyncio.sleep(0)
        hands.close()
        return turns[0], turns[1]

    return asyncio.run(scenario())


def test_a_turn_does_not_wait_for_pods_that_are_being_created() -> None:
    assert carry_out_twice(StuckTrainers()) == ([], [])


def test_a_following_turn_reports_once_why_pods_were_not_created() -> None:
    for events in carry_out_twice(StuckTrainers(refuses=True)):
        assert [(event.reason, event.warning) for event in events] == [("ActionFailed", True)]
        assert "no room in the quota; trying again" in events[0].message


def test_a_copy_is_asked_for_of_the_jobs_daemons() -> None:
    asked: list[str] = []
    world = SimpleNamespace(
        clock=lambda: 0.0, metrics=OperatorMetrics(), server=SimpleNamespace(persist=asked.append)
    )
    decision = Decision(actions=(PersistNow(),), state=ControlState())
    job, seen = make_job(), Observed(nodes={}, agents=())

    async def scenario() -> list[Event]:
        hands = Acting(cast(LoopContext, world), {})
        return await hands.carry_out(job, ControlState(), decision, [], seen, True)

    assert asyncio.run(scenario()) == []
    assert asked == [job.key]
