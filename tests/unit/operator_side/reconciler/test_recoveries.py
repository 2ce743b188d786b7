"""What the history of recoveries says was lost."""

from __future__ import annotations

from virtual_world import World, make_job

from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.views import Decision
from holdfast_operator.reconciler.report.recoveries import Recoveries


class Recorded(World):
    """A world whose recoveries are recorded."""

    def __init__(self) -> None:
        self.recoveries = Recoveries()
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
        self.recoveries.follow(seen, decision, self.now)
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
