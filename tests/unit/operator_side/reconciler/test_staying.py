"""Which members restart in a new epoch, and what people read about the workers that stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from virtual_world import World, make_job, running

from holdfast_core.exit_codes import BEGINS_ANEW
from holdfast_core.job.parsing import On
from holdfast_core.job.status import RecoveryMode
from holdfast_core.snapshots.generations import Line
from holdfast_operator.reconciler.membership.recovering import failed_parts
from holdfast_operator.reconciler.membership.staying import recovery_mode
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.lookups import live_step


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


def wide() -> World:
    """A job of two members with four ranks each that trains in epoch 1; all workers stay."""
    world = running(make_job(nodes=2, nproc=4, spares=1))
    world.following = set(range(8))
    return world


def _one_exits(world: World) -> None:
    world.exit_rank(5, 137)


def _one_is_lost(world: World) -> None:
    world.lose_rank(5)


def _two_of_a_member(world: World) -> None:
    world.lose_rank(0)
    world.lose_rank(2)


def _one_of_each(world: World) -> None:
    world.exit_rank(3, 42)
    world.exit_rank(4, 42)


def _all_of_a_member(world: World) -> None:
    for rank in range(4):
        world.exit_rank(rank, 42)


def _one_and_its_agent(world: World) -> None:
    world.exit_rank(5, 42)
    world.exit_agent(1, 1)


def _one_and_a_whole_member(world: World) -> None:
    world.exit_rank(5, 42)
    for rank in range(4):
        world.exit_rank(rank, 42)


def _node_and_a_rank_of_another(world: World) -> None:
    world.kill_node("n0")
    world.exit_rank(5, 42)


def _begins_anew(world: World) -> None:
    world.exit_rank(5, BEGINS_ANEW)


@pytest.mark.parametrize(
    ("fault", "members", "ranks", "text"),
    [
        (_one_exits, set(), {5}, "rank 5 restarts, the others' workers stay"),
        (_one_is_lost, set(), {5}, "rank 5 restarts, the others' workers stay"),
        (_two_of_a_member, set(), {0, 2}, "ranks 0, 2 restart, the others' workers stay"),
        (_one_of_each, set(), {3, 4}, "ranks 3, 4 restart, the others' workers stay"),
        (_all_of_a_member, {0}, set(), "member 0 restarts, the others' workers stay"),
        (_one_and_its_agent, {1}, set(), "member 1 restarts, the others' workers stay"),
        (
            _one_and_a_whole_member,
            {0},
            {5},
            "member 0 restarts, rank 5 restarts, the others' workers stay",
        ),
        (
            _node_and_a_rank_of_another,
            {0},
            {5},
            "spare n2 takes over, rank 5 restarts, the others' workers stay",
        ),
        (_begins_anew, {0, 1}, set(), "restart in place"),
    ],
)
def test_ranks_that_fail_restart_and_their_neighbours_stay(
    fault: Callable[[World], None], members: set[int], ranks: set[int], text: str
) -> None:
    world = wide()
    fault(world)
    world.settle(10.0)
    assert world.membership.epoch == 2
    assert world.membership.restarting == members
    assert world.membership.restarting_ranks == ranks
    assert world.messages("Recovering")[0].endswith(f"; {text} in epoch 2")
    assert len(world.state.restarts) <= 1, "a recovery counts once, however many ranks it restarts"


@pytest.mark.parametrize(
    ("idlest", "members", "ranks"),
    [((6,), set(), {6}), ((1, 2), set(), {1, 2}), ((3, 4), set(), {3}), ((), {0}, set())],
    ids=["one", "two of a member", "two of two members", "all alike"],
)
def test_a_rank_that_hangs_restarts_and_its_neighbours_stay(
    idlest: tuple[int, ...], members: set[int], ranks: set[int]
) -> None:
    world = wide()
    world.idle_s, world.idler_s = 10_000.0, dict.fromkeys(idlest, 1.0)
    world.settle(2.0)
    assert world.membership.epoch == 2
    assert world.membership.restarting == members
    assert world.membership.restarting_ranks == ranks


def test_neighbours_that_do_not_follow_are_not_promised_to_stay() -> None:
    world = wide()
    world.following = {0, 1, 2, 3}
    world.exit_rank(5, 42)
    world.look()
    assert world.membership.restarting_ranks == {5}
    assert world.messages("Recovering")[0].endswith("; restart in place in epoch 2")


def test_each_set_of_failed_parts_is_split_into_whole_members_and_ranks() -> None:
    """Enumerated: for two members of two ranks, which ranks have failed, and which as members."""
    membership = running(make_job(nodes=2, nproc=2)).membership
    subsets = [frozenset(c) for n in range(5) for c in itertools.combinations(range(4), n)]
    for ranks, whole in itertools.product(subsets, subsets[:5]):
        causes = [
            Cause(on=On.ANY, text="", member=membership.member_of(rank), ranks=frozenset({rank}))
            for rank in sorted(ranks)
        ]
        causes += [Cause(on=On.ANY, text="", member=member) for member in whole if member < 2]
        for gone in ((), (1,)):
            members, single = failed_parts(membership, causes, gone)
            for member in range(2):
                mine = set(membership.ranks_of(member))
                agentless = member in gone and bool(mine & ranks)
                assert (member in members) == (member in whole or mine <= ranks or agentless)
                assert single & mine == (set() if member in members else ranks & mine)


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


def without_line() -> World:
    """Epoch 2 of a job whose line is lost with two nodes of one parity group, before any rank knows
    what it begins from. Workers of two members have outlived the loss."""
    world = running(make_job(spares=2))
    world.following = {0, 3}
    world.undecided, world.sessionless = True, set(range(4))
    world.line = Line(generation=None, reason="1.10 lacks ranks [1, 2]")
    world.kill_node("n1")
    world.kill_node("n2")
    world.settle(90.0)
    assert world.membership.epoch == 2
    return world


def test_processes_that_have_everything_go_on_although_the_line_is_lost() -> None:
    world = without_line()
    assert world.state.outcome is None
    world.undecided, world.live, world.sessionless = False, 12, set()
    world.settle(2.0)
    assert world.state.outcome is None and world.phase() == "Running"
    assert world.state.started_from == 12
    assert world.messages("Running") == [
        "4 ranks train in epoch 2 from step 12, live: no step was lost"
    ]


def test_processes_that_lack_something_end_and_with_them_the_job() -> None:
    world = without_line()
    world.following = set()
    world.look()
    assert world.state.outcome_word == "NoRecoveryLine"
    assert "no processes are left that have everything" in world.state.outcome_reason


def test_a_rank_that_begins_from_nothing_ends_a_job_that_had_a_line() -> None:
    world = without_line()
    world.undecided = False
    world.look()
    assert world.state.outcome_word == "NoRecoveryLine"


def test_a_worker_that_is_to_restart_goes_on_with_nothing() -> None:
    world = without_line()
    assert world.membership.restarting == {1, 2}
    world.following = {1, 2}
    world.look()
    assert world.state.outcome_word == "NoRecoveryLine"


@pytest.mark.parametrize("step", [7, 13])
def test_the_live_step_is_that_of_the_epoch_whatever_the_line(step: int) -> None:
    world = running()
    world.lose_rank(1)
    world.look()
    assert live_step(world.observed(), world.membership) is None
    world.live = step
    world.look()
    assert live_step(world.observed(), world.membership) == step
    assert world.state.started_from == step
    world.live = None
    world.lose_rank(1)
    world.settle(5.0)
    assert world.membership.epoch == 3
    assert live_step(world.observed(), world.membership) is None
    assert world.state.started_from == 10
