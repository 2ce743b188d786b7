"""What a plan states about survival, against kills that go through the rules of ranks and daemons.

`standing` decides what ranks that are left go on from, and `recovery_line` what the daemons'
memory holds; neither knows the plan's probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from math import erfc, exp, gamma, log, sqrt
from random import Random

import pytest
from protected_worlds import first_world, held, with_members

from holdfast_core.elastic_experts.plans import ExpertPlan, ExpertRoom, PlacedModel, plan_experts
from holdfast_core.elastic_experts.survival import loss_cases
from holdfast_core.job.elastic import Placement
from holdfast_core.protection.recovery import recovery_line
from holdfast_core.protection.standing import RankStanding, StandingAction, standing
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy

KILLS, NODES, EXPERTS, SEATS, STEP = 2000, 10, 16, 6, 40
LOST_MAX = 6
GROUPS = ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))
LEAST_P = 0.001


class Outcome(Enum):
    """Where training goes on from."""

    LIVE = "live"
    MEMORY = "memory"
    STORAGE = "storage"


def planned() -> ExpertPlan:
    """Two layers with power laws in other orders; copies in an order that survives many losses."""
    tokens = [round(10_000 / (rank + 1)) for rank in range(EXPERTS)]
    loads = [tokens, tokens[3:] + tokens[:3]]
    room = ExpertRoom(nodes=NODES, rank_seats=SEATS)
    return plan_experts(loads, room, placement=Placement.RECOVERY)


class Kills:
    """Losses of nodes of a job with this plan, whose newest generation is protected."""

    def __init__(self, plan: ExpertPlan) -> None:
        self._before = first_world(*GROUPS, redundancy=Redundancy.RAIM5, lanes=1)
        self._inventories = held(self._before, Generation(1, STEP))
        self._said = [
            RankStanding(
                step=STEP,
                topology=f"dp{NODES}·ep1·tp1·pp1",
                rank=rank,
                held=tuple(layer.experts_of(rank) for layer in plan.layers),
                layer_experts=EXPERTS,
            )
            for rank in range(NODES)
        ]

    def outcome(self, lost: Sequence[int]) -> Outcome:
        left = [node for node in range(NODES) if node not in lost]
        if standing([self._said[node] for node in left]).action is StandingAction.LIVE:
            return Outcome.LIVE
        now = with_members(self._before, left)
        line = recovery_line(now, {node: self._inventories[node] for node in left})
        return Outcome.STORAGE if line.generation is None else Outcome.MEMORY


def stated(placed: PlacedModel, lost: int) -> dict[Outcome, float]:
    """Probabilities that a plan states for the loss of `lost` nodes."""
    cases = loss_cases(NODES)
    either = placed.fatal.both(cases.fatal_to_groups(GROUPS, losses=1))
    live, some = placed.survival.probability(lost), cases.survival(either).probability(lost)
    return {Outcome.LIVE: live, Outcome.MEMORY: some - live, Outcome.STORAGE: 1 - some}


def p_value(counts: Mapping[int, Mapping[Outcome, int]], placed: PlacedModel) -> float:
    """Probability of counts that fit no better, if what the plan states is right: Pearson's test,
    over all numbers of lost nodes."""
    square, freedom = 0.0, 0
    for lost, found in counts.items():
        total = sum(found.values())
        for outcome, probability in stated(placed, lost).items():
            expected = total * probability
            if expected < 1e-9:
                if found.get(outcome, 0):
                    return 0.0
                continue
            square += (found.get(outcome, 0) - expected) ** 2 / expected
            freedom += 1
        freedom -= 1
    return chi_square_tail(square, freedom)


def chi_square_tail(square: float, freedom: int) -> float:
    """P(X > square) for X with a chi-square distribution."""
    half, odd = square / 2.0, freedom % 2
    powers = (i - odd / 2 for i in range(odd, (freedom + odd) // 2))
    terms = (exp(power * log(half)) / gamma(power + 1) for power in powers)
    return (erfc(sqrt(half)) if odd else 0.0) + exp(-half) * sum(terms)


@pytest.mark.parametrize(
    ("square", "freedom", "tail"),
    [(3.841, 1, 0.05), (9.210, 2, 0.01), (16.266, 3, 0.001), (29.588, 10, 0.001)],
)
def test_tails_are_those_of_the_tables(square: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(square, freedom) == pytest.approx(tail, rel=0.005)


def test_two_thousand_kills_end_as_often_live_as_the_plan_states() -> None:
    plan, draw = planned(), Random(75)
    kills = Kills(plan)
    counts: dict[int, Counter[Outcome]] = {lost: Counter() for lost in range(1, LOST_MAX + 1)}
    for kill in range(KILLS):
        lost = 1 + kill % LOST_MAX
        counts[lost][kills.outcome(draw.sample(range(NODES), lost))] += 1
    assert {outcome for found in counts.values() for outcome in found} == set(Outcome)
    assert p_value(counts, plan.chosen) > LEAST_P
    # The same kills refute what another placement would survive.
    assert p_value(counts, plan.balance) < LEAST_P / 1000
