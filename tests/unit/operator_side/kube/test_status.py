"""The status that people and the next operator read."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace

import msgspec
import pytest
from fake_api import FakeApi
from rich.console import Console
from samples import job_resource
from virtual_world import World, waiting
from virtual_world import make_job as virtual_job

from holdfast_cli.commands.cluster_status import job_view
from holdfast_cli.commands.show import status_view
from holdfast_cli.commands.story import story_of
from holdfast_core.corruption import Divergence, Proof
from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.hang_limits import StepPauses
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import JobStatus
from holdfast_core.states import RestoreSource
from holdfast_core.stragglers import ROUNDS, StepTimes
from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import JOBS, Resource
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.kube.job.fleet import _diverged, _slow
from holdfast_operator.kube.job.status import (
    STRAGGLERS_SHOWN,
    conditions_of,
    essence,
    recoveries_of,
    refusal_status,
    status_of,
)
from holdfast_operator.kube.job.status_writer import StatusWriter
from holdfast_operator.reconciler.observe.counters import from_document
from holdfast_operator.reconciler.observe.views import Condition, ConditionType
from holdfast_operator.reconciler.report.recoveries import Recovery
from holdfast_operator.reconciler.report.seats import plan_text

CLOCKS = ClockPair(now=0.0, wall=1_700_000_000.0)


def status(world: World, previous: Object | None = None, **changes: object) -> Object:
    """The status after the world's last look."""
    given = {"pods": {}, "recoveries": [], **changes}
    return status_of(
        world.job,
        world.observed(),
        world.decision,
        previous=previous or {},
        clocks=CLOCKS,
        now=world.now,
        **given,  # type: ignore[arg-type]
    )


def running(job: MoETrainingJob | None = None) -> World:
    world = World(job or virtual_job())
    world.settle(3.0)
    return world


def test_the_status_of_a_running_job_has_its_phase_and_numbers() -> None:
    world = running()
    found = status(world, pods={(0, "n0"): "job-0-1"})
    assert found["phase"] == "Running"
    assert (found["ready"], found["desired"], found["readyText"]) == (4, 4, "4/4")
    assert found["nodesReady"] == 4
    assert found["epoch"] == 1
    assert found["selector"] == "holdfast.dev/job=job"
    assert found["members"][0] == {
        "index": 0,
        "node": "n0",
        "pod": "job-0-1",
        "state": "running",
    }
    assert found["startedAt"].startswith("2023-11-14T22:")
    assert "problem" not in found


def test_the_status_says_what_a_recovery_does_to_workers_once_that_is_known() -> None:
    world = World(virtual_job(), nodes=1)
    world.look()
    assert "recoveryMode" not in status(world)
    world = running()
    assert status(world)["recoveryMode"] == "Restart"
    world.following = set(range(4))
    assert status(world)["recoveryMode"] == "InPlace"
    msgspec.convert(status(world), JobStatus)


def test_the_status_has_the_members_that_the_job_has_wants_and_needs() -> None:
    waiting = World(virtual_job(), nodes=1)
    waiting.look()
    assert status(waiting)["strength"] == {"active": 0, "desired": 4, "minimum": 4}
    world = World(virtual_job(spares=0, spec={"minNodes": 3}))
    world.settle(3.0)
    world.train(10)
    world.settle(1.0)
    world.kill_node("n2")
    world.settle(6.0)
    found = status(world, pods={(m, f"n{m}"): f"job-{m}-1" for m in range(4)})
    assert found["strength"] == {"active": 3, "desired": 4, "minimum": 3}
    assert [member["pod"] for member in found["members"]] == ["job-0-1", "job-1-1", "job-3-1"]
    assert (found["readyText"], found["nodesReady"]) == ("3/4", 3)
    msgspec.convert(found, JobStatus)


def test_the_status_has_the_rate_at_which_protection_fetches() -> None:
    world = running()
    assert status(world)["protectionTraffic"]["nodeBytesPerSecond"] == 0
    world.fetched = {"n0": 123_456_789.0, "n1": 998.0, "n2": 1e6}
    found = status(world)
    assert found["protectionTraffic"] == {
        "nodeBytesPerSecond": 120_000_000,
        "bytesPerSecond": 120_000_000,
        "text": "protection fetches 120 MB/s over all nodes, 120 MB/s into the busiest one",
    }
    msgspec.convert(found, JobStatus)
    world = World(virtual_job(spec={"redundancy": {"type": "RAIM5", "bandwidth": "1.5G"}}))
    world.settle(3.0)
    limited = status(world)["protectionTraffic"]
    assert limited["limit"] == 1_500_000_000
    assert limited["text"].endswith("(at most 1.5 GB/s)")
    alone = World(virtual_job(redundancy="None"))
    alone.settle(3.0)
    assert "protectionTraffic" not in status(alone)


