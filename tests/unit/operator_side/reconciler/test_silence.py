"""After what silence a job that trains hangs: in simulated shapes of jobs, and in a virtual world.

A shape is a sequence of pauses between steps, each with its length and whether a process works
meanwhile. The control loop looks at it as it does in a cluster, every five seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from virtual_world import World, make_job, running

from holdfast_core.hang_limits import HANGING_S, QUIET_S_MIN, STEP_S, WATCHED_S, StepPauses
from holdfast_core.states import RankHealth
from holdfast_operator.kube.client.pacing import CALM_S
from holdfast_operator.reconciler.observe.silence import HangLimit
from holdfast_operator.reconciler.observe.views import RankView

HOUR_S = 3600.0
Pause = tuple[float, bool]
"""(seconds, whether a process works)."""


class Watched:
    """A job that is watched, with one rank that has no step and another that may work."""

    def __init__(self) -> None:
        self.pauses, self.now, self.step, self.epoch = StepPauses(), 0.0, 0, 1
        self.look_at, self.hung = 0.3, False

    def alarms(self, shape: Iterable[Pause]) -> list[float]:
        """The silence at each alarm. After one, the job restarts and repeats nothing."""
        found = []
        for pause_s, works in shape:
            began, self.now = self.now, self.now + pause_s
            while self.look_at < self.now:
                look_at, self.look_at = self.look_at, self.look_at + CALM_S
                idle_s = look_at - began
                look = (self.epoch, self.step, idle_s, look_at, self.hung)
                self.pauses = self.pauses.follow(*look)
                limit = HangLimit(steps_s=HANGING_S, quiet_s=self.pauses.quiet_limit_s)
                if limit.is_passed(ranks(idle_s, works), 2):
                    found.append(idle_s)
                    self.epoch, self.now, self.hung = self.epoch + 1, look_at, True
                    break
            self.step += 1
        return found


def ranks(idle_s: float, works: bool) -> list[RankView]:
    return [
        RankView(
            rank=rank,
            idle_s=idle_s,
            state=RankHealth.HEALTHY,
            since_work_s=since_s,
            work_reported=True,
        )
        for rank, since_s in enumerate((idle_s, 0.0 if works else idle_s))
    ]


def steps(step_s: float, hours: float) -> Iterator[Pause]:
    return ((step_s, False) for _ in range(int(hours * HOUR_S / step_s)))


def evaluating(every: int, pause: Pause, hours: float, step_s: float = 1.0) -> Iterator[Pause]:
    """Steps without any work that is seen, and after some of them a longer pause."""
    for number, each in enumerate(steps(step_s, hours), start=1):
        yield each
        if number % every == 0:
            yield pause


def growing(seed: int) -> Iterator[Pause]:
    """Steps that grow from half a second to a minute in ten hours, and vary."""
    chance = random.Random(seed)
    step_s = 0.5
    for _ in range(5000):
        step_s = min(60.0, step_s * 1.001)
        yield step_s * chance.uniform(0.7, 1.5), False


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(evaluating(1000, (300.0, True), 10), id="evaluation every 1000 steps"),
        pytest.param(evaluating(1000, (300.0, False), 10), id="the same, and no work is seen"),
        pytest.param(evaluating(20_000, (500.0, True), 12), id="evaluation after hours"),
        pytest.param(evaluating(3600, (45.0, False), 8), id="storage is waited for each hour"),
        pytest.param(evaluating(7, (480.0, True), 1, step_s=20.0), id="compiled again and again"),
        pytest.param(steps(90.0, 20), id="long steps"),
        *(pytest.param(growing(seed), id=f"growing steps, seed {seed}") for seed in range(3)),
    ],
)
def test_a_job_that_trains_raises_no_alarm(shape: Iterator[Pause]) -> None:
    assert Watched().alarms(shape) == []


def test_a_hang_of_a_job_that_was_watched_for_hours_is_noticed_within_a_minute() -> None:
    job = Watched()
    assert job.alarms(steps(2.0, 6)) == []
    [silence_s] = job.alarms([(HOUR_S, False)])
    assert QUIET_S_MIN <= silence_s <= QUIET_S_MIN + CALM_S


@pytest.mark.parametrize("hours", [0.1, 0.4])
def test_a_hang_of_a_job_that_was_hardly_watched_is_noticed_as_ever(hours: float) -> None:
    job = Watched()
    assert job.alarms(steps(2.0, hours)) == []
    [silence_s] = job.alarms([(HOUR_S, False)])
    assert HANGING_S <= silence_s <= HANGING_S + CALM_S


def test_a_hang_in_which_a_process_spins_is_noticed_as_ever() -> None:
    job = Watched()
    assert job.alarms(steps(2.0, 6)) == []
    [silence_s] = job.alarms([(HOUR_S, True)])
    assert HANGING_S <= silence_s <= HANGING_S + CALM_S


def test_the_limit_shrinks_to_its_half_in_twice_the_time() -> None:
    job, limits = Watched(), []
    for _ in range(3):
        job.alarms(steps(1.0, 2 * WATCHED_S / HOUR_S))
        limits.append(job.pauses.quiet_limit_s)
    assert limits == pytest.approx([300.0, 150.0, 100.0], abs=STEP_S)


def test_a_pause_that_was_taken_for_a_hang_is_so_only_once() -> None:
    """An evaluation that no launcher sees, for the first time after ten hours."""
    job = Watched()
    assert job.alarms(steps(1.0, 10)) == []
    assert len(job.alarms([(550.0, False)])) == 1
    assert job.alarms(evaluating(1000, (550.0, False), 20)) == []


def test_after_a_restart_nothing_learned_applies_until_steps_were_seen() -> None:
    job = Watched()
    job.alarms(steps(1.0, 6))
    assert job.pauses.quiet_limit_s == QUIET_S_MIN
    job.epoch += 1
    job.alarms(steps(1.0, 30 / HOUR_S))
    assert job.pauses.quiet_limit_s == HANGING_S
    job.alarms(steps(1.0, 200 / HOUR_S))
    assert job.pauses.quiet_limit_s == QUIET_S_MIN


# --- in a virtual world ---------------------------------------------------------------------------


def watched(**detection: float) -> World:
    """A job without hangSeconds, as if it had been watched for hours."""
    world = running(make_job(detection={"heartbeatSeconds": 1, **detection}))
    watch(world)
    return world


def watch(world: World) -> None:
    """Train on, as if the job had been watched for hours."""
    world.train(max(world.step, world.state.started_from or 0) + 10)
    world.settle(1.0)
    pauses = StepPauses(
        epoch=world.membership.epoch, step=world.step, watched_s=1e6, progresses=100
    )
    world.state = replace(world.state, pauses=pauses)
    world.worked_at = dict.fromkeys(range(world.membership.world_size), world.now)
    world.train(world.step + 1)
    world.settle(1.0)


def hang(world: World, seconds: float) -> None:
    for _ in range(int(seconds)):
        world.idle_s += 1.0
        world.settle(1.0)


def test_a_quiet_job_hangs_after_what_was_learned() -> None:
    world = watched()
    hang(world, QUIET_S_MIN - 5)
    assert world.state.recoveries == 0
    hang(world, 30)
    assert world.state.recoveries == 1
    assert "no progress of any rank for 6" in world.messages("Recovering")[0]


@pytest.mark.parametrize("ends", ["by a restart", "by itself"])
def test_a_pause_that_was_taken_for_a_hang_is_remembered(ends: str) -> None:
    """A pause that comes every night, under a control loop that is replaced every day."""
    world = watched()
    hang(world, QUIET_S_MIN - 5)
    if ends == "by itself":
        world.mute = {"n0"}  # Its launcher is asked what its ranks do, and does not answer.
        hang(world, 6)
        world.idle_s, world.mute = 0.0, set()
        world.settle(1.0)
        assert world.state.recoveries == 0 and len(world.messages("HangPassed")) == 1
    else:
        hang(world, 30)
        assert world.state.recoveries == 1
    world.restart()
    world.settle(8.0)
    watch(world)
    before = world.state.recoveries
    hang(world, 2 * QUIET_S_MIN)
    assert world.state.recoveries == before


def test_a_number_of_the_job_stays_as_it_is() -> None:
    world = watched(hangSeconds=200)
    hang(world, 180)
    assert world.state.recoveries == 0
    hang(world, 40)
    assert world.state.recoveries == 1


@pytest.mark.parametrize(
    "launcher", ["works", "works without a session", "reports nothing", "reports no more"]
)
def test_while_one_rank_works_or_may_work_the_fixed_limit_applies(launcher: str) -> None:
    world = watched()
    if launcher == "reports no more":
        world.unreported = frozenset({2})
    else:
        del world.worked_at[2]
    if launcher == "works without a session":  # It evaluates, and the others wait for it.
        world.sessionless = {2}
    for _ in range(300):
        world.idle_s += 1.0
        if launcher.startswith("works"):
            world.worked_at[2] = world.now
        world.settle(1.0)
    assert world.state.recoveries == 0
