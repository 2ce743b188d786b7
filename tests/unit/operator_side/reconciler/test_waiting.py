"""A job that cannot go on without a node waits for it, on virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from virtual_world import World, make_job, running

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import Fail

DAY_S = 86_400.0
ANY = {"when": "Any", "action": "RestartInPlace"}
FAIL = {"when": "NoReplacement", "action": "Fail", "afterSeconds": 60}


def drain(world: World, member: int = 1) -> str:
    """Drain the member's node, as an administrator does before an upgrade; returns its name."""
    node = world.membership.member(member).node
    world.cordoned.add(node)
    world.evict(member)
    world.settle(2.0)
    world.reap()
    return node


def kill(world: World) -> None:
    world.kill_node("n1")


def silence(world: World) -> None:
    """Lose contact with a node on which ranks end, and those that need them with them."""
    world.lose_rank(1)
    world.kill_daemon("n1")
    world.lose_rank(0)


def pass_days(world: World, days: int = 2) -> None:
    """Let days pass in which nothing happens but that the loop looks; the job must not be touched
    meanwhile."""
    world.settle(90.0)
    world.actions.clear()
    for _ in range(days):
        world.now += DAY_S
        world.settle(5.0)
    kinds = set(world.kinds())
    assert world.state.outcome is None and not world.dropped
    assert not kinds & {"DropJob", "Fail", "StopAgent", "PublishMembership"}, kinds


@pytest.mark.parametrize("minimum", [None, 3, 4])
@pytest.mark.parametrize("lose", [drain, kill, silence])
def test_without_a_spare_the_job_waits_for_days_and_keeps_what_it_has(
    lose: Callable[[World], object], minimum: int | None
) -> None:
    spec = {} if minimum is None else {"minNodes": minimum}
    world = running(make_job(spares=0, spec=spec, redundancy="RAIM6"))
    if minimum == 3:
        world.kill_node("n3")
        world.settle(8.0)
        assert world.membership.epoch == 2  # it goes on with three, and needs them all
        world.train(20)
        world.settle(1.0)
    epoch = world.membership.epoch
    lose(world)
    pass_days(world)
    assert (world.membership.epoch, world.phase()) == (epoch, "Waiting")
    for kind in ("Running", "Recovering", "Failed"):
        assert world.condition(kind)[0] is False
    held = [name for name, d in world.daemons.items() if d.alive and d.membership is not None]
    assert len(held) >= 2


def test_the_status_says_what_is_waited_for_since_when_and_what_would_end_it() -> None:
    world = running(make_job(spares=0))
    drain(world)
    world.now += 42 * 60.0
    world.settle(5.0)
    text = world.decision.reason
    assert world.condition("Scheduled") == (False, "NoReplacement", text)
    assert text == (
        "members [1] have no node and no spare is left: no pods on n1 (kubectl uncordon); waiting "
        "for 42 min. The job continues from its newest snapshots, which daemons keep in memory "
        "(generation 1.10 was safe), once n1 or another node takes pods; until then it waits"
    )
    assert world.messages("NoReplacement") == [
        "the agent of member 1 on n1 is being removed: EvictionByEvictionAPI; no spare is left"
    ]


def test_a_rule_and_a_deadline_that_would_end_the_wait_are_named() -> None:
    world = running(make_job(spares=0, rules=[{**FAIL, "afterSeconds": 7200}, ANY]))
    drain(world)
    world.settle(60.0)
    assert world.decision.reason.endswith("the failure rule on NoReplacement fails it in 118 min")
    world = running(make_job(spares=0, spec={"activeDeadlineSeconds": 3600}))
    drain(world)
    world.settle(60.0)
    assert world.decision.reason.endswith("spec.activeDeadlineSeconds fails it in 58 min")
    world.now += 3500.0
    world.settle(60.0)
    assert world.condition("Failed")[1] == "DeadlineExceeded"


def test_a_job_below_its_minimum_says_so() -> None:
    world = running(make_job(spares=0, spec={"minNodes": 3}, redundancy="RAIM6"))
    for member in (1, 2):
        world.kill_node(f"n{member}")
    world.settle(20.0)
    assert world.phase() == "Waiting"
    assert "2 members are left, and spec.minNodes is 3; n1, n2 lost" in world.decision.reason