def test_the_status_has_the_slots_of_the_node_that_has_room_for_fewest() -> None:
    world = running()
    assert "slots" not in status(world)  # no rank has opened its session
    world.figures_of = {f"n{node}": {"slots": slots} for node, slots in enumerate((3, 2, 3))}
    found = status(world)
    assert found["slots"] == 2
    assert msgspec.convert(found, JobStatus).slots == 2


def test_the_status_has_the_interval_and_the_window_that_ranks_agree_on() -> None:
    """A daemon whose ranks have not reported yet does not hide what the others say."""
    sparse = {"type": "Sparse", "sparse": {"window": "auto", "maxWindow": 16}}
    for snapshot, reported, expected in (
        (
            {"interval": {"steps": "auto"}},
            "interval_steps",
            {"intervalSteps": 12, "text": "a snapshot is taken every 12 steps now (auto)"},
        ),
        (
            {"policy": sparse},
            "window_steps",
            {"windowSteps": 12, "text": "windows have 12 steps now (auto, at most 16)"},
        ),
        ({}, "interval_steps", None),
        ({"policy": {"type": "Sparse", "sparse": {"window": 6}}}, "window_steps", None),
    ):
        world = World(virtual_job(spec={"snapshot": snapshot}))
        world.settle(3.0)
        assert "pace" not in status(world)
        world.figures_of = {"n0": {reported: 12}, "n2": {reported: 12}}
        found = status(world)
        assert found.get("pace") == expected
        msgspec.convert(found, JobStatus)


def test_a_rate_that_is_nearly_zero_is_shown_as_zero() -> None:
    world = running()
    world.fetched = {"n0": 999.0}
    assert status(world)["protectionTraffic"]["bytesPerSecond"] == 0


def test_the_status_of_a_waiting_job_has_its_problem() -> None:
    world = World(virtual_job(), nodes=1)
    world.look()
    found = status(world)
    assert found["phase"] == "Waiting"
    assert "1 of 4 nodes" in found["problem"]
    assert "startedAt" not in found


def test_epoch_and_counters_are_restored_from_the_status() -> None:
    world = running()
    world.daemons["n1"].lost.add(1)
    world.settle(5.0)
    found = status(world)
    state = from_document(found["counters"], now=world.now, wall=CLOCKS.at_wall(world.now))
    assert state.epoch == world.state.epoch == 2
    assert (state.recoveries, state.counted) == (1, 1)
    assert state.restarts == pytest.approx(world.state.restarts, abs=0.001)


def test_a_transition_time_changes_only_with_the_conditions_status() -> None:
    first = Condition(type=ConditionType.RUNNING, status=True, reason="A", message="x")
    earlier = {"conditions": msgspec.to_builtins(conditions_of((first,), 1, {}, "t1"))}
    (other_words,) = conditions_of((replace(first, reason="B"),), 2, earlier, "t2")
    assert other_words.last_transition_time == "t1"
    assert (other_words.reason, other_words.observed_generation) == ("B", 2)
    (ended,) = conditions_of((replace(first, status=False),), 2, earlier, "t3")
    assert ended.last_transition_time == "t3"


def test_the_status_of_a_refused_job_has_the_reason_and_keeps_earlier_fields() -> None:
    resource = job_resource()
    resource["status"] = {"counters": {"epoch": 4}, "conditions": [{"type": "Running"}]}
    found = refusal_status(resource, "InvalidTemplate", "no image", "t1")
    assert found["phase"] == "Waiting"
    assert found["problem"] == "no image"
    assert found["counters"] == {"epoch": 4}
    assert [c["type"] for c in found["conditions"]] == ["Scheduled", "Running"]
    assert found["observedGeneration"] == 3


