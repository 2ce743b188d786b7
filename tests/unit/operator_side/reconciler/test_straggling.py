"""A slow rank is reported, counts against its node, and moves if the job asks for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from virtual_world import WALL, World, make_job, running

from holdfast_core.node_failures import REPEAT_S, FailureKind, NodeFailure
from holdfast_core.stragglers import ROUNDS, Cause, StepTimes
from holdfast_operator.reconciler.observe.stragglers import COOL_DOWN_S


def train(
    world: World,
    rounds: int,
    *slow: int,
    began: int = 0,
    protect: bool = True,
    silent: Collection[int] = (),
) -> None:
    """Let ranks train for some rounds, in each of which all others wait for the `slow` ones; the
    `silent` ones report no times."""
    for number in range(began + 1, began + rounds + 1):
        world.times = {
            rank: StepTimes(
                window=number,
                steps=10,
                step_s=0.13 if slow else 0.1,
                own_s=0.13 if rank in slow else 0.1,
                wait_s=0.03 if slow and rank not in slow else 0.0,
                processor_s=0.13 if rank in slow else 0.1,
            )
            for rank in range(world.job.world_size)
            if rank not in silent
        }
        world.train(world.step + 10, protect=protect)
        world.look()
        world.now += 1.0


def kinds(world: World) -> dict[str, list[str]]:
    return {node: [each.kind.value for each in found] for node, found in world.record.items()}


def job_that(action: str = "Report", **more: Any) -> World:
    return running(make_job(onStraggler=action, **more))


def test_a_slow_rank_is_reported_once_and_counts_against_its_node_once() -> None:
    world = running()
    train(world, ROUNDS - 1, 2)
    assert world.messages("Straggler") == []
    train(world, 3 * ROUNDS, 2, began=ROUNDS)
    (text,) = world.messages("Straggler")
    assert text == (
        "rank 2 of member 2 on n2 is slow: it works 130 ms in each step, its peers 100 ms, and "
        "they wait for it; it computes for longer"
    )
    assert kinds(world) == {"n2": ["Straggling"]} and world.membership.epoch == 1
    (slow,) = world.state.straggling.stragglers
    assert (slow.rank, slow.cause) == (2, Cause.COMPUTE)


def test_a_rank_that_keeps_pace_again_is_a_straggler_no_more() -> None:
    world = running()
    train(world, ROUNDS + 1, 2)
    train(world, ROUNDS, began=50)
    assert world.state.straggling.stragglers == ()
    assert world.messages("StragglerPassed") == ["rank 2 no longer holds up the others"]
    train(world, ROUNDS + 1, 2, began=100)
    assert len(world.messages("Straggler")) == 2
    assert kinds(world) == {"n2": ["Straggling"]}


def test_slow_ranks_on_two_nodes_count_against_neither() -> None:
    world = running(make_job(8, onStraggler="Replace"))
    train(world, ROUNDS + 3, 2, 5)
    assert len(world.messages("Straggler")) == 1 and "; rank 5" in world.messages("Straggler")[0]
    assert kinds(world) == {} and world.membership.epoch == 1


@pytest.mark.parametrize("action", ["Report", "Replace"])
def test_the_first_of_two_slow_nodes_is_not_to_blame(action: str) -> None:
    world = running(make_job(8, onStraggler=action))
    train(world, 1, 2)
    train(world, 2 * ROUNDS, 2, 5, began=10)
    assert len(world.messages("Straggler")) == 2
    assert kinds(world) == {} and world.membership.epoch == 1


@pytest.mark.parametrize("action", ["Report", "Replace"])
def test_a_node_is_blamed_once_the_other_keeps_pace(action: str) -> None:
    world = running(make_job(8, onStraggler=action))
    train(world, 2, 2)
    train(world, ROUNDS - 2, 2, 5, began=10)
    assert kinds(world) == {} and len(world.messages("Straggler")) == 1
    train(world, 1, 2, began=20)
    assert kinds(world) == {"n2": ["Straggling"]}
    assert world.membership.epoch == (2 if action == "Replace" else 1)


def test_nodes_that_were_slow_together_are_not_blamed_one_after_the_other() -> None:
    world = running(make_job(8, onStraggler="Replace"))
    train(world, ROUNDS, 2, 5)
    train(world, 1, 2, began=10)
    train(world, 2 * ROUNDS, began=20)  # rank 5 is forgiven a round before rank 2
    assert len(world.messages("StragglerPassed")) == 2
    assert kinds(world) == {} and world.membership.epoch == 1


def test_a_node_that_is_slow_before_and_after_a_restart_counts_once() -> None:
    world = running()
    train(world, ROUNDS, 2)
    world.restart()
    world.now += 2 * REPEAT_S
    world.settle(2.0)
    train(world, ROUNDS + 1, 2, began=50)
    assert len(world.messages("Straggler")) == 2 and world.membership.epoch == 1
    assert kinds(world) == {"n2": ["Straggling"]}


def test_a_rank_without_times_is_not_said_to_keep_pace() -> None:
    world = running()
    train(world, ROUNDS, 2)
    train(world, 2 * ROUNDS, began=50, silent={2})
    assert world.messages("StragglerPassed") == []
    train(world, ROUNDS, began=100)
    assert world.messages("StragglerPassed") == ["rank 2 no longer holds up the others"]


@pytest.mark.parametrize("action", ["Report", "Replace"])
def test_a_job_with_missing_members_blames_and_moves_nobody(action: str) -> None:
    """Its ranks may have parts of a batch that differ."""
    world = running(make_job(5, spares=1, onStraggler=action, spec={"minNodes": 3}))
    world.kill_node("n5")
    world.settle(20.0)
    world.kill_node("n4")
    world.settle(60.0)
    assert len(world.membership.members) == 4 and world.phase() == "Running"
    world.revive_daemon("n5")
    world.record, epoch = {}, world.membership.epoch
    train(world, ROUNDS, 2)
    assert len(world.messages("Straggler")) == 1
    assert kinds(world) == {} and world.membership.epoch == epoch


def test_a_member_that_is_slow_wherever_it_is_counts_against_no_node_whichever_rank() -> None:
    world = running(make_job(nproc=4))
    train(world, ROUNDS, 8)
    assert world.rating("n2").score > 0
    world.kill_node("n2")
    world.settle(20.0)
    world.record = {node: found for node, found in world.record.items() if node != "n4"}
    assert world.nodes_of_members()[2] == "n4"
    world.train(50)
    train(world, ROUNDS + 1, 9, began=50)
    assert "Straggling" in kinds(world)["n4"] and world.rating("n4").score == 0.0


def test_a_job_may_ignore_them() -> None:
    world = job_that("Ignore")
    train(world, 3 * ROUNDS, 2)
    assert world.events == [] and kinds(world) == {} and not world.state.straggling.windows


@pytest.mark.parametrize("action", ["Report", "Replace"])
def test_an_undisturbed_job_sees_none_of_it(action: str) -> None:
    world = job_that(action)
    train(world, 100)
    assert world.events == [] and world.membership.epoch == 1


def test_a_rank_that_is_slow_wherever_it_is_counts_against_no_node() -> None:
    world = running()
    train(world, ROUNDS + 1, 2)
    assert world.rating("n2").score > 0
    world.kill_node("n2")
    world.settle(20.0)
    world.record = {node: found for node, found in world.record.items() if node != "n4"}
    assert world.nodes_of_members()[2] == "n4"
    world.train(50)
    train(world, ROUNDS + 1, 2, began=50)
    assert "Straggling" in kinds(world)["n4"]
    assert world.rating("n4").score == 0.0 and world.rating("n2").text.startswith("1 failure ")


# --- Replace --------------------------------------------------------------------------------------


def test_its_member_moves_to_a_spare_right_after_a_generation_was_protected() -> None:
    world = job_that("Replace")
    world.following = set(range(4))
    train(world, ROUNDS + 3, 2, protect=False)
    assert len(world.messages("Straggler")) == 1 and world.membership.epoch == 1
    train(world, 1, 2, began=50)
    assert world.membership.epoch == 2
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    (text,) = world.messages("Recovering")
    assert text.startswith("rank 2 of member 2 on n2 is slow: ")
    assert "spare n4 takes over" in text and text.endswith("the others' workers stay in epoch 2")
    assert world.membership.restarting == {2}
    assert world.state.counted == 0 and world.state.recoveries == 1


def test_a_member_that_is_slow_elsewhere_too_stays_and_its_new_node_is_not_blamed() -> None:
    world = job_that("Replace", spares=2)
    train(world, ROUNDS + 1, 2)
    assert world.membership.epoch == 2
    world.settle(2.0)
    world.now += 2 * COOL_DOWN_S
    train(world, 3 * ROUNDS, 2, began=50)
    assert world.membership.epoch == 2 and kinds(world) == {"n2": ["Straggling"]}
    assert world.messages("Straggler")[-1].endswith(
        "member 2 was slow on another node, too, and stays on this one"
    )


def test_only_one_member_moves_in_a_while_however_the_control_loop_restarts() -> None:
    world = job_that("Replace", spares=3)
    train(world, ROUNDS + 1, 2)
    assert world.membership.epoch == 2
    world.restart()
    world.now += COOL_DOWN_S / 2
    world.settle(2.0)
    train(world, 2 * ROUNDS, 1, began=50)
    assert world.membership.epoch == 2 and "rank 1 " in world.messages("Straggler")[-1]
    world.now += COOL_DOWN_S / 2
    world.settle(2.0)
    train(world, 2 * ROUNDS, 1, began=100)
    assert world.membership.epoch == 3 and world.nodes_of_members()[1] not in {"n1", "n2"}


def stays(world: World) -> bool:
    train(world, 3 * ROUNDS, 2)
    assert len(world.messages("Straggler")) == 1
    return world.membership.epoch == 1 and world.nodes_of_members()[2] == "n2"


def test_nothing_moves_without_a_spare() -> None:
    assert stays(job_that("Replace", spares=0))


def test_a_job_that_may_shrink_keeps_a_slow_member_rather_than_none() -> None:
    assert stays(running(make_job(spares=0, onStraggler="Replace", spec={"minNodes": 2})))


def test_nothing_moves_to_a_node_that_failed_itself() -> None:
    world = job_that("Replace")
    lost = NodeFailure(kind=FailureKind.LOST_RANK, job="team.other", epoch=1, at=WALL + world.now)
    world.record = {"n4": (lost,)}
    assert stays(world)


def test_nothing_moves_while_the_parity_group_could_not_rebuild_it() -> None:
    world = job_that("Replace")
    world.busy["n1"] = "rebuilding"
    assert stays(world)


def test_a_failure_goes_first() -> None:
    world = job_that("Replace")
    train(world, ROUNDS - 1, 2)
    world.lose_rank(0)
    train(world, 1, 2, began=50)
    world.settle(2.0)
    assert world.membership.epoch == 2 and world.nodes_of_members()[2] == "n2"
