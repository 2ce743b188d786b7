"""A control loop dies at any instant: a job that has lost nothing goes on, whatever its size."""

from __future__ import annotations

import random
from enum import StrEnum
from itertools import product

import pytest
from failing_over import LAST_DIAL_S, NODES, FailingOver, dial_times, small_job
from msgspec import structs

from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.remembered import Word, unheard_homes, word_of
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    ControlState,
    DropJob,
    Fail,
    JobView,
    NodeView,
    PublishMembership,
)
from holdfast_operator.reconciler.reconcile import reconcile

SIZES = [(1, "None"), (2, "None"), (2, "RAIM5"), (4, "RAIM5")]
FAILOVERS = 3
"""Failovers of one run."""
SEEDS = range(20)
"""Runs for each size: 240 failovers in all."""


def harm(world: FailingOver, rng: random.Random) -> None:
    """Bring the job into some phase, in which the control loop will die."""
    member = rng.choice(world.membership.members)
    faults = ("run", "save", "lose a rank", "lose an agent", "end a node", "suspend", "resume")
    match rng.choice(faults):
        case "run" if world.trains():
            world.train(world.step + 1)
        case "save" if world.trains():
            world.train(world.step + 1, protect=False)
        case "lose a rank":
            world.lose_rank(member.index)
        case "lose an agent" if (member.index, member.node) in world.agents:
            world.vanish(member.index)
        case "end a node" if world.trains() and world.missing(world.membership) == 0:
            if world.job.spec.redundancy.losses and len(world.gone) < world.spares:
                world.kill_node(member.node)
        case "suspend":
            suspend(world, True)
        case "resume":
            suspend(world, False)


def suspend(world: FailingOver, on: bool) -> None:
    spec = structs.replace(world.job.spec, suspend=on)
    world.job = structs.replace(world.job, spec=spec)


def pass_time(world: FailingOver, seconds: float) -> None:
    until = world.now + seconds
    while world.now < until:
        world.look()
        world.reap()
        world.now += 0.5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("nodes", "redundancy"), SIZES)
def test_failovers_at_any_instant_lose_nothing(nodes: int, redundancy: str, seed: int) -> None:
    rng = random.Random(f"{nodes} {redundancy} {seed}")
    world = FailingOver(small_job(nodes, redundancy))
    pass_time(world, rng.choice((0.5, 1.0, 3.0)))
    if rng.random() < 0.9:  # else it dies while the job starts
        world.train(10)
    pass_time(world, rng.choice((0.0, 0.5, 3.0)))
    for _ in range(FAILOVERS):
        if world.state.membership is not None:
            harm(world, rng)
        pass_time(world, rng.choice((0.0, 0.5, 1.5)))
        if rng.random() < 0.5:
            world.die_in_a_look(rng)
        world.fail_over(dial_times(rng))
        pass_time(world, rng.choice((0.5, 5.0, 12.0, 20.0)))
    suspend(world, False)
    pass_time(world, LAST_DIAL_S + 10.0)
    assert world.state.outcome is None, world.state.outcome_reason
    assert world.phase() == "Running", world.decision.reason
    assert world.is_kept(world.membership)
    assert DropJob() not in world.actions


def running(nodes: int = 1, redundancy: str = "None", *, step: int = 10) -> FailingOver:
    world = FailingOver(small_job(nodes, redundancy))
    pass_time(world, 2.0)
    world.train(step)
    pass_time(world, 3.0)
    world.actions.clear()
    world.events.clear()
    return world


def silent_for_ever(world: FailingOver, *names: str) -> dict[str, float]:
    """Times at which all daemons dial but these, which never do."""
    return dict.fromkeys(world.daemons, 0.0) | dict.fromkeys(names, 1e9)


