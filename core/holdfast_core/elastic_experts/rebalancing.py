"""Whether a new plan is worth its moves while the ranks stay the same (Lazarus §4.1, §6.1).

Loads drift, so with a plan that was best 200 steps ago one rank may hold up the others. Changing
the plan costs the time in which experts move. That is worthwhile if the new plan saves more before
the next check. Pure: every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_core.elastic_experts.moving import ExpertMove
from holdfast_core.elastic_experts.plans import ExpertPlan

MOVE_BYTES_S = 1e9
"""Bytes that a rank sends in a second while experts move; an assumption."""
MOVE_S = 0.2
"""Time that moves take besides: ranks wait for a save, gather what they hold, and describe the next
snapshot anew; an assumption."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebalancing:
    """Another plan for the same ranks."""

    worth: bool
    reason: str


def weigh(
    now: ExpertPlan,
    planned: ExpertPlan,
    moves: Sequence[ExpertMove],
    *,
    expert_bytes: int,
    step_s: float,
    steps: int,
) -> Rebalancing:
    """Weigh `planned`, for the newest loads, against staying with the plan of `now`.

    Args:
        expert_bytes: bytes of an expert's state.
        step_s: time of a step at present. All of it counts as the experts' part, so the gain is an
            upper limit.
        steps: steps until the next look.
    """
    tokens = [layer.tokens for layer in planned.layers]
    before, after = busiest_ranks(now, tokens), busiest_ranks(planned, tokens)
    mean = sum(map(sum, tokens)) / now.room.ranks
    if not moves or not mean:
        return Rebalancing(worth=False, reason="experts have the seats that their loads ask for")
    gain_s = (1 - after / before) * step_s * steps
    sent = [0] * now.room.ranks
    for move in moves:
        sent[move.source] += expert_bytes
    cost_s = MOVE_S + max(sent) / MOVE_BYTES_S
    return Rebalancing(
        worth=gain_s > cost_s,
        reason=f"{before / mean:.3f} × the mean on the busiest ranks instead of {after / mean:.3f} "
        f"costs up to {gain_s:.2f} s in {steps} steps, and {len(moves)} moves cost {cost_s:.2f} s",
    )


def busiest_ranks(plan: ExpertPlan, tokens: Sequence[Sequence[int]]) -> float:
    """Tokens of the busiest rank of each layer, summed over layers.

    Args:
        tokens: for each layer the tokens of each expert.
    """
    return sum(
        max(rank_loads(plan, at, of_layer), default=0.0) for at, of_layer in enumerate(tokens)
    )


def rank_loads(plan: ExpertPlan, layer: int, tokens: Sequence[int]) -> list[float]:
    """Tokens of each rank in a layer, as the dispatcher divides them but for rounding."""
    loads = [0.0] * plan.room.ranks
    for expert, held in enumerate(plan.layers[layer].copies):
        share = tokens[expert] / sum(count for _, count in held)
        for rank, count in held:
            loads[rank] += share * count
    return loads
