from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.elastic_experts.moving import cheapest, moves_of, renumbered, seats_after
from holdfast_core.elastic_experts.plans import (
    ExpertPlan,
    ExpertRoom,
    plan_experts,
)
from holdfast_core.job.elastic import Placement

Held = list[list[tuple[int, ...]]]
LOADS = [[9, 4, 2, 2, 1, 1], [1, 1, 1, 8, 3, 1]]
MORE = [[4, 9, 3, 6, 8, 2, 1, 8], [5, 9, 4, 4, 8, 9, 9, 8], [7, 3, 4, 3, 9, 7, 1, 2]]
"""More experts than seats, so that nodes hold different ones."""


def held_of(plan: ExpertPlan) -> Held:
    return [[layer.experts_of(rank) for layer in plan.layers] for rank in range(plan.room.ranks)]


def planned(nodes: int, nproc: int = 1, loads: list[list[int]] = LOADS) -> ExpertPlan:
    room = ExpertRoom(nodes=nodes, nproc=nproc, rank_seats=6)
    return plan_experts(loads, room, placement=Placement.RECOVERY)


def moved(plan: ExpertPlan, held: Held) -> int:
    return len(moves_of(plan, held))


@given(st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_cheapest_assignment_is_that_of_all_permutations(n: int, draw: object) -> None:
    cost = np.array([[draw.randrange(6) for _ in range(n)] for _ in range(n)])  # type: ignore[attr-defined]
    found = cheapest(cost)
    assert sorted(found) == list(range(n))
    best = min(sum(cost[i, j] for i, j in enumerate(each)) for each in permutations(range(n)))
    assert sum(cost[i, j] for i, j in enumerate(found)) == best


def test_nothing_moves_when_nothing_has_changed() -> None:
    for nproc in (1, 2):
        plan = planned(4, nproc)
        again = renumbered(plan.renewed(4 * nproc, LOADS), held_of(plan))
        assert moves_of(again, held_of(plan)) == ()
        shuffled = plan.moved_to([*range(2 * nproc, 4 * nproc), *range(2 * nproc)])
        again = renumbered(plan, held_of(shuffled))
        assert moves_of(again, held_of(shuffled)) == ()


def test_no_other_order_of_nodes_moves_fewer_experts() -> None:
    held = held_of(planned(4, loads=MORE))
    for lost in range(4):
        left = [*held[:lost], *held[lost + 1 :]]
        plan = planned(4, loads=MORE).renewed(3, [layer[::-1] for layer in MORE])
        all_orders = [moved(plan.moved_to(order), left) for order in permutations(range(3))]
        assert moved(renumbered(plan, left), left) == min(all_orders) < max(all_orders)


def test_whoever_lacks_an_expert_gets_it_once_from_a_holder_and_holders_share_the_work() -> None:
    held = held_of(planned(5))
    held = [held[0], held[2], held[4], [], []]  # two are new
    held[3] = held[4] = [(), ()]
    plan = renumbered(planned(5), held)
    found = moves_of(plan, held)
    assert len({(one.layer, one.expert, one.target) for one in found}) == len(found)
    for one in found:
        assert one.expert in held[one.source][one.layer]
        assert one.expert not in held[one.target][one.layer]
    after = [[{*of_layer} for of_layer in of_rank] for of_rank in held]
    for one in found:
        after[one.target][one.layer].add(one.expert)
    for rank, of_rank in enumerate(held_of(plan)):
        for layer, experts in enumerate(of_rank):
            assert set(experts) <= after[rank][layer]
    sent = [sum(one.source == rank for one in found) for rank in range(5)]
    alone = [0] * 5  # what only one rank can send
    for one in found:
        holders = [rank for rank in range(5) if one.expert in held[rank][one.layer]]
        alone[holders[0]] += len(holders) == 1
    assert max(sent) <= max(*alone, -(-len(found) // 3)) + 1


def test_an_expert_that_stays_keeps_its_seat() -> None:
    assert seats_after((3, 5, None, 1), (1, 2, 4)) == (2, 4, None, 1)
    assert seats_after((None, None, None), (7,)) == (7, None, None)
    assert seats_after((0, 1), ()) == (None, None)
