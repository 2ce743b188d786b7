"""Pods are created a few at a time, and only those that the newest look wants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from samples import make_job

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.client.api import ApiError
from holdfast_operator.kube.job.starting import AT_ONCE, RETRY_S, PodStarter
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.pods.pods import TrainerPod, agents
from holdfast_operator.kube.pods.shared_objects import BEING_COLLECTED, NAME_TAKEN
from holdfast_operator.reconciler.observe.views import AgentState, AgentView, StartAgent

JOB = make_job()


class GatedTrainers:
    """Each pod's creation ends when it is let."""

    def __init__(self) -> None:
        self.prepared, self.begun, self.made = 0, list[tuple[int, str, int]](), list[int]()
        self.refusal: ApiError | None = None
        self.unprepared: ApiError | None = None
        self.lacking = False
        self.strange = set[tuple[int, int]]()
        """(member, attempt) whose name another owner's pod has."""
        self._gates: list[asyncio.Future[None]] = []

    async def prepare(self, job: MoETrainingJob) -> None:
        self.prepared += 1
        await asyncio.sleep(0)
        if self.unprepared is not None:
            raise self.unprepared
        self.lacking = False

    def lacks(self, job: MoETrainingJob) -> bool:
        return self.lacking

    async def start(self, job: MoETrainingJob, member: int, node: str, attempt: int) -> bool:
        self.begun.append((member, node, attempt))
        if self.refusal is not None:
            raise self.refusal
        if (member, attempt) in self.strange:
            return False
        gate = asyncio.get_running_loop().create_future()
        self._gates.append(gate)
        await gate
        self.made.append(member)
        return True

    async def let(self, count: int) -> None:
        """So many creations end, and what follows at once has followed."""
        for gate in self._gates[:count]:
            gate.set_result(None)
        del self._gates[:count]
        await settle()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def starts(*members: int, node: str = "n") -> list[StartAgent]:
    return [StartAgent(member=member, node=f"{node}{member}") for member in members]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 7.0


def run(
    test: Callable[[PodStarter, GatedTrainers], Awaitable[None]],
    pods: list[TrainerPod] | None = None,
    attempts: dict[int, int] | None = None,
    clock: Clock | None = None,
) -> OperatorMetrics:
    trainers, metrics, time = GatedTrainers(), OperatorMetrics(), clock or Clock()
    world = SimpleNamespace(
        clock=lambda: time.now,
        trainers=trainers,
        pods=SimpleNamespace(of=lambda key: pods or []),
        metrics=metrics,
    )

    async def scenario() -> None:
        starting = PodStarter(cast(LoopContext, world), attempts or {})
        await test(starting, trainers)
        starting.close()
        await settle()

    asyncio.run(scenario())
    return metrics


def test_no_more_than_a_few_are_created_together_and_the_rest_follows() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.want(JOB, starts(*range(100)))
        await settle()
        assert len(trainers.begun) == AT_ONCE
        await trainers.let(3)
        assert trainers.made == [0, 1, 2]
        assert len(trainers.begun) == AT_ONCE + 3
        while len(trainers.made) < 100:
            await trainers.let(AT_ONCE)
        assert [member for member, _, _ in trainers.begun] == list(range(100))
        assert trainers.prepared == 1

    run(test)


def test_what_is_on_its_way_is_not_created_twice_when_the_next_look_wants_it_too() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        for _ in range(3):
            starting.want(JOB, starts(0, 1))
            await settle()
        assert trainers.begun == [(0, "n0", 1), (1, "n1", 1)]

    run(test)


def test_what_is_taken_back_or_wanted_elsewhere_is_not_begun() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.want(JOB, starts(*range(50)))
        await settle()
        starting.want(JOB, starts(40, node="other"))
        starting.take_back(starts(*range(50)))  # those that were begun go on
        await trainers.let(AT_ONCE)
        members = [member for member, _, _ in trainers.begun]
        assert members == [*range(AT_ONCE), 40]
        assert trainers.begun[-1] == (40, "other40", 1)

    run(test)


