"""Carrying out a decision does not keep a job's control loop from looking for long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from samples import make_job

from holdfast_core.jobs import MoETrainingJob
from holdfast_operator.kube import acting
from holdfast_operator.kube.acting import Acting
from holdfast_operator.kube.metrics import Metrics
from holdfast_operator.kube.world import World
from holdfast_operator.views import ControlState, Decision, Observed, StartAgent


class SlowTrainers:
    """Pods are created on a clock of ours, one in `takes_s`."""

    def __init__(self, takes_s: float) -> None:
        self.now, self._takes_s = 0.0, takes_s
        self.started: list[int] = []

    async def prepare(self, job: MoETrainingJob) -> None: ...

    async def start(self, job: MoETrainingJob, member: int, node: str, attempt: int) -> None:
        self.now += self._takes_s
        self.started.append(member)


def carry_out(trainers: SlowTrainers, members: int) -> None:
    world = SimpleNamespace(
        clock=lambda: trainers.now,
        trainers=trainers,
        pods=SimpleNamespace(of=lambda key: []),
        metrics=Metrics(),
    )
    actions = tuple(StartAgent(member=m, node=f"n{m}") for m in range(members))
    decision = Decision(actions=actions, state=ControlState(), conditions=(), events=())
    hands, seen = Acting(cast(World, world), {}), Observed(nodes={}, agents=())
    work = hands.carry_out(make_job(), ControlState(), decision, [], seen, True)
    assert asyncio.run(work) == []


def test_thousands_of_pods_are_not_all_started_in_one_turn() -> None:
    trainers = SlowTrainers(takes_s=0.005)
    carry_out(trainers, 2000)
    assert trainers.started == list(range(len(trainers.started)))
    assert acting.STARTING_S <= trainers.now < 2 * acting.STARTING_S


def test_all_are_started_when_it_is_quick() -> None:
    trainers = SlowTrainers(takes_s=0.0)
    carry_out(trainers, 1000)
    assert trainers.started == list(range(1000))


def test_some_are_started_however_slow_it_is() -> None:
    trainers = SlowTrainers(takes_s=10.0)
    carry_out(trainers, 200)
    assert len(trainers.started) == acting.STARTS_AT_ONCE