@pytest.mark.parametrize("kind", ["Running", "Recovering"])
def test_whether_a_refused_job_is_at_work_is_not_known(kind: str) -> None:
    resource = job_resource()
    known = [
        {"type": kind, "status": "True", "reason": "A", "lastTransitionTime": "t0"},
        {"type": "Protected", "status": "True", "reason": "B", "lastTransitionTime": "t0"},
        {"type": "Suspended", "status": "False", "reason": "C", "lastTransitionTime": "t0"},
    ]
    resource["status"] = {"phase": kind, "conditions": known}
    found = refusal_status(resource, "InvalidSpec", "no image", "t1")
    listed = {c["type"]: (c["status"], c["lastTransitionTime"]) for c in found["conditions"]}
    assert found["phase"] == "Waiting"
    assert listed == {
        "Scheduled": ("False", "t1"),
        kind: ("Unknown", "t1"),
        "Protected": ("True", "t0"),
        "Suspended": ("False", "t0"),
    }
    again = refusal_status({**resource, "status": found}, "InvalidSpec", "no image", "t2")
    assert again == found, "nothing is written again"


def test_the_essence_of_a_status_changes_with_a_lost_rank_and_not_with_steps() -> None:
    world = running()
    before = status(world)
    world.settle(2.0)
    assert essence(status(world)) == essence(before)
    world.daemons["n1"].lost.add(1)
    world.look()
    assert essence(status(world)) != essence(before)


def test_the_step_is_kept_without_ranks_but_not_across_a_recovery() -> None:
    world = running()
    silent = replace(world.decision.state, membership=None, epoch=5, started_from=311)
    world.decision = replace(world.decision, state=silent)
    assert status(world, {"step": 400, "epoch": 5})["step"] == 400
    assert status(world, {"step": 400, "epoch": 4})["step"] == 311


def test_recoveries_are_written_to_the_status_and_read_back() -> None:
    over = Recovery(
        epoch=2,
        cause="rank 1 lost",
        decided_at=1_700_000_000.0,
        step_before=9,
        resumed_at=1_700_000_004.5,
        restored_step=8,
        lost_steps=1,
        sources=((1, RestoreSource.PARITY),),
    )
    found = status(running(), recoveries=[over])
    assert found["lastRecoveries"] == [
        {
            "cause": "rank 1 lost",
            "detectedAt": "2023-11-14T22:13:20.000000Z",
            "restoredStep": 8,
            "lostSteps": 1,
            "seconds": 4.5,
            "source": "parity",
        }
    ]
    (again,) = recoveries_of(found)
    assert (again.cause, again.source, again.lost_steps) == ("rank 1 lost", "parity", 1)
    assert again.resumed_at == pytest.approx(1_700_000_004.5)


class Writing:
    """A writer before a fake API server, on a clock of its own."""

    def __init__(self, api: FakeApi | None = None) -> None:
        self.api, self.now = api or FakeApi(), 0.0
        self.counts: list[str] = []
        self.resource = self.api.put(JOBS, job_resource())
        self.writer = StatusWriter(
            self.api,
            self.resource,
            clock=lambda: self.now,
            interval_s=lambda: 2.0,
            count=self.counts.append,
        )

    def write(self, **status: object) -> bool:
        async def all_of_it() -> bool:
            known = await self.writer.write(status)
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
            return known

        return asyncio.run(all_of_it())

    @property
    def stored(self) -> Object:
        found: Object = self.api.objects[("moetrainingjobs", "team", "moe")]
        return found


def test_an_unchanged_status_is_not_written() -> None:
    writing = Writing()
    assert writing.write(phase="Running", step=1)
    writing.now = 100.0
    assert writing.write(phase="Running", step=1)
    assert writing.counts == ["written"]


def test_a_new_step_waits_for_the_interval_and_a_new_phase_does_not() -> None:
    writing = Writing()
    writing.write(phase="Running", step=1)
    writing.now = 1.9
    writing.write(phase="Running", step=2)
    assert writing.stored["status"]["step"] == 1
    assert writing.writer.due_at == 2.0
    writing.write(phase="Recovering", step=2)
    assert writing.writer.due_at is None
    assert writing.stored["status"]["phase"] == "Recovering"
    writing.now = 4.0
    writing.write(phase="Recovering", step=3)
    assert writing.stored["status"]["step"] == 3