def test_a_job_of_one_node_waits_for_its_daemon_as_long_as_that_takes() -> None:
    world = running()
    world.fail_over(silent_for_ever(world, "n0"))
    pass_time(world, 600.0)
    assert world.actions == []
    assert world.phase() == "Waiting"
    assert world.condition("Scheduled")[2] == (
        "epoch 1 was placed on n0; waiting for the daemon on n0, whose memory may hold its "
        "snapshots, until it connects, or its node is deleted or out of service"
    )
    world.dials_at = {}
    pass_time(world, 5.0)
    assert world.membership.epoch == 1 and world.phase() == "Running"
    assert world.actions == []


def test_a_job_of_two_nodes_whose_daemons_are_all_late_is_not_placed_anew() -> None:
    world = running(2, "RAIM5")
    world.fail_over(dict.fromkeys(world.daemons, 0.0) | {"n0": 14.0, "n1": 14.0})
    pass_time(world, 30.0)
    assert world.membership.epoch == 1 and world.phase() == "Running"
    assert world.actions == []


def test_a_member_that_stays_silent_is_replaced_from_parity_and_not_placed_anew() -> None:
    world = running(2, "RAIM5")
    world.fail_over(silent_for_ever(world, "n1"))
    pass_time(world, 30.0)
    assert world.membership.epoch == 2 and world.phase() == "Running"
    assert world.nodes_of_members() == ["n0", "n2"]
    assert "from generation 1.10" in world.messages("Running")[-1]


def test_a_home_that_is_gone_ends_the_wait_and_the_job_says_what_it_has_lost() -> None:
    world = running()
    world.fail_over(silent_for_ever(world, "n0"))
    pass_time(world, 60.0)
    world.kill_node("n0")
    pass_time(world, 5.0)
    assert world.state.outcome_word == "NoRecoveryLine"
    assert "generation 1.10 was the newest that was safe" in world.state.outcome_reason


def test_a_home_whose_memory_is_new_has_said_that_it_holds_nothing() -> None:
    world = running()
    world.lose_memory("n0")
    world.daemons["n0"].membership = None
    world.fail_over({})
    pass_time(world, 20.0)
    assert world.state.outcome_word == "NoRecoveryLine"


def test_who_reshapes_a_suspended_job_gives_its_snapshots_up_wherever_they_are() -> None:
    world = running(2, "RAIM5")
    suspend(world, True)
    pass_time(world, 3.0)
    world.job = small_job(1, "None")
    world.fail_over(silent_for_ever(world, "n0", "n1"))
    pass_time(world, 20.0)
    assert world.phase() == "Running" and world.nodes_of_members() == ["n2"]
    world.dials_at = {}
    pass_time(world, 5.0)
    assert world.phase() == "Running" and world.nodes_of_members() == ["n2"]
    assert world.held.keys().isdisjoint({"n0", "n1"})


def test_a_daemon_of_an_earlier_shape_does_not_have_newer_snapshots_freed() -> None:
    """The daemon that is back first holds what a person gave up; the one that holds the job now has
    not spoken yet."""
    world = running(2, "RAIM5")
    world.kill_daemon("n1")
    suspend(world, True)
    pass_time(world, 3.0)
    world.job = small_job(1, "None")
    pass_time(world, 90.0)
    assert world.nodes_of_members() == ["n0"]
    world.train(20)
    pass_time(world, 3.0)
    world.daemons["n1"].alive = True
    world.fail_over({"n0": 5.0})
    pass_time(world, 20.0)
    assert world.nodes_of_members() == ["n0"] and world.phase() == "Running"
    assert world.held["n0"] == world.protected
    assert world.daemons["n1"].membership is None or "n1" not in world.held


def test_a_status_that_names_no_members_makes_every_node_one_that_may_hold_the_job() -> None:
    world = running()
    del world.document["homes"]
    world.fail_over(silent_for_ever(world, "n0"))
    pass_time(world, 100.0)
    assert world.actions == []
    assert "waiting for the daemon on n0" in world.condition("Scheduled")[2]
    world.dials_at = {}
    pass_time(world, 5.0)
    assert world.membership.epoch == 1 and world.actions == []


