"""The phase of a job in every state: `Recovering` is a recovery, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from virtual_world import World, make_job, running

from holdfast_core.job.status import Phase
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.report.conditions import conditions, phase

BOOLS = (False, True)


def test_the_phase_of_every_state() -> None:
    world = running()
    at_work = world.observed()
    for daemon in world.daemons.values():
        daemon.lost = {0, 1, 2, 3}
    at_rest = replace(world.observed(), agents=())
    counts = dict.fromkeys(Phase, 0)
    for outcome, suspended, placed, resumed, confirmed, ran, recovering, waits, works in product(
        (None, *Outcome), *[BOOLS] * 8
    ):
        if (resumed and (recovering or not confirmed or not ran)) or (suspended and works):
            continue  # the rules never leave these
        state = replace(
            world.state,
            outcome=outcome,
            membership=world.membership if placed else None,
            resumed_epoch=int(resumed),
            confirmed_epoch=int(confirmed),
            ran=ran,
            recovering=recovering,
            no_replacement_since=1.0 if waits else None,
        )
        observed = at_work if works else at_rest
        job = make_job(suspend=suspended)
        found = phase(conditions(job, observed, state, world.now, "waiting"))
        if outcome is not None:
            expected = Phase(outcome.value)
        elif suspended:
            expected = Phase.SUSPENDED
        elif not placed:
            expected = Phase.WAITING
        elif waits:
            expected = Phase.RUNNING if works else Phase.WAITING
        elif recovering:
            expected = Phase.RECOVERING
        elif works or resumed or (ran and not confirmed):
            expected = Phase.RUNNING
        else:
            expected = Phase.STARTING
        assert found is expected, (outcome, placed, resumed, confirmed, ran, recovering, waits)
        counts[found] += 1
    assert all(counts.values()), counts


def phases_until(world: World, seconds: float) -> list[Phase]:
    """The phases of the next looks, without repetition."""
    found = list[Phase]()
    until = world.now + seconds
    while world.now < until:
        world.look()
        now = Phase(world.phase())
        if not found or found[-1] is not now:
            found.append(now)
        world.now += 0.25
    return found


def test_a_job_that_is_resumed_starts() -> None:
    world = running()
    world.job = make_job(suspend=True)
    world.settle(2.0)
    world.sessionless = {0, 1, 2, 3}
    world.job = make_job()
    assert phases_until(world, 3.0) == [Phase.STARTING]
    world.sessionless.clear()
    assert phases_until(world, 3.0) == [Phase.RUNNING]


def test_a_resumed_job_whose_memory_is_rebuilt_starts_as_well() -> None:
    world = running()
    world.job = make_job(suspend=True)
    world.settle(2.0)
    world.kill_node("n1")
    world.settle(2.0)
    world.sessionless, world.busy = {0, 1, 2, 3}, {"n4": "rebuilding"}
    world.job = make_job()
    world.settle(6.0)
    assert (world.membership.epoch, world.phase()) == (2, "Starting")
    text = "members [1] rebuild their snapshots from parity"
    assert world.condition("Recovering") == (False, "Starting", text)


def test_members_that_join_start() -> None:
    spec = {"minNodes": 3}
    world = running(make_job(spares=0, spec=spec, joinWaitSeconds=5))
    world.kill_daemon("n1")
    world.settle(6.0)
    world.train(20)
    world.settle(2.0)
    assert len(world.membership.members) == 3
    world.revive_daemon("n1")
    world.settle(3.0)
    epoch = world.membership.epoch
    world.train(30)
    world.sessionless = {0, 1, 2, 3}
    while world.membership.epoch == epoch:
        world.sessionless.clear()
        world.now += 0.25
        world.train(world.step + 1)
        world.look()
    world.sessionless = {0, 1, 2, 3}
    assert phases_until(world, 2.0) == [Phase.STARTING]


def test_a_failure_is_recovered_from_until_training_runs_again() -> None:
    world = running()
    world.lose_rank(2)
    world.look()
    world.sessionless = {0, 1}
    assert phases_until(world, 3.0) == [Phase.RECOVERING]
    world.restart()
    world.settle(1.0)
    assert world.phase() == "Recovering"  # also for the next control loop
    world.sessionless.clear()
    assert phases_until(world, 3.0) == [Phase.RUNNING]


def test_a_control_loop_that_starts_again_shows_no_recovery_of_a_job_that_trains() -> None:
    world = running()
    world.lose_rank(2)
    world.settle(3.0)
    assert (world.membership.epoch, world.phase()) == (2, "Running")
    world.restart()
    world.daemons["n3"].alive = False  # this one dials a moment later
    world.unconnected = {"n3"}
    assert phases_until(world, 2.0) == [Phase.RUNNING]
    assert world.condition("Running")[1] == "ReportsAwaited"
    world.daemons["n3"].alive = True
    assert phases_until(world, 3.0) == [Phase.RUNNING]
