"""How many nodes a job lacks."""

from __future__ import annotations

import pytest
from virtual_world import World, make_job


def missing(world: World) -> int:
    return world.decision.shortage.count


def test_a_job_that_is_placed_lacks_nothing() -> None:
    world = World(make_job(spares=0))
    world.settle(30.0)
    assert missing(world) == 0


@pytest.mark.parametrize("closed", [1, 2, 4])
def test_a_job_lacks_what_it_cannot_be_placed_on(closed: int) -> None:
    world = World(make_job(spares=0), nodes=4)
    world.cordoned |= {f"n{index}" for index in range(closed)}
    world.settle(30.0)
    assert missing(world) == closed
    assert world.decision.shortage.beside == tuple(f"n{index}" for index in range(closed, 4))
    world.cordoned.clear()
    world.settle(30.0)
    assert missing(world) == 0


def test_a_suspended_job_lacks_nothing() -> None:
    world = World(make_job(spares=0, suspend=True), nodes=2)
    world.settle(30.0)
    assert missing(world) == 0
