"""What the history of recoveries says was lost."""

from __future__ import annotations

from virtual_world import World, make_job

from holdfast_core.job.recovery_story import recovery_in_words
from holdfast_core.job.status import RecoveryStatus
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.views import Decision
from holdfast_operator.reconciler.report.recoveries import Recoveries


class Recorded(World):
    """A world whose recoveries are recorded."""

    def __init__(self) -> None:
        self.recoveries = Recoveries()
        self.stories: list[str] = []
        super().__init__(make_job())
        self.settle(1.0)
        self.train(10)
        self.settle(1.0)
        self.train(14, protect=False)
        self.settle(1.0)

    def look(self) -> Decision:
        self.beat()
        seen = self.observed()
        decision = super().look()
        story = self.recoveries.follow(seen, decision, self.now)
        self.stories += [] if story is None else [story.message]
        return decision

    def lost(self) -> list[int | None]:
        return [one.lost_steps for one in self.recoveries.all]


def test_a_recovery_that_cuts_off_another_has_lost_its_steps() -> None:
    world = Recorded()
    world.sessionless = {1}
    for _ in range(2):
        world.lose_rank(2)
        world.settle(1.0)
        world.train(0, protect=False)
    world.sessionless = set()
    world.settle(1.0)
    assert world.lost() == [None, 4]


def test_steps_that_a_recovery_has_lost_are_not_those_of_the_next() -> None:
    world = Recorded()
    world.lose_rank(2)
    world.settle(1.0)
    world.train(0, protect=False)
    world.settle(1.0)
    world.lose_rank(2)
    world.settle(1.0)
    assert world.lost() == [4, 0]


def test_the_source_of_a_live_recovery_is_that_of_the_ranks_that_restored_alone() -> None:
    world = Recorded()
    world.lose_rank(1)
    world.live, world.alone = 14, {1: RestoreSource.PARITY}
    world.settle(1.0)
    (recovery,) = world.recoveries.all
    assert (recovery.source, recovery.lost_steps) == (RestoreSource.PARITY, 0)
    assert recovery.replay == "rank 1 restored step 14 alone; the others kept their state"
    assert world.messages("Running")[-1] == (
        "4 ranks train in epoch 2 from step 14, rank 1 from parity, live: no step was lost; "
        + recovery.replay
    )


def test_a_recovery_that_is_over_is_told_once_with_what_it_cost_and_what_to_do() -> None:
    world = Recorded()
    world.exit_rank(2, 139, "Segmentation fault")
    world.settle(5.0)
    [story] = world.stories
    assert story.startswith("rank 2 was killed by SIGSEGV (code 139); ")
    assert "All ranks were at work again after" in story
    assert "4 steps had to be trained again" in story
    assert story.endswith("(holdfast why, or its log on n2).")
    assert story == recovery_in_words(world.recoveries.all[-1].status)


def test_a_lack_of_memory_that_is_known_late_is_what_the_advice_is_about() -> None:
    world = Recorded()
    world.sessionless = {1}
    world.lose_rank(2)
    world.settle(1.0)
    assert world.stories == [] and world.recoveries.all[-1].advice
    world.oom_epochs[2] = 1
    world.sessionless = set()
    world.settle(5.0)
    [story] = world.stories
    assert "raise resources.limits.memory" in story.lower()


def test_a_story_that_is_too_long_for_an_event_keeps_its_end() -> None:
    found = RecoveryStatus(cause="é" * 2000, seconds=3.0, lost_steps=4, advice="Do this.")
    story = recovery_in_words(found, 1024)
    assert 1020 < len(story.encode()) <= 1024
    assert "é…. All ranks" in story and story.endswith("4 steps had to be trained again. Do this.")


def test_a_recovery_names_the_nodes_that_members_have_left() -> None:
    world = Recorded()
    world.exit_rank(2, 139, "Segmentation fault")
    world.settle(5.0)
    world.kill_node("n1")
    world.settle(10.0)
    in_place, moved = world.recoveries.all
    assert in_place.status.left_nodes is None
    assert moved.status.left_nodes == ("n1",)
