"""A look takes time in proportion to the number of members."""

from __future__ import annotations

import time

import pytest
from virtual_world import make_job, running

from holdfast_operator.reconciler.reconcile import reconcile

MANY, FEW = 1200, 300
RATIO_MAX = 8.0
"""Members are four times as many; work in proportion to their square would take 16 times."""


def look_s(members: int, *, lost: bool) -> float:
    """Processor time of the shortest of several looks."""
    world = running(make_job(nodes=members, spares=members // 100))
    if lost:
        for member in range(0, members, 100):
            world.kill_node(world.membership.member(member).node)
        world.settle(4.0)
        world.now += 1.5
        world.beat()
    observed, state = world.observed(), world.state
    times = []
    for _ in range(10):
        began = time.thread_time()  # a busy machine lets a look wait, which is none of its work
        decision = reconcile(world.job, observed, state, world.now)
        times.append(time.thread_time() - began)
    assert bool(decision.actions) is lost
    return min(times)


@pytest.mark.parametrize("lost", [False, True], ids=["healthy", "one percent lost"])
def test_a_look_does_not_slow_down_with_the_square_of_the_members(lost: bool) -> None:
    assert look_s(MANY, lost=lost) / look_s(FEW, lost=lost) < RATIO_MAX