def test_an_older_membership_is_not_adopted_while_a_newer_one_may_be_unheard() -> None:
    """A daemon that was left behind dials first. If its epoch were gone on with, the daemon of the
    newest one would be told that it is no member any more."""
    world = running(2, "RAIM5")
    world.kill_daemon("n1")
    pass_time(world, 15.0)
    assert world.nodes_of_members() == ["n0", "n2"]
    world.train(20)
    pass_time(world, 3.0)
    world.daemons["n1"].alive = True  # still in epoch 1
    world.actions.clear()
    world.fail_over({"n0": 40.0, "n2": 40.0})
    pass_time(world, 39.0)
    assert world.actions == [] and world.state.membership is None
    pass_time(world, 10.0)
    assert world.membership.epoch == 2 and world.nodes_of_members() == ["n0", "n2"]


def test_an_epoch_that_was_stored_and_never_published_is_not_waited_for() -> None:
    world = running(2, "RAIM5")
    world.vanish(0)
    world.beat()
    world.store(world.decide())  # epoch 2 is in the status alone
    assert world.document["epoch"] == 2
    world.fail_over({"n0": 1e9})
    pass_time(world, 40.0)
    assert world.phase() == "Running" and world.is_kept(world.membership)
    assert world.membership.epoch == 3  # n0 was replaced


def test_a_first_placement_still_waits_for_no_node_that_it_can_do_without() -> None:
    world = FailingOver(small_job(1, "None"))
    world.dials_at = silent_for_ever(world, "n1", "n4")
    world.unconnected = set(world.daemons)
    pass_time(world, 11.0)
    assert world.phase() == "Running" and len(world.daemons) == NODES


# --- every small case -----------------------------------------------------------------------------

EPOCH, OLDER, VOID = 5, 3, 1
"""The newest epoch of the status, an older one, and one that a person has given up."""


class Heard(StrEnum):
    """What a new control loop may have heard of a node, in the order of what it proves."""

    NOTHING = "nothing"
    GONE = "gone"
    EMPTY = "empty"
    VOID = "void"
    OLDER = "older"
    NEWEST = "newest"
    UNREADABLE = "unreadable"
    """It holds the job, and has lost its record of the epoch."""
    EMPTY_AND_AWAY = "empty and away"


HOMES = ("n0", "n1")
LAST_EPOCHS = {Heard.VOID: VOID, Heard.OLDER: OLDER, Heard.NEWEST: EPOCH}


def heard(name: str, what: Heard) -> NodeView:
    if what is Heard.NOTHING:
        return NodeView(name=name)
    if what is Heard.GONE:
        return NodeView(name=name, gone=True, schedulable=False)
    job = None
    if what in LAST_EPOCHS:
        job = JobView(epoch=LAST_EPOCHS[what], membership=membership(LAST_EPOCHS[what]))
    elif what is Heard.UNREADABLE:
        job = JobView()
    there = what is not Heard.EMPTY_AND_AWAY
    return NodeView(
        name=name, connected=there, heartbeat_at=999.5, memory_id=f"memory-{name}", job=job
    )


def membership(epoch: int) -> Membership:
    homes = HOMES if epoch == EPOCH else ("n0", "n2") if epoch == OLDER else ("n1", "n2")
    members = tuple(
        Member(index=i, node=n, memory_id=f"memory-{n}", peer_address="", bulk_address="")
        for i, n in enumerate(homes)
    )
    return Membership(
        job="default.job", epoch=epoch, members=members, nproc_per_node=1, groups=((0, 1),)
    )


def may_hold_the_newest(words: tuple[Heard, ...], *, named: bool) -> bool:
    """Oracle: whether, in some world that agrees with what was heard, a node that was not heard has
    something of the newest epoch. A home in an older epoch shows that not all homes have entered
    the newest; where homes are not named, it may be a node that was left behind."""
    all_entered = not (named and Heard.OLDER in words)
    return Heard.NOTHING in words and all_entered


