"""A look takes time in proportion to the number of members."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from virtual_world import make_job, running

from holdfast_operator.reconciler.reconcile import reconcile

MANY, FEW = 1200, 300
RATIO_MAX = 8.0
"""Members are four times as many; work in proportion to their square would take 16 times."""


def looking_at(members: int, *, lost: bool) -> Callable[[], float]:
    """Function that looks at so many members; it returns the processor time of that."""
    world = running(make_job(nodes=members, spares=members // 100))
    if lost:
        for member in range(0, members, 100):
            world.kill_node(world.membership.member(member).node)
        world.settle(4.0)
        world.now += 1.5
        world.beat()
    observed, state = world.observed(), world.state

    def look() -> float:
        began = time.thread_time()  # a busy machine lets a look wait, which is none of its work
        decision = reconcile(world.job, observed, state, world.now)
        took_s = time.thread_time() - began
        assert bool(decision.actions) is lost
        return took_s

    return look


@pytest.mark.parametrize("lost", [False, True], ids=["healthy", "one percent lost"])
def test_a_look_does_not_slow_down_with_the_square_of_the_members(lost: bool) -> None:
    """The two take turns: a core and a cache that others use as well are as slow for both."""
    many, few = looking_at(MANY, lost=lost), looking_at(FEW, lost=lost)
    pairs = [(many(), few()) for _ in range(10)]
    many_s, few_s = map(min, zip(*pairs, strict=True))
    assert many_s / few_s < RATIO_MAX