@pytest.mark.parametrize("lose", [drain, silence])
def test_the_job_goes_on_from_the_line_when_the_node_is_back(
    lose: Callable[[World], object],
) -> None:
    world = running(make_job(spares=0))
    lose(world)
    pass_days(world)
    world.cordoned.clear()
    world.revive_daemon("n1")
    world.settle(2.0)
    assert (world.membership.epoch, world.phase()) == (2, "Running")
    assert "from generation 1.10" in world.messages("Running")[-1]
    assert world.state.no_replacement_since is None


@pytest.mark.parametrize("lose", [drain, kill, silence])
def test_the_job_goes_on_when_a_spare_comes(lose: Callable[[World], object]) -> None:
    world = running(make_job(spares=1))
    world.cordoned.add("n4")
    lose(world)
    pass_days(world)
    world.cordoned.remove("n4")
    world.settle(2.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"] and world.phase() == "Running"


def test_a_drained_node_that_comes_back_with_empty_memory_is_filled_by_its_peers() -> None:
    world = running(make_job(spares=0, maxRestarts=0))
    drain(world)
    world.settle(120.0)
    world.kill_daemon("n1")
    world.settle(120.0)
    assert world.phase() == "Waiting" and world.membership.epoch == 1
    world.revive_daemon("n1", new_memory=True)
    world.settle(5.0)
    assert world.phase() == "Waiting"  # it still takes no pods
    world.cordoned.clear()
    world.settle(2.0)
    assert (world.membership.epoch, world.phase()) == (2, "Running")
    assert world.membership.member(1).memory_id == "memory-1'" and world.state.counted == 0


def test_nodes_that_are_drained_one_after_the_other_cost_nothing_but_time() -> None:
    world = running(make_job(spares=0, maxRestarts=0))
    for member in range(4):
        node = drain(world, member)
        world.settle(300.0)
        assert world.phase() == "Waiting"
        world.cordoned.discard(node)
        world.settle(5.0)
        world.train(20 + member)
        world.settle(2.0)
        assert world.phase() == "Running"
    assert (world.state.counted, world.state.recoveries) == (0, 4)


def test_all_nodes_may_be_drained_at_once() -> None:
    world = running(make_job(spares=0, maxRestarts=0))
    for member in range(4):
        drain(world, member)
    pass_days(world)
    world.cordoned.clear()
    world.settle(5.0)
    assert world.phase() == "Running" and world.state.counted == 0
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]


def test_training_that_a_silent_node_did_not_stop_goes_on_when_its_daemon_is_back() -> None:
    world = running(make_job(spares=0, maxRestarts=0))
    world.kill_daemon("n1")
    pass_days(world)
    assert world.phase() == "Waiting"
    world.revive_daemon("n1")
    world.settle(2.0)
    assert (world.membership.epoch, world.phase()) == (1, "Running")
    assert world.state.no_replacement_since is None and world.state.recoveries == 0


def test_a_lost_node_counts_once_however_long_it_is_waited_for() -> None:
    world = running(make_job(spares=0, maxRestarts=1))
    silence(world)
    pass_days(world)
    world.revive_daemon("n1")
    world.settle(2.0)
    assert (world.state.counted, world.phase()) == (1, "Running")


def test_what_is_lost_during_the_wait_for_a_drained_node_counts() -> None:
    world = running(make_job(spares=0, redundancy="RAIM6", maxRestarts=1))
    drain(world)
    world.settle(60.0)
    world.kill_daemon("n2")
    world.settle(60.0)
    world.cordoned.clear()
    world.revive_daemon("n2", new_memory=True)
    world.settle(2.0)
    assert (world.state.counted, world.phase()) == (1, "Running")


def test_the_memory_of_a_member_that_its_group_needs_is_waited_for() -> None:
    """Before, the job went on without it after five minutes, and lost its line with it."""
    world = running(make_job(spares=0, spec={"minNodes": 2}))
    world.kill_node("n2")
    world.settle(6.0)
    world.protects = False
    drain(world, 1)
    pass_days(world)
    assert [member.index for member in world.membership.members] == [0, 1, 3]
    assert "their parity groups are incomplete" in world.decision.reason
    assert world.phase() == "Waiting"
    world.cordoned.clear()
    world.settle(2.0)
    assert world.phase() == "Running"


