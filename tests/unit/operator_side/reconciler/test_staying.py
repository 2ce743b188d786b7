"""Which members restart in a new epoch, and what people read about the workers that stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from virtual_world import World, make_job, running

from holdfast_core.job.status import RecoveryMode
from holdfast_operator.reconciler.staying import recovery_mode


def staying() -> World:
    """A job of four members and a spare that trains in epoch 1; the workers of all ranks stay."""
    world = running(make_job(spares=1))
    world.following = set(range(4))
    return world


def _exits(world: World) -> None:
    world.exit_rank(2, 137)


def _two_exit(world: World) -> None:
    world.exit_rank(1, 42)
    world.exit_rank(2, 42)


def _lost(world: World) -> None:
    world.lose_rank(3)


def _agent_fails(world: World) -> None:
    world.exit_agent(2, 1)


def _agent_vanishes(world: World) -> None:
    world.vanish(0)


def _agent_waits(world: World) -> None:
    world.daemons["n1"].waiting = True


def _hangs(world: World) -> None:
    world.idle_s = 10_000.0


def _node_is_lost(world: World) -> None:
    world.kill_node("n1")


def _node_is_lost_and_a_rank_exits(world: World) -> None:
    world.kill_node("n1")
    world.exit_rank(2, 42)


def _memory_is_lost(world: World) -> None:
    world.kill_daemon("n1")
    world.revive_daemon("n1", new_memory=True)


def _evicted(world: World) -> None:
    world.evict(1)


@pytest.mark.parametrize(
    ("fault", "restarting", "text"),
    [
        (_exits, {2}, "member 2 restarts, the others' workers stay"),
        (_two_exit, {1, 2}, "members 1, 2 restart, the others' workers stay"),
        (_lost, {3}, "member 3 restarts, the others' workers stay"),
        (_agent_fails, {2}, "member 2 restarts, the others' workers stay"),
        (_agent_vanishes, {0}, "member 0 restarts, the others' workers stay"),
        (_agent_waits, {1}, "member 1 restarts, the others' workers stay"),
        (_hangs, {0}, "member 0 restarts, the others' workers stay"),
        (_node_is_lost, {1}, "spare n4 takes over, the others' workers stay"),
        (
            _node_is_lost_and_a_rank_exits,
            {1, 2},
            "spare n4 takes over, member 2 restarts, the others' workers stay",
        ),
        (_memory_is_lost, {1}, "member 1 restarts, the others' workers stay"),
        (_evicted, {1}, "spare n4 takes over, the others' workers stay"),
    ],
)
def test_causes_and_members_that_move_restart_and_the_others_stay(
    fault: Callable[[World], None], restarting: set[int], text: str
) -> None:
    world = staying()
    fault(world)
    world.settle(10.0)
    assert world.membership.epoch == 2 and world.membership.restarting == restarting
    (event,) = world.messages("Recovering")
    assert event.endswith(f"; {text} in epoch 2")
    assert all(each.restarting == restarting for each in world.published if each.epoch == 2)


def test_members_that_stay_are_not_promised_where_a_rank_does_not_follow() -> None:
    world = staying()
    world.following.discard(3)
    world.exit_rank(2, 42)
    world.look()
    assert world.membership.restarting == {2}
    assert world.messages("Recovering") == [
        "rank 2 exited with code 42; restart in place in epoch 2"
    ]


def test_a_rank_that_does_not_follow_and_restarts_keeps_no_other_from_staying() -> None:
    world = staying()
    world.following.discard(2)
    world.exit_rank(2, 42)
    world.look()
    assert world.messages("Recovering")[0].endswith("the others' workers stay in epoch 2")


def test_members_that_restarted_once_are_not_restarted_by_the_next_failure() -> None:
    world = staying()
    world.exit_rank(2, 42)
    world.settle(2.0)
    world.train(20)
    world.settle(2.0)
    world.exit_rank(1, 42)
    world.settle(2.0)
    assert [(each.epoch, each.restarting) for each in world.published] == [
        (1, frozenset()),
        (2, {2}),
        (3, {1}),
    ]


def test_a_new_address_leaves_the_members_that_restart() -> None:
    world = staying()
    world.exit_rank(2, 42)
    world.settle(2.0)
    world.kill_daemon("n0")
    world.revive_daemon("n0")
    world.settle(2.0)
    assert (world.membership.epoch, world.membership.revision) == (2, 1)
    assert world.membership.restarting == {2}


def test_a_control_loop_that_forgot_everything_knows_them_again() -> None:
    world = staying()
    world.exit_rank(2, 42)
    world.settle(2.0)
    world.forget()
    world.unconnected.clear()
    world.settle(2.0)
    assert world.membership.epoch == 2 and world.membership.restarting == {2}


def test_what_a_recovery_does_is_known_once_all_follow_or_training_runs() -> None:
    world = World(make_job())
    assert recovery_mode(world.observed(), None) is None
    world.look()
    assert recovery_mode(world.observed(), world.membership) is RecoveryMode.RESTART
    world.following = {0, 1, 2}
    assert recovery_mode(world.observed(), world.membership) is RecoveryMode.RESTART
    world.following.add(3)
    assert recovery_mode(world.observed(), world.membership) is RecoveryMode.IN_PLACE
    world.lose_rank(1)
    assert recovery_mode(world.observed(), world.membership) is None