CASES = [
    (words, stranger, named)
    for words in product(Heard, repeat=2)
    for stranger in (Heard.EMPTY, Heard.OLDER)
    for named in (True, False)
    if Heard.NEWEST not in words  # else the newest epoch is adopted
]


@pytest.mark.parametrize(("words", "stranger", "named"), CASES)
def test_nothing_is_begun_while_an_unheard_node_may_hold_what_was_protected(
    words: tuple[Heard, ...], stranger: Heard, named: bool
) -> None:
    state = ControlState(epoch=EPOCH, homes=HOMES if named else (), void_epoch=VOID)
    nodes = {name: heard(name, word) for name, word in zip(HOMES, words, strict=True)}
    nodes |= {"n2": heard("n2", stranger), "n3": heard("n3", Heard.EMPTY)}
    step = reconcile(small_job(2, "RAIM5"), ClusterView(nodes=nodes), state, 1000.0)
    begun = [a for a in step.actions if isinstance(a, PublishMembership | Fail | DropJob)]
    harmful = [action for action in begun if action != DropJob(up_to_epoch=VOID)]
    if may_hold_the_newest(words, named=named):
        assert step.state.membership is None and not harmful, step.reason
    elif not {Heard.VOID, Heard.UNREADABLE, Heard.EMPTY_AND_AWAY}.intersection(words):
        assert step.state.membership is not None, step.reason  # nobody is waited for in vain


@pytest.mark.parametrize("other", Heard)
def test_the_newest_epoch_is_adopted_from_the_first_daemon_that_reports_it(other: Heard) -> None:
    state = ControlState(epoch=EPOCH, homes=HOMES, void_epoch=VOID)
    nodes = {"n0": heard("n0", Heard.NEWEST), "n1": heard("n1", other)}
    step = reconcile(small_job(2, "RAIM5"), ClusterView(nodes=nodes), state, 1000.0)
    assert step.state.membership is not None
    assert step.state.membership.epoch >= EPOCH and step.state.homes[0] == "n0"


def test_a_job_that_ends_with_all_its_homes_is_not_waited_for() -> None:
    state = ControlState(epoch=EPOCH, homes=HOMES, outcome=Outcome.FAILED, ended_at=0.0)
    nodes = {name: heard(name, Heard.NOTHING) for name in HOMES}
    step = reconcile(small_job(2, "RAIM5"), ClusterView(nodes=nodes), state, 1000.0)
    assert step.actions == ()


@pytest.mark.parametrize(
    ("what", "word"),
    [
        (Heard.NOTHING, Word.NOT_HEARD),
        (Heard.GONE, Word.GONE),
        (Heard.EMPTY, Word.HOLDS_NOTHING),
        (Heard.VOID, Word.HOLDS_NOTHING),
        (Heard.OLDER, Word.HOLDS),
        (Heard.NEWEST, Word.HOLDS),
        (Heard.UNREADABLE, Word.HOLDS),
        (Heard.EMPTY_AND_AWAY, Word.HOLDS_NOTHING),
    ],
)
def test_each_report_is_one_word(what: Heard, word: Word) -> None:
    assert word_of(heard("n0", what), VOID) is word


def test_a_node_that_was_never_seen_is_not_heard_and_a_connected_one_is_not_gone() -> None:
    assert word_of(None, 0) is Word.NOT_HEARD
    gone = structs.replace(heard("n0", Heard.NEWEST), gone=True)
    assert word_of(gone, 0) is Word.HOLDS


def test_a_job_that_was_never_placed_waits_for_nobody() -> None:
    nodes = {name: heard(name, Heard.NOTHING) for name in HOMES}
    assert unheard_homes(ClusterView(nodes=nodes), ControlState()) == []
    given_up = ControlState(epoch=EPOCH, void_epoch=EPOCH)
    assert unheard_homes(ClusterView(nodes=nodes), given_up) == []