def test_what_is_wanted_is_pending_until_its_pod_is_there() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.want(JOB, starts(*range(AT_ONCE + 2)))
        assert set(starting.pending) == set(starts(*range(AT_ONCE + 2)))
        await settle()
        assert set(starting.pending) == set(starts(*range(AT_ONCE + 2)))
        await trainers.let(5)
        assert set(starting.pending) == set(starts(*range(5, AT_ONCE + 2)))
        while starting.pending:
            await trainers.let(AT_ONCE)
        assert len(trainers.made) == AT_ONCE + 2

    run(test)


def test_an_agent_whose_pod_is_still_to_be_created_is_starting() -> None:
    assert agents([], starts(1, 0)) == (
        AgentView(member=0, node="n0", state=AgentState.STARTING),
        AgentView(member=1, node="n1", state=AgentState.STARTING),
    )


def test_more_wanted_later_are_created_beside_a_slow_one() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.want(JOB, starts(0))
        await settle()
        starting.want(JOB, starts(*range(10)))
        await settle()
        assert len(trainers.begun) == 10

    run(test)


def test_the_end_of_the_loop_ends_what_is_on_its_way() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.want(JOB, starts(*range(50)))
        await settle()
        starting.close()
        await settle()
        await trainers.let(0)
        assert len(trainers.begun) == AT_ONCE and not trainers.made

    run(test)


def test_a_refusal_is_reported_once_and_holds_back_the_others_for_a_pause() -> None:
    clock = Clock()

    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        trainers.refusal = ApiError("quota", status=403)
        starting.want(JOB, starts(*range(100)))
        await settle()
        assert len(trainers.begun) <= AT_ONCE
        assert trainers.refusal in starting.failures()
        assert starting.failures() == []
        trainers.refusal, trainers.begun = None, []
        starting.want(JOB, starts(*range(100)))
        await settle()
        assert trainers.begun == [] and starting.pending == ()
        clock.now += RETRY_S
        starting.want(JOB, starts(*range(100)))
        await settle()
        assert trainers.begun == [(0, "n0", 1)]  # one, to see whether it is accepted
        await trainers.let(1)
        assert trainers.made == [0] and len(trainers.begun) == 1 + AT_ONCE
        assert starting.failures() == [] and starting.refusal is None

    run(test, clock=clock)


@pytest.mark.parametrize(
    ("error", "pauses_s"),
    [
        (ApiError("quota", status=403, reason="Forbidden"), [1, 2, 4, 8, 16, 30, 30]),
        (ApiError("somebody's", status=409, reason=NAME_TAKEN), [1, 2, 4, 8, 16, 30, 30]),
        (ApiError("a webhook is down", status=500), [1] * 7),
        (ApiError("too many requests", status=429), [1] * 7),
        (ApiError("no answer", status=0), [1] * 7),
        (ApiError("an earlier job's", status=409, reason=BEING_COLLECTED), [1] * 7),
    ],
    ids=lambda value: str(value) if isinstance(value, ApiError) else "",
)
def test_what_is_refused_for_good_is_tried_again_after_pauses_that_grow(
    error: ApiError, pauses_s: list[float]
) -> None:
    clock = Clock()
    begun, tries = clock.now, list[float]()

    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        trainers.refusal = error
        while clock.now - begun <= sum(pauses_s):
            before = len(trainers.begun)
            starting.want(JOB, starts(2))
            await settle()
            tries.extend([clock.now - begun] * (len(trainers.begun) - before))
            clock.now += 0.5

    run(test, clock=clock)
    assert [after - before for before, after in pairwise(tries)] == pauses_s


def test_a_name_is_used_up_by_a_pod_and_not_by_a_refusal() -> None:
    clock = Clock()

    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        for status in (403, 403, 0, 500, 403):
            trainers.refusal = ApiError("no", status=status)
            starting.want(JOB, starts(0))
            await settle()
            clock.now += 60.0
        # Where no answer came, or one that proves nothing, the pod may be there.
        assert [attempt for _, _, attempt in trainers.begun] == [1, 1, 1, 2, 3]

    run(test, clock=clock)


def test_a_name_that_another_owners_pod_has_is_passed_over() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        trainers.strange = {(0, 1), (0, 2)}
        starting.want(JOB, starts(0))
        await settle()
        await trainers.let(1)
        assert trainers.begun[-1] == (0, "n0", 3)
        assert trainers.made == [0] and starting.refusal is None

    run(test)


