"""Replicas that differ: the wrong rank is named, counts against its node, and moves if it shall."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace
from virtual_world import World, make_job, running

from holdfast_core.corruption import Divergence, Proof
from holdfast_operator.reconciler.observe.corruption import PAUSE_S
from holdfast_operator.reconciler.observe.views import PublishMembership
from holdfast_operator.reconciler.reconcile import reconcile

FOUND = Divergence(
    step=41,
    equal_step=40,
    unit="layer2/dense",
    ranks=(0, 1, 2, 3),
    wrong=(2,),
    proof=Proof.MAJORITY,
    compared_all=True,
)
PAIR = replace(FOUND, ranks=(0, 2), wrong=(), proof=Proof.NONE)
AGAIN = replace(PAIR, wrong=(2,), proof=Proof.REPEATED)
UNDECIDED = replace(PAIR, proof=Proof.UNDECIDED)
COMPARES_ALL = {"snapshot": {"compareReplicasEvery": 1}}


def job_that(action: str = "Replace", **more: Any) -> World:
    return running(make_job(onCorruption=action, spec=COMPARES_ALL, **more), step=40)


def conclude(
    world: World, found: Divergence | None, *, ranks: Collection[int] | None = None
) -> None:
    """Let the ranks report what they conclude, and the control loop act; after another epoch has
    begun, they have nothing to report."""
    ranks = range(world.job.world_size) if ranks is None else ranks
    epoch = world.membership.epoch
    world.divergences = {} if found is None else dict.fromkeys(ranks, found)
    world.look()
    if world.membership.epoch != epoch:
        world.divergences = {}
    world.settle(1.0)


def resume(world: World, step: int = 60) -> None:
    """Let all ranks train again."""
    world.train(step, protect=True)
    world.settle(1.0)


def kinds(world: World) -> dict[str, list[str]]:
    return {node: [each.kind.value for each in found] for node, found in world.record.items()}


def test_the_wrong_rank_is_named_once_and_its_node_counts_once() -> None:
    world = job_that("Report")
    for _ in range(3):
        conclude(world, FOUND)
    (text,) = world.messages("Corruption")
    assert text == (
        "rank 2 of member 2 on n2 has wrong bytes of layer2/dense after step 41: most of its "
        "replicas have others, which are the same; they were equal after step 40, 1 step before; "
        "failurePolicy.onCorruption is Report, so training goes on and nothing is saved"
    )
    assert kinds(world) == {"n2": ["Corruption"]} and world.membership.epoch == 1
    last = world.state.corruption
    assert last is not None and (last.member, last.node, last.ranks) == (2, "n2", (2,))
    assert world.state.corruptions == 1


def test_all_ranks_go_back_and_the_member_with_wrong_bytes_moves_to_the_spare() -> None:
    world = job_that()
    conclude(world, FOUND)
    membership = world.membership
    assert membership.epoch == 2 and membership.restarting == {0, 1, 2, 3}
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    (text,) = world.messages("Recovering")
    assert text.startswith("rank 2 of member 2 on n2 has wrong bytes") and "n4" in text
    assert world.state.counted == 0, "it does not count as a restart"
    assert kinds(world) == {"n2": ["Corruption"]}


def test_no_process_stays_because_wrong_values_have_reached_all_of_them() -> None:
    world = job_that()
    world.following = {0, 1, 2, 3}
    conclude(world, FOUND)
    assert world.membership.restarting == {0, 1, 2, 3}


def test_without_a_spare_all_ranks_go_back_where_they_are() -> None:
    world = job_that(spares=0)
    conclude(world, FOUND)
    assert world.membership.epoch == 2 and world.membership.restarting == {0, 1, 2, 3}
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]


def test_a_node_that_is_lost_at_the_same_time_keeps_nobody_in_the_wrong_state() -> None:
    world = job_that(spares=2)
    world.following = {0, 1, 2, 3}
    world.kill_node("n1")
    world.now += 3.0
    world.divergences = dict.fromkeys(range(4), FOUND)
    world.settle(10.0)
    begun = next(each for each in world.published if each.epoch == 2)
    assert begun.restarting == {0, 1, 2, 3}
    assert "n1" not in {member.node for member in begun.members}
    assert any("has wrong bytes" in text for text in world.messages("Recovering"))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_crashes_at_the_same_time_keeps_nobody_on_the_wrong_node(rank: int) -> None:
    """Memory that is bad ends ranks as well."""
    world = job_that()
    world.exit_rank(rank, 139)
    conclude(world, FOUND)
    assert world.membership.restarting == {0, 1, 2, 3}
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert "rank 2 of member 2 on n2 has wrong bytes" in world.messages("Recovering")[0]


def test_a_job_loses_one_node_in_a_day_however_often_its_replicas_differ() -> None:
    """Training that is not deterministic: its replicas drift apart again and again."""
    world = job_that(spares=3)
    conclude(world, FOUND)
    for drift in range(5):
        resume(world)
        wrong = replace(FOUND, step=60 + drift, equal_step=50 + drift, wrong=(drift % 4,))
        conclude(world, wrong)
    assert world.membership.epoch == 2
    assert len(world.messages("Corruption")) == 6
    assert "went back for that within the last day" in world.messages("Corruption")[-1]
    scores = {node: world.rating(node).score for node in world.daemons}
    assert set(scores.values()) == {0.0}, "what differs on many nodes counts against none"
    world.now += PAUSE_S
    resume(world)
    conclude(world, replace(FOUND, step=90, equal_step=80, wrong=(0,)))
    assert world.membership.epoch == 3


@pytest.mark.parametrize("restarts", [False, True])
def test_of_two_replicas_both_repeat_the_steps_and_then_the_wrong_one_moves(
    restarts: bool,
) -> None:
    world = job_that()
    conclude(world, PAIR)
    (text,) = world.messages("Corruption")
    assert "one of rank 0 of member 0 on n0, rank 2 of member 2 on n2 has wrong bytes" in text
    assert "go back to the newest generation and repeat the steps" in text
    assert world.membership.epoch == 2 and kinds(world) == {}
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    if restarts:
        world.restart()
        world.settle(1.0)
    resume(world)
    conclude(world, AGAIN)
    assert world.membership.epoch == 3 and world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert kinds(world) == {"n2": ["Corruption"]}
    assert world.state.corruptions == 1
    resume(world, 80)
    conclude(world, replace(PAIR, step=81, equal_step=80))
    conclude(world, replace(AGAIN, step=81, equal_step=80))
    assert world.membership.epoch == 3, "one node in a day"


@pytest.mark.parametrize("drained", [True, False])
def test_nobody_moves_or_joins_where_the_same_steps_are_to_be_repeated(drained: bool) -> None:
    """A member that moves has no digests of the first time, and another world has other sums."""
    world = running(
        make_job(onCorruption="Replace", spec={**COMPARES_ALL, "minNodes": 3}, spares=0), step=40
    )
    world.kill_node("n1")
    world.settle(60.0)
    assert [member.index for member in world.membership.members] == [0, 2, 3]
    resume(world)
    epoch = world.membership.epoch
    world.revive_daemon("n1", new_memory=True)
    world.gone.discard("n1")
    if drained:
        world.notices["n2"] = "it is drained"
    else:
        world.settle(2.0)
        assert world.agent_waits("n1"), "a member is ready to join"
    world.divergences = dict.fromkeys(
        (0, 2, 3), replace(PAIR, step=61, equal_step=60, ranks=(0, 1))
    )
    world.train(61, protect=False)
    world.look()
    assert world.membership.epoch == epoch + 1
    assert world.nodes_of_members() == ["n0", "n2", "n3"]
    assert world.membership.restarting == {0, 2, 3}


def test_where_repeated_steps_show_nothing_the_job_goes_on_and_nobody_is_blamed() -> None:
    world = job_that()
    conclude(world, PAIR)
    resume(world)
    conclude(world, UNDECIDED)
    assert world.membership.epoch == 2 and kinds(world) == {}
    assert "a device is wrong in the same way each time" in world.messages("Corruption")[-1]
    resume(world, 80)
    conclude(world, replace(PAIR, step=81, equal_step=80))
    assert world.membership.epoch == 2


def test_ranks_of_several_members_count_against_nobody_and_nobody_moves() -> None:
    world = job_that(nodes=6)
    both = replace(FOUND, ranks=tuple(range(6)), wrong=(1, 2))
    conclude(world, both)
    assert kinds(world) == {} and world.nodes_of_members() == [f"n{i}" for i in range(6)]
    assert world.membership.epoch == 2, "all go back from what nobody can trust"
    assert (
        "rank 1 of member 1 on n1, rank 2 of member 2 on n2 have wrong bytes"
        in (world.messages("Corruption")[0])
    )


def test_ranks_of_one_member_are_one_node() -> None:
    world = job_that(nodes=3, nproc=2)
    conclude(world, replace(FOUND, ranks=tuple(range(6)), wrong=(2, 3)))
    assert kinds(world) == {"n1": ["Corruption"]}
    assert world.nodes_of_members() == ["n0", "n3", "n2"]


def test_world_ranks_are_those_of_the_members_that_are_left() -> None:
    world = running(make_job(onCorruption="Report", spec={**COMPARES_ALL, "minNodes": 3}, spares=0))
    world.kill_node("n1")
    world.settle(60.0)
    assert [member.index for member in world.membership.members] == [0, 2, 3]
    resume(world)
    world.divergences = dict.fromkeys((0, 2, 3), replace(FOUND, ranks=(0, 1, 2), wrong=(1,)))
    world.look()
    assert world.messages("Corruption")[0].startswith("rank 2 of member 2 on n2 has wrong bytes")


def test_where_the_generations_may_be_wrong_nothing_goes_back_to_them() -> None:
    world = job_that()
    conclude(world, replace(FOUND, compared_all=False))
    assert world.membership.epoch == 1
    assert "the script does not compare every save" in world.messages("Corruption")[0]


@pytest.mark.parametrize("ranks", [[2], [0, 1]])
def test_what_no_majority_of_the_ranks_reports_is_not_taken(ranks: list[int]) -> None:
    """A single rank may state anything."""
    world = job_that()
    conclude(world, FOUND, ranks=ranks)
    assert world.messages("Corruption") == [] and world.membership.epoch == 1


def test_steps_are_not_repeated_before_both_candidates_have_reported_their_digests() -> None:
    world = job_that()
    conclude(world, PAIR, ranks=[0, 1, 3])
    assert world.messages("Corruption") == [] and world.membership.epoch == 1
    conclude(world, PAIR)
    assert world.membership.epoch == 2


def test_ranks_that_are_not_in_the_world_are_nonsense() -> None:
    world = job_that()
    conclude(world, replace(FOUND, wrong=(4,)))
    conclude(world, replace(PAIR, ranks=(0, 999)))
    assert world.messages("Corruption") == [] and world.membership.epoch == 1


@pytest.mark.parametrize("action", ["Report", "Replace"])
def test_a_control_loop_that_starts_again_tells_and_does_nothing_twice(action: str) -> None:
    world = job_that(action)
    conclude(world, FOUND)
    epoch = world.membership.epoch
    if action == "Report":
        world.restart()
        world.settle(1.0)
        conclude(world, FOUND)
    else:
        resume(world)
        world.restart()
        world.settle(1.0)
        conclude(world, replace(FOUND, step=70))
    assert world.membership.epoch == epoch
    assert len(world.messages("Corruption")) == (1 if action == "Report" else 2)
    assert world.state.corruption is not None and world.state.corruption.member == 2
    assert set(map(tuple, kinds(world).values())) == {("Corruption",)}


@pytest.mark.parametrize("saves", [True, False])
def test_a_divergence_that_is_over_is_not_undone_when_the_day_is(saves: bool) -> None:
    world = job_that()
    conclude(world, FOUND)
    resume(world)
    conclude(world, replace(FOUND, step=70, equal_step=69, wrong=(1,)))
    world.train(5000, protect=saves)
    conclude(world, None)
    world.now += PAUSE_S
    world.train(5001, protect=saves)
    world.settle(1.0)
    assert world.membership.epoch == 2


def test_a_divergence_that_goes_on_is_undone_after_the_day_as_the_event_says() -> None:
    world = job_that()
    conclude(world, FOUND)
    resume(world)
    drift = replace(PAIR, step=70, equal_step=69)
    conclude(world, drift)
    assert (
        "and do so again after it if these replicas still differ"
        in (world.messages("Corruption")[-1])
    )
    world.now += PAUSE_S
    world.train(90, protect=False)
    world.settle(1.0)
    assert world.membership.epoch == 3


def test_a_person_who_asks_for_returns_later_undoes_nothing_that_is_over() -> None:
    world = job_that("Report")
    conclude(world, FOUND)
    resume(world)
    conclude(world, None)
    world.job = job_that().job
    world.settle(1.0)
    assert world.membership.epoch == 1


def test_replicas_that_were_saved_equal_since_have_nothing_to_undo() -> None:
    """The report of a rank is older than what its daemon has sealed since."""
    world = job_that()
    world.train(42, protect=True)
    conclude(world, PAIR)
    assert world.membership.epoch == 1
    (text,) = world.messages("Corruption")
    assert text.endswith("the replicas are equal again, so training goes on")
    resume(world)
    conclude(world, None)
    conclude(world, replace(PAIR, step=70, equal_step=69))
    assert world.membership.epoch == 2, "the return of this day is not used up"


@pytest.mark.parametrize("proof", [Proof.MAJORITY, Proof.REPEATED])
def test_a_return_that_was_stored_but_not_published_is_finished(proof: Proof) -> None:
    world = job_that()
    found = FOUND
    if proof is Proof.REPEATED:
        conclude(world, PAIR)
        resume(world)
        found = AGAIN
    published = len(world.published)
    world.divergences = dict.fromkeys(range(4), found)
    decision = reconcile(world.job, world.observed(), world.state, world.now)
    assert any(isinstance(action, PublishMembership) for action in decision.actions)
    world.state = decision.state
    world.restart()
    world.settle(1.0)
    assert len(world.published) == published + 1
    assert world.membership.restarting == {0, 1, 2, 3}
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.state.counted == 0


def test_steps_that_were_repeated_for_another_reason_move_the_wrong_member_as_well() -> None:
    """The rank was lost before both candidates had reported."""
    world = job_that()
    conclude(world, PAIR, ranks=[0, 1, 3])
    world.divergences = {}
    world.lose_rank(1)
    world.settle(5.0)
    assert world.membership.epoch == 2
    resume(world)
    conclude(world, AGAIN)
    assert world.membership.epoch == 3 and world.nodes_of_members() == ["n0", "n1", "n4", "n3"]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_member_whose_group_cannot_bear_its_move_yet_moves_once_it_can(repeated: bool) -> None:
    world = job_that(spares=2)
    world.protects = False
    world.kill_node("n1")
    world.settle(30.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"], "n4 is not filled yet"
    world.train(41, protect=False)
    if repeated:
        conclude(world, PAIR)
        world.train(41, protect=False)
    conclude(world, AGAIN if repeated else FOUND)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]
    assert world.membership.restarting == {0, 1, 2, 3}
    epoch = world.membership.epoch
    resume(world)
    assert world.membership.epoch == epoch + 1
    assert world.nodes_of_members() == ["n0", "n4", "n5", "n3"]
    assert "member 2 is on n2, where a rank had wrong bytes" in world.messages("Recovering")[-1]
    resume(world, 80)
    assert world.membership.epoch == epoch + 1


def test_a_member_moves_once_there_is_a_spare() -> None:
    world = job_that()
    world.cordoned.add("n4")
    conclude(world, FOUND)
    resume(world)
    assert world.membership.epoch == 2 and world.nodes_of_members()[2] == "n2"
    world.cordoned.clear()
    resume(world, 70)
    assert world.membership.epoch == 3 and world.nodes_of_members()[2] == "n4"
    assert world.state.counted == 0


def test_a_node_with_wrong_bytes_is_no_spare_while_there_is_another() -> None:
    world = job_that(spares=3)
    conclude(world, FOUND)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    world.now += PAUSE_S
    resume(world)
    conclude(world, replace(FOUND, step=70, equal_step=69, wrong=(1,)))
    assert world.rating("n2").score == 0.0, "the record of the cluster excuses both"
    assert world.nodes_of_members() == ["n0", "n5", "n4", "n3"]
    resume(world, 80)
    world.kill_node("n3")
    world.settle(30.0)
    assert world.nodes_of_members() == ["n0", "n5", "n4", "n6"]


def test_a_node_with_wrong_bytes_is_better_than_none_until_there_is_another() -> None:
    world = job_that(spares=2)
    conclude(world, FOUND)
    resume(world)
    world.cordoned.add("n5")
    world.kill_node("n0")
    world.settle(30.0)
    assert world.nodes_of_members() == ["n2", "n1", "n4", "n3"]
    world.cordoned.clear()
    resume(world, 80)
    assert world.nodes_of_members() == ["n5", "n1", "n4", "n3"]


def test_equal_replicas_raise_no_alarm() -> None:
    world = job_that()
    for step in range(50, 200, 10):
        world.train(step)
        conclude(world, None)
    assert world.messages("Corruption") == [] and world.record == {}
    assert world.state.corruption is None and world.membership.epoch == 1


# --- steps that are executed again in place -------------------------------------------------------

COMPUTED = Divergence(
    step=41,
    equal_step=31,
    unit="layer2/dense",
    ranks=(2,),
    wrong=(2,),
    proof=Proof.REEXECUTED,
    compared_all=True,
)
CHANGED = replace(COMPUTED, proof=Proof.CHANGED)
ELSEWHERE = replace(COMPUTED, proof=Proof.ELSEWHERE)
UNREPEATABLE = replace(COMPUTED, ranks=(0, 1, 2, 3), wrong=(), proof=Proof.UNREPEATABLE)


def test_a_rank_that_computed_wrongly_once_is_named_and_nobody_goes_back() -> None:
    world = job_that("Report")
    for _ in range(3):
        conclude(world, COMPUTED)
    (text,) = world.messages("Corruption")
    assert text == (
        "rank 2 of member 2 on n2 computed wrong gradients of layer2/dense in step 41: all ranks "
        "computed them three times, two of which were equal on every rank, and in the third the "
        "difference began there; the last check that found nothing was in step 31, 10 steps "
        "before; training goes on with what two executions agree on"
    )
    assert kinds(world) == {"n2": ["Corruption"]} and world.membership.epoch == 1
    resume(world)
    assert world.membership.epoch == 1 and world.state.corruptions == 1


def test_its_member_moves_after_a_generation_is_protected_and_one_does_in_a_day() -> None:
    world = job_that(spares=2)
    conclude(world, COMPUTED)
    assert world.membership.epoch == 1, "nothing has to be undone"
    assert "moves once a generation is protected" in world.messages("Corruption")[0]
    resume(world)
    assert world.membership.epoch == 2
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    resume(world, 80)
    conclude(world, replace(COMPUTED, step=81, ranks=(1,), wrong=(1,)))
    resume(world, 100)
    assert world.membership.epoch == 2, "a second node within the day stays"
    assert world.messages("Corruption")[-1].endswith("what two executions agree on")


@pytest.mark.parametrize("policy", ["Report", "Replace"])
def test_a_device_that_is_wrong_each_time_is_named_and_nobody_goes_back(policy: str) -> None:
    """The newest generation may be wrong, too."""
    world = job_that(policy)
    for _ in range(3):
        conclude(world, ELSEWHERE)
    (text,) = world.messages("Corruption")
    assert text.startswith(
        "rank 2 of member 2 on n2 computes wrongly: in step 41 it got other bytes than two ranks "
        "of the same kind for the same sample of work, one operation or an optimizer's step of one "
        "parameter, and the same each time; the last check that found nothing was in step 31, 10 "
        "steps before; training goes on, and keeps what was computed wrongly since then"
    )
    assert kinds(world) == {"n2": ["Corruption"]} and world.membership.epoch == 1
    resume(world)
    moved = policy == "Replace"
    assert world.membership.epoch == 1 + moved
    assert world.nodes_of_members() == ["n0", "n1", "n4" if moved else "n2", "n3"]


def test_of_two_devices_that_differ_each_time_neither_is_blamed() -> None:
    world = job_that()
    conclude(world, replace(ELSEWHERE, equal_step=None, ranks=(0, 1), wrong=()))
    (text,) = world.messages("Corruption")
    assert text.startswith(
        "one of rank 0 of member 0 on n0, rank 1 of member 1 on n1 computes wrongly: in step 41 "
        "they got different bytes"
    )
    assert "no third rank of their kind could decide" in text
    assert "no check in this epoch found nothing before" in text
    resume(world)
    assert kinds(world) == {} and world.membership.epoch == 1


def test_memory_that_changed_is_undone_as_other_wrong_bytes_are() -> None:
    world = job_that()
    conclude(world, CHANGED)
    assert world.membership.epoch == 2 and world.membership.restarting == {0, 1, 2, 3}
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    (text,) = world.messages("Corruption")
    assert text.startswith("rank 2 of member 2 on n2 has wrong bytes of layer2/dense: they changed")


@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("found", [CHANGED, FOUND])
def test_a_fault_that_left_nothing_keeps_nobody_from_going_back_later(
    found: Divergence, spares: int
) -> None:
    """A device that is bad gives both."""
    world = job_that(spares=spares)
    conclude(world, COMPUTED)
    resume(world)
    epoch = world.membership.epoch
    resume(world, 80)
    conclude(world, replace(found, step=81, ranks=(0, 1), wrong=(1,)))
    assert world.membership.epoch == epoch + 1
    assert "all ranks go back" in world.messages("Corruption")[-1]


def test_an_old_finding_does_not_count_again_after_replicas_that_differed() -> None:
    world = job_that("Report")
    conclude(world, COMPUTED)
    conclude(world, replace(FOUND, step=60))
    conclude(world, COMPUTED)
    assert len(world.messages("Corruption")) == world.state.corruptions == 2
    assert world.state.corruption is not None and world.state.corruption.step == 60


def test_training_that_cannot_be_repeated_is_told_once_and_blames_nobody() -> None:
    world = job_that()
    for _ in range(3):
        conclude(world, UNREPEATABLE)
    (text,) = world.messages("StepsNotRepeated")
    assert text.startswith("no step is executed again in this epoch: training is not deterministic")
    assert world.state.steps_not_repeated == text
    assert world.messages("Corruption") == [] and kinds(world) == {}
    assert world.state.corruption is None and world.membership.epoch == 1
    world.lose_rank(1)
    world.divergences = {}
    resume(world)
    assert world.membership.epoch == 2 and world.state.steps_not_repeated == ""


def test_of_several_ranks_that_may_have_computed_wrongly_none_is_blamed() -> None:
    world = job_that()
    conclude(world, replace(COMPUTED, ranks=(1, 2), wrong=()))
    (text,) = world.messages("Corruption")
    assert text.startswith("rank 1 of member 1 on n1, rank 2 of member 2 on n2 had wrong gradients")
    assert "or in a sum that other ranks had added up" in text
    resume(world)
    assert kinds(world) == {} and world.membership.epoch == 1
