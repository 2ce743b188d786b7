import random

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.engine.overview import held
from holdfast_daemon.engine.slots import ParitySlot, ParityState
from holdfast_daemon.engine.state import JobMemory
from holdfast_daemon.job.scrub import ScrubPlan, ScrubSettings, Target, TargetKind, targets_of

SETTINGS = ScrubSettings(interval_s=100.0, rate_bytes_s=1000.0)


def target(
    index: int,
    nbytes: int = 1000,
    kind: TargetKind = TargetKind.SNAPSHOT,
    job: str = "team/job",
) -> Target:
    generation = Generation(1, 1)
    return Target(job=job, kind=kind, index=index, slot=0, generation=generation, nbytes=nbytes)


def test_two_jobs_that_hold_the_same_are_both_verified() -> None:
    plan = ScrubPlan(SETTINGS)
    held = {target(0, job=job): job for job in ("a", "b")}
    plan.next(0.0, held)
    verified = []
    for second in range(2000):
        chosen = plan.next(float(second), held)
        if chosen is not None:
            verified.append(held[chosen])
    assert verified.count("a") == verified.count("b") == 19


def test_parity_takes_its_time_like_any_other_bytes() -> None:
    memory = JobMemory(job="team/job", node="n0", memory_id="m", incarnation=1)
    parity = ParitySlot(3, 1, state=ParityState.READY, generation=Generation(1, 1))
    memory.parities = {(3, 1): parity}
    (found,) = targets_of(held(memory), lambda lane, slot: 1000 * lane + slot)
    assert found == Target(
        job="team/job",
        kind=TargetKind.PARITY,
        index=3,
        slot=1,
        generation=Generation(1, 1),
        nbytes=3001,
    )


def test_what_was_just_sealed_is_not_verified_again() -> None:
    plan = ScrubPlan(SETTINGS)
    assert plan.next(0.0, [target(0)]) is None
    assert plan.next(99.9, [target(0)]) is None
    assert plan.next(100.0, [target(0)]) == target(0)
    assert plan.next(150.0, [target(0)]) is None
    assert plan.next(200.0, [target(0)]) == target(0)


def test_the_rate_spaces_the_checks() -> None:
    plan = ScrubPlan(SETTINGS)
    held = [target(0, 5000), target(1, 2000)]
    plan.next(0.0, held)
    assert plan.next(100.0, held) == held[0]
    assert plan.next(104.9, held) is None
    assert plan.next(105.0, held) == held[1]
    assert plan.wait_s(106.0) == pytest.approx(94.0)


def test_everything_held_is_verified_every_interval_while_the_rate_allows() -> None:
    rng = random.Random(4)
    plan = ScrubPlan(SETTINGS)
    held = [target(i, rng.randrange(1, 4000), kind) for i in range(10) for kind in TargetKind]
    last = dict.fromkeys(held, 0.0)
    now, done_bytes = 0.0, 0
    plan.next(now, held)
    while now < 1000.0:
        now += max(plan.wait_s(now), 0.001)
        chosen = plan.next(now, held)
        if chosen is not None:
            slack_s = sum(t.nbytes for t in held) / SETTINGS.rate_bytes_s
            assert now - last[chosen] <= SETTINGS.interval_s + slack_s
            last[chosen] = now
            done_bytes += chosen.nbytes
    assert min(last.values()) > 800.0
    assert done_bytes <= 1000.0 * SETTINGS.rate_bytes_s


def test_the_longest_unverified_comes_first_and_ties_break_by_name() -> None:
    plan = ScrubPlan(SETTINGS)
    plan.next(0.0, [target(5)])
    held = [target(5), target(1), target(1, kind=TargetKind.PARITY)]
    plan.next(10.0, held)
    order = [plan.next(now, held) for now in (150.0, 151.0, 152.0)]
    assert order == [target(5), target(1, kind=TargetKind.PARITY), target(1)]


def test_what_is_freed_is_forgotten() -> None:
    plan = ScrubPlan(SETTINGS)
    plan.next(0.0, [target(0)])
    assert plan.next(100.0, []) is None
    assert plan.wait_s(100.0) == SETTINGS.interval_s
    assert plan.next(101.0, [target(0)]) is None
    assert plan.next(201.0, [target(0)]) == target(0)


@pytest.mark.parametrize(("interval_s", "rate_bytes_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_settings_that_mean_nothing_are_refused(interval_s: float, rate_bytes_s: float) -> None:
    with pytest.raises(InvalidJobError, match="must be positive"):
        ScrubSettings(interval_s=interval_s, rate_bytes_s=rate_bytes_s)