@pytest.mark.parametrize("minimum", [None, 4, 3])
def test_only_a_rule_of_the_user_gives_up(minimum: int | None) -> None:
    spec = {} if minimum is None else {"minNodes": minimum}
    world = running(make_job(spares=0, rules=[FAIL, ANY], spec=spec))
    drain(world)
    if minimum == 3:
        world.settle(100.0)
        assert world.state.outcome is None and world.phase() == "Running"
        return
    world.settle(50.0)
    assert world.state.outcome is None
    world.settle(15.0)
    assert world.state.outcome is Outcome.FAILED
    assert world.condition("Failed")[1] == "NoReplacement"
    assert "the failure rule on NoReplacement: Fail applies" in world.state.outcome_reason


def test_a_job_may_have_a_rule_to_shrink_and_one_to_give_up_where_it_cannot() -> None:
    shrink = {"when": "NoReplacement", "action": "Shrink", "afterSeconds": 30}
    world = running(make_job(spares=0, rules=[shrink, FAIL, ANY], spec={"minNodes": 3}))
    world.kill_node("n1")
    world.settle(20.0)
    assert world.membership.epoch == 1
    world.settle(20.0)
    assert len(world.membership.members) == 3
    world.train(20)
    world.settle(2.0)
    world.kill_node("n2")
    world.settle(50.0)
    assert world.state.outcome is None and world.phase() == "Waiting"
    world.settle(30.0)
    assert world.state.outcome is Outcome.FAILED


@pytest.mark.parametrize("action", ["RestartInPlace", "ReplaceNode"])
def test_a_rule_with_another_action_is_no_reason_to_fail(action: str) -> None:
    rule = {"when": "NoReplacement", "action": action, "afterSeconds": 1}
    world = running(make_job(spares=0, rules=[rule, ANY]))
    drain(world)
    pass_days(world)


@pytest.mark.parametrize("forgets", [False, True])
def test_the_wait_outlives_the_control_loop(forgets: bool) -> None:
    world = running(make_job(spares=0, maxRestarts=0))
    drain(world)
    world.settle(120.0)
    if forgets:
        world.forget()
    else:
        world.restart()
    world.settle(60.0)
    assert (world.phase(), world.membership.epoch) == ("Waiting", 1)
    assert ("waiting for 60 s" if forgets else "waiting for 3 min") in world.decision.reason
    pass_days(world)
    world.cordoned.clear()
    world.settle(5.0)
    if not forgets:
        assert (world.phase(), world.state.counted) == ("Running", 0)


def test_a_suspended_job_that_is_resumed_without_its_node_waits_too() -> None:
    world = running(make_job(spares=0))
    world.job = make_job(spares=0, suspend=True)
    world.settle(2.0)
    world.cordoned.add("n1")
    world.job = make_job(spares=0)
    world.settle(10.0)
    pass_days(world)
    assert world.phase() == "Waiting"
    world.cordoned.clear()
    world.settle(2.0)
    assert world.phase() == "Running" and "from generation 1.10" in world.messages("Running")[-1]


def test_a_waiting_job_may_be_suspended_and_ended() -> None:
    world = running(make_job(spares=0))
    drain(world)
    world.settle(120.0)
    world.job = make_job(spares=0, suspend=True)
    world.settle(2.0)
    assert world.phase() == "Suspended" and world.agents == {}
    world.cordoned.clear()
    world.job = make_job(spares=0)
    world.settle(2.0)
    assert world.phase() == "Running"


def test_a_job_that_was_never_protected_waits_as_well() -> None:
    world = World(make_job(spares=0))
    world.settle(1.0)
    drain(world)
    pass_days(world)
    assert world.phase() == "Waiting"
    text = "Nothing was protected yet, so it starts from the beginning once"
    assert text in world.decision.reason


def test_a_wait_without_any_change_does_not_write_the_status_anew_all_the_time() -> None:
    world = running(make_job(spares=0))
    world.kill_daemon("n1")
    world.settle(120.0)
    texts = set[str]()
    for _ in range(110):
        world.now += 0.5
        texts.add(world.look().reason)
    assert len(texts) <= 2, texts


def test_the_loss_of_everything_during_the_wait_is_said_when_the_job_goes_on() -> None:
    world = running(make_job(spares=0))
    drain(world)
    world.settle(60.0)
    world.line = Line(generation=None, reason="1.10 lacks ranks [0, 1]")
    world.cordoned.clear()
    world.settle(5.0)
    assert world.condition("Failed")[1] == "NoRecoveryLine"
    assert Fail(reason=world.state.outcome_reason) in world.actions
    assert world.state.saved == Generation(1, 10)