class SlowApi(FakeApi):
    """An API server that answers writes of a status only once `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def replace(
        self, resource: Resource, namespace: str, body: Object, subresource: str = ""
    ) -> Object:
        self.requests.append(("began", resource.plural, body["status"]["phase"]))
        await self.gate.wait()
        return await super().replace(resource, namespace, body, subresource)


def test_a_slow_write_blocks_no_caller_and_an_urgent_status_replaces_it() -> None:
    async def scenario() -> None:
        writing = Writing(SlowApi())
        api = writing.api
        assert isinstance(api, SlowApi)
        writing.writer.written = {"phase": "Running", "step": 1}
        assert await writing.writer.write({"phase": "Running", "step": 2})
        writing.now = 100.0
        assert await writing.writer.write({"phase": "Running", "step": 3})
        assert writing.writer.due_at == 102.0  # not at once, and again and again
        await asyncio.sleep(0)
        assert api.requests == [("began", "moetrainingjobs", "Running")]
        urgent = asyncio.ensure_future(writing.writer.write({"phase": "Recovering", "step": 3}))
        while len(api.requests) < 2:
            await asyncio.sleep(0)
        api.gate.set()
        assert await urgent
        assert writing.stored["status"] == {"phase": "Recovering", "step": 3}
        assert writing.counts == ["written"]

    asyncio.run(scenario())


def test_a_change_by_another_client_is_read_and_not_overwritten() -> None:
    writing = Writing()
    changed = job_resource(suspend=True)
    writing.api.put(JOBS, changed)
    assert writing.write(phase="Running")
    assert writing.counts == ["conflict", "written"]
    assert writing.stored["spec"]["suspend"] is True
    assert writing.stored["status"] == {"phase": "Running"}


def test_a_new_job_of_the_same_name_does_not_get_the_old_status() -> None:
    writing = Writing()
    other = job_resource()
    other["metadata"]["uid"] = "another"
    writing.api.put(JOBS, other)
    assert not writing.write(phase="Running")
    assert "status" not in writing.stored


def test_a_status_that_could_not_be_written_is_written_at_the_next_call() -> None:
    writing = Writing()
    writing.api.refuse = ApiError("no answer", status=0)
    assert not writing.write(phase="Running")
    assert writing.write(phase="Running")
    assert writing.counts == ["failed", "written"]


def test_the_expert_plan_is_in_the_status() -> None:
    world = World(virtual_job())
    world.settle(3.0)
    assert "experts" not in status(world)
    report = PlanReport(
        epoch=1,
        step=7,
        cause=PlanCause.WORLD,
        ranks=4,
        rank_seats=3,
        layers=2,
        experts=6,
        least_nodes=2,
        busiest_node=1.125,
    )
    world.plans = {world.nodes_of_members()[0]: report}
    world.look()
    found = status(world)
    assert found["experts"] == {
        "leastNodes": 2,
        "ranks": 4,
        "seatsPerRank": 3,
        "busiestNodeRatio": 1.125,
        "epoch": 1,
        "step": 7,
        "cause": "world",
        "text": plan_text(report),
    }
    assert msgspec.convert(found, JobStatus).experts is not None
    job = {"metadata": {"name": "moe", "namespace": "ns"}, "status": found}
    out = io.StringIO()
    Console(width=400, file=out).print(job_view(job, []))
    assert plan_text(report) in out.getvalue()


def test_lost_tokens_are_in_the_status_and_their_condition_is_unknown_before_a_report() -> None:
    world = World(virtual_job(spec={"snapshot": {"policy": {"type": "PartialExperts"}}}))
    world.settle(3.0)
    before = status(world)
    assert "tokenLoss" not in before
    conditions = {c["type"]: (c["status"], c["reason"]) for c in before["conditions"]}
    assert conditions["TokenLossWithinLimit"] == ("Unknown", "NotReported")
    report = LossReport(
        ranks=4,
        k=2,
        experts_max=8,
        limit=0.05,
        layers=(0, 1),
        at_risk=(2, 0),
        routed=(300, 100),
        lost=(2, 0),
    )
    world.losses = {world.nodes_of_members()[0]: report}
    world.look()
    found = status(world, before)
    assert found["tokenLoss"] == {
        "lost": "0.50%",
        "lostTokens": 2,
        "lostRatio": 0.005,
        "lostMLT": 0.006667,
        "atRiskRatio": 0.005,
        "atRiskMLT": 0.006667,
        "limit": 0.05,
        "expertsPerLayer": 2,
        "text": found["tokenLoss"]["text"],
    }
    assert msgspec.convert(found, JobStatus).token_loss is not None
    world.losses = {world.nodes_of_members()[0]: replace(report, at_risk=(9, 0))}
    world.look()
    assert essence(status(world, found)) == essence(found)  # need not be written at once


def test_the_newest_failure_of_a_trainer_is_in_the_status_with_its_last_lines() -> None:
    world = running()
    assert "lastFailure" not in status(world)
    world.exit_rank(2, 1, "ValueError: bad")
    world.look()
    found = status(world)
    assert found["lastFailure"] == {
        "text": "rank 2 exited with code 1",
        "epoch": 1,
        "member": 2,
        "exitCode": 1,
        "lastLines": "ValueError: bad",
    }
    msgspec.convert(found, JobStatus)
    again = from_document(found["counters"], now=0.0, wall=0.0)
    assert again.failure == world.state.failure


@pytest.mark.parametrize(
    ("detection", "quiet_s", "text"),
    [
        ({"hangSeconds": 90}, 90.0, "a hang is noticed after 90 s without a step (hangSeconds)"),
        ({}, 600.0, "a hang is noticed after 600 s without a step"),
        (
            {"startSeconds": 900},  # watched for hours
            110.0,
            "a hang is noticed after 600 s without a step, or 110 s if no process works (no pause "
            "took 30 s so far)",
        ),
    ],
)
def test_the_silence_that_counts_as_a_hang_is_in_the_status(
    detection: dict[str, float], quiet_s: float, text: str
) -> None:
    world = World(virtual_job(detection={"heartbeatSeconds": 1, **detection}))
    world.settle(1.0)
    if "startSeconds" in detection:
        learned = StepPauses(epoch=1, longest_s=21.0, watched_s=1e6, progresses=99)
        world.state = replace(world.state, pauses=learned)
        world.look()
    found = status(world)
    assert found["hangDetection"] == {"quietSeconds": quiet_s, "text": text}
    console = Console(file=io.StringIO(), width=200)
    console.print(status_view("llm", found, ()))
    assert text in console.file.getvalue()  # type: ignore[attr-defined]


def test_slow_ranks_are_in_the_status_and_shown_until_they_keep_pace() -> None:
    world = running()
    for number in range(1, ROUNDS + 1):
        assert "stragglers" not in status(world)
        fast = StepTimes(window=number, steps=10, step_s=1.5, own_s=1.0, wait_s=0.5)
        slow = StepTimes(window=number, steps=10, step_s=1.5, own_s=1.5, wait_s=0.0, data_s=0.5)
        world.times = {0: fast, 1: fast, 2: fast, 3: slow}
        world.look()
    found = status(world)
    (straggler,) = found["stragglers"]
    text = (
        "rank 3 of member 3 on n3 is slow: it works 1.5 s in each step, its peers 1 s, and they "
        "wait for it; its data loader is slow"
    )
    assert straggler == {
        "rank": 3, "member": 3, "node": "n3", "cause": "Data", "slowerRatio": 0.5, "text": text,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    console.print(status_view("llm", found, ()))
    assert f"SLOW: {text}" in console.file.getvalue()  # type: ignore[attr-defined]
    told = story_of("llm", found, ())
    assert "What wants attention:" in told and "its data loader is slow" in " ".join(told.split())
    assert text not in str(essence(found))


def test_the_newest_corruption_stays_in_the_status_and_is_shown() -> None:
    world = running()
    assert not {"lastCorruption", "corruptionCount"} & status(world).keys()
    found = Divergence(
        step=41, equal_step=40, unit="layer0/gate", units=2, ranks=(0, 1, 2, 3), wrong=(3,),
        proof=Proof.MAJORITY,
    )  # fmt: skip
    world.divergences = dict.fromkeys(range(4), found)
    world.look()
    shown = status(world)
    text = shown["lastCorruption"].pop("text")
    assert text == (
        "rank 3 of member 3 on n3 has wrong bytes of layer0/gate and 1 more unit after step 41: "
        "most of its replicas have others, which are the same; they were equal after step 40, 1 "
        "step before"
    )
    assert shown["lastCorruption"] == {
        "unit": "layer0/gate", "step": 41, "equalStep": 40, "ranks": [3], "member": 3,
        "node": "n3", "proof": "Majority", "epoch": 1,
    }  # fmt: skip
    assert shown["corruptionCount"] == 1 and (_diverged(shown), _diverged({})) == (1, 0)
    shown = status(world)
    msgspec.convert(shown, JobStatus)
    assert from_document(shown["counters"], now=0.0, wall=0.0).corruption == world.state.corruption
    console = Console(file=io.StringIO(), width=300)
    console.print(status_view("llm", shown, ()))
    assert f"CORRUPT: {text}" in console.file.getvalue()  # type: ignore[attr-defined]
    told = " ".join(story_of("llm", shown, ()).split())
    assert "What wants attention:" in told and f"corrupt: {text}" in told
    for over in (shown | {"epoch": 2}, shown | {"phase": "Complete"}):
        console = Console(file=io.StringIO(), width=300)
        console.print(status_view("llm", over, ()))
        view = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"corrupt in epoch 1: {text}" in view and "CORRUPT" not in view
        assert "corrupt:" not in story_of("llm", over, ())


def test_steps_that_cannot_be_repeated_are_in_the_status_in_words() -> None:
    world = running()
    found = Divergence(step=41, unit="other", ranks=(0, 1), proof=Proof.UNREPEATABLE)
    world.divergences = dict.fromkeys(range(4), found)
    world.look()
    shown = status(world)
    text = shown["stepsNotRepeated"]
    assert text.startswith(
        "no step is executed again in this epoch: training is not deterministic, or"
    )
    assert "lastCorruption" not in shown and "corruptionCount" not in shown
    msgspec.convert(shown, JobStatus)
    assert from_document(shown["counters"], now=0.0, wall=0.0).steps_not_repeated == text
    console = Console(file=io.StringIO(), width=300)
    console.print(status_view("llm", shown, ()))
    assert text in console.file.getvalue()  # type: ignore[attr-defined]


def with_slow_ranks(world: World, *slow: int) -> World:
    """`world` after rounds in which all other ranks waited for the `slow` ones."""
    for number in range(1, ROUNDS + 2):
        world.times = {
            rank: StepTimes(
                window=number,
                steps=10,
                step_s=1.5,
                own_s=1.5 if rank in slow else 1.0,
                wait_s=0.0 if rank in slow else 0.5,
            )
            for rank in range(world.job.world_size)
        }
        world.look()
    return world


def test_slow_ranks_are_counted_also_where_not_all_of_them_are_shown() -> None:
    world = with_slow_ranks(running(virtual_job(nproc=16)), *range(20))
    found = status(world)
    assert found["stragglerCount"] == 20 and len(found["stragglers"]) == STRAGGLERS_SHOWN
    assert _slow(found) == 20 and _slow({}) == 0


@pytest.mark.parametrize("end", ["complete", "suspended", "lost", "closed"])
def test_a_job_that_does_not_train_has_no_slow_ranks(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = with_slow_ranks(running(), 3)
    assert len(status(world)["stragglers"]) == 1
    heard = world.observed()
    if end == "complete":
        world.finish()
    elif end == "suspended":
        world.job = virtual_job(suspend=True)
    elif end == "lost":
        world.kill_node("n1")
    else:
        world.sessionless = set(range(4))
    world.settle(20.0)
    assert not {"stragglers", "stragglerCount"} & status(world).keys()
    if end != "closed":  # daemons that are silent since have last seen the ranks at work
        monkeypatch.setattr(world, "observed", lambda: heard)
        assert not {"stragglers", "stragglerCount"} & status(world).keys()


def test_the_status_keeps_the_newest_hang_over_control_loops() -> None:
    world = World(virtual_job(detection={"hangSeconds": 30}))
    world.settle(3.0)
    world.train(10)
    world.settle(1.0)
    assert "lastHang" not in status(world)
    world.idle_s = 31.0
    world.processes = {2: waiting(2, line=7)}
    world.settle(1.0)
    first = status(world)
    hang = first["lastHang"]
    assert hang["text"].startswith("rank 2 is waiting in all_reduce (work/train.py:7); 3 others")
    assert (hang["kind"], hang["epoch"], hang["ranks"][0]["node"]) == ("Elsewhere", 1, "n2")
    assert hang["detectedAt"].startswith("2023-11-14T22:")
    msgspec.convert(first, JobStatus)
    told = story_of("llm", first, (), (), "holdfast history -n team llm")
    assert "The last hang in epoch 1: rank 2 is waiting in all_reduce" in " ".join(told.split())
    assert "  rank 2 on n2: all_reduce (distributed/distributed_c10d.py:9) < main (" in told
    assert "holdfast history -n team llm --stacks" in " ".join(told.split())
    world.restart()
    world.idle_s = 0.0
    world.settle(3.0)
    assert status(world, previous=first)["lastHang"] == hang