def test_names_are_not_tried_for_ever() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        trainers.strange = {(0, attempt) for attempt in range(1000)}
        starting.want(JOB, starts(0))
        await settle()
        assert starting.refusal is not None and "belong to others' pods" in str(starting.refusal)

    run(test)


def test_a_refusal_lasts_until_pods_are_made_or_not_wanted_any_more() -> None:
    clock = Clock()

    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        trainers.refusal = ApiError("quota", status=403)
        starting.want(JOB, starts(3, 1, 2))
        await settle()
        assert starting.refusal is trainers.refusal
        starting.want(JOB, starts(1, 2))
        assert starting.refusal is trainers.refusal
        clock.now += 60.0
        trainers.refusal = None
        starting.want(JOB, starts(1, 2))
        await settle()
        await trainers.let(1)
        await trainers.let(1)
        starting.want(JOB, [])
        assert trainers.made == [1, 2] and starting.refusal is None
        trainers.refusal = ApiError("quota", status=403)
        starting.want(JOB, starts(1))
        await settle()
        starting.want(JOB, [])  # as after a suspension
        assert starting.refusal is None

    run(test, clock=clock)


def test_what_pods_share_is_made_again_and_costs_no_request_while_it_is_there() -> None:
    clock = Clock()

    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        for _ in range(3):
            starting.mend(JOB)
            await settle()
        assert trainers.prepared == 0
        trainers.lacking = True
        starting.mend(JOB)
        starting.mend(JOB)
        await settle()
        assert trainers.prepared == 1
        trainers.lacking, trainers.unprepared = True, ApiError("no", status=409, reason=NAME_TAKEN)
        starting.mend(JOB)
        await settle()
        starting.want(JOB, [])
        assert starting.refusal is trainers.unprepared
        starting.mend(JOB)
        await settle()
        assert trainers.prepared == 2
        clock.now, trainers.unprepared = clock.now + RETRY_S, None
        starting.mend(JOB)
        await settle()
        assert trainers.prepared == 3 and not trainers.lacking
        assert starting.refusal is None

    run(test, clock=clock)


def test_what_pods_share_is_looked_at_again_after_a_refusal_and_when_it_is_missing() -> None:
    clock = Clock()

    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.want(JOB, starts(0))
        await settle()
        await trainers.let(1)
        assert trainers.prepared == 1
        trainers.lacking = True
        starting.want(JOB, starts(1))
        await settle()
        assert trainers.prepared == 2
        await trainers.let(1)
        trainers.refusal = ApiError("serviceaccount not found", status=403)
        starting.want(JOB, starts(2))
        await settle()
        clock.now += 60.0
        starting.want(JOB, starts(2))
        await settle()
        assert trainers.prepared == 3

    run(test, clock=clock)


def test_what_pods_share_is_tried_once_for_all_of_them() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        trainers.unprepared = ApiError("no answer", status=0)
        starting.want(JOB, starts(*range(100)))
        await settle()
        await settle()
        assert (trainers.prepared, trainers.begun) == (1, [])
        assert starting.failures() == [trainers.unprepared]

    run(test)


def test_an_attempt_is_newer_than_any_that_was_seen_or_remembered() -> None:
    seen = TrainerPod(
        namespace="team",
        name="moe-0-5",
        uid="u",
        job="moe",
        owner="another job of that name",
        member=0,
        attempt=5,
        node="n0",
        state=AgentState.STOPPING,
    )

    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.want(JOB, starts(0, 1, 2))
        await settle()
        assert [attempt for _, _, attempt in trainers.begun] == [6, 4, 1]

    run(test, [seen], {0: 2, 1: 3})


def test_how_long_a_lost_member_was_without_a_pod_is_observed_once() -> None:
    async def test(starting: PodStarter, trainers: GatedTrainers) -> None:
        starting.note_loss(0, heartbeat_at=5.0)
        for _ in range(2):
            starting.want(JOB, starts(0))
            await settle()
            await trainers.let(1)

    registry = run(test).registry
    assert registry.get_sample_value("holdfast_operator_replacement_seconds_count") == 1
    assert registry.get_sample_value("holdfast_operator_replacement_seconds_sum") == 2.0
