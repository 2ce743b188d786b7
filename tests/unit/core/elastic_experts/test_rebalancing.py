"""When another plan for the same ranks is worth its moves."""

from __future__ import annotations

import pytest

from holdfast_core.elastic_experts.moving import ExpertMove, moves_of, renumbered
from holdfast_core.elastic_experts.plans import ExpertPlan, ExpertRoom, plan_experts
from holdfast_core.elastic_experts.rebalancing import (
    MOVE_BYTES_S,
    MOVE_S,
    Rebalancing,
    rank_loads,
    weigh,
)

EXPERTS, LAYERS = 4, 2
ROOM = ExpertRoom(nodes=4, rank_seats=3)
EVEN = plan_experts([[1] * EXPERTS] * LAYERS, ROOM)
SKEWED = [[9, 1, 1, 1], [1, 1, 1, 9]]


def held_in(plan: ExpertPlan) -> list[list[tuple[int, ...]]]:
    return [[layer.experts_of(rank) for layer in plan.layers] for rank in range(ROOM.ranks)]


def moved(loads: list[list[int]]) -> tuple[ExpertPlan, tuple[ExpertMove, ...]]:
    """The plan for other loads, and its moves from the even one."""
    plan = renumbered(EVEN.renewed(ROOM.ranks, loads), held_in(EVEN))
    return plan, moves_of(plan, held_in(EVEN))


def weighed(loads: list[list[int]], *, expert_bytes: int = 0, steps: int = 200) -> Rebalancing:
    plan, moves = moved(loads)
    return weigh(EVEN, plan, moves, expert_bytes=expert_bytes, step_s=1.0, steps=steps)


def test_a_rank_takes_the_tokens_of_its_copies() -> None:
    plan, _ = moved(SKEWED)
    for at, tokens in enumerate(SKEWED):
        loads = rank_loads(plan, at, tokens)
        assert sum(loads) == pytest.approx(sum(tokens))
        assert max(loads) < max(rank_loads(EVEN, at, tokens))


def test_nothing_moves_when_loads_are_as_planned() -> None:
    found = weighed([[5] * EXPERTS] * LAYERS)
    assert not found.worth and "have the seats that their loads ask for" in found.reason
    assert not weighed([[0] * EXPERTS] * LAYERS).worth


def test_the_gain_of_a_plan_is_weighed_against_its_moves() -> None:
    plan, moves = moved(SKEWED)
    before = sum(max(rank_loads(EVEN, at, tokens)) for at, tokens in enumerate(SKEWED))
    after = sum(max(rank_loads(plan, at, tokens)) for at, tokens in enumerate(SKEWED))
    gain_s = (1 - after / before) * 200
    most = max(sum(move.source == rank for move in moves) for rank in range(ROOM.ranks))
    enough = int((gain_s - MOVE_S) * MOVE_BYTES_S / most)
    assert weighed(SKEWED, expert_bytes=enough - 1000).worth
    assert not weighed(SKEWED, expert_bytes=enough + 1000).worth
    assert f"up to {gain_s:.2f} s in 200 steps" in weighed(SKEWED).reason
    assert not weighed(SKEWED, steps=0).worth
