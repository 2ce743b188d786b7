from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from benchmarks.policies.risk import tokens_at_risk, two_selections, ways
from benchmarks.policies.routing_traces import Traffic, routing_trace
from expert_worlds import unit, world

MANY = 10**8
"""Tokens, so that counts are shares with hardly any noise."""


def shares(experts: int, steps: int, **traffic: int) -> list[list[float]]:
    trace = routing_trace(world([experts]), steps, Traffic(tokens=MANY, **traffic))
    return [[counts[unit(0, e)] / MANY for e in range(experts)] for counts in trace]


def test_every_token_is_routed_and_a_seed_gives_one_trace() -> None:
    table = world([4, 7])
    trace = list(routing_trace(table, 5, Traffic(tokens=1000)))
    assert trace == list(routing_trace(table, 5, Traffic(tokens=1000)))
    assert trace != list(routing_trace(table, 5, Traffic(tokens=1000, seed=1)))
    for counts in trace:
        for layer in table.layers:
            assert sum(counts[expert.unit] for expert in layer.experts) == 1000


@pytest.mark.parametrize("seed", range(3))
def test_two_of_16_experts_receive_most_tokens(seed: int) -> None:
    top = [sum(sorted(step)[-2:]) for step in shares(16, 1500, seed=seed)]
    assert 0.75 < max(top) < 0.95
    assert 0.6 < fmean(top) < 0.8


@pytest.mark.parametrize("seed", range(3))
def test_popularity_drifts_without_jumps(seed: int) -> None:
    steps = shares(16, 1500, seed=seed)
    jump = max(abs(a - b) for old, new in pairwise(steps) for a, b in zip(old, new, strict=True))
    assert jump < 0.05
    assert len({step.index(max(step)) for step in steps}) >= 3


@pytest.mark.parametrize(("experts", "k"), [(16, 4), (16, 5), (16, 6), (64, 6)])
def test_choosing_by_popularity_halves_the_tokens_at_risk(experts: int, k: int) -> None:
    """Figure 11, with K between 25 and 40 % of the experts, as MoEtion §4.1 has it, and its 6 of
    64. In turn, an expert is (E / K - 1) / 2 steps old on average."""
    table = world([experts] * 8)
    select = ways(table, k)
    risks = {
        name: tokens_at_risk(table, select[name], steps=120, traffic=Traffic())
        for name in ("round robin", "popularity")
    }
    assert risks["popularity"].mean <= risks["round robin"].mean / 2
    assert risks["round robin"].mean == pytest.approx((experts / k - 1) / 2, rel=0.1)


def test_two_selections_of_equal_budgets_are_one() -> None:
    table, traffic = world([8, 8]), Traffic(tokens=10_000)
    one = tokens_at_risk(table, ways(table, 2)["popularity"], steps=60, traffic=traffic).mean
    memory, peers = two_selections(table, 2, 2, steps=60, traffic=traffic)
    assert memory == pytest.approx(one)
    assert peers == pytest.approx(one)


def test_what_memory_takes_more_helps_against_what_leaves_memory_only() -> None:
    table, traffic = world([8, 8]), Traffic(tokens=10_000)
    one = tokens_at_risk(table, ways(table, 2)["popularity"], steps=60, traffic=traffic).mean
    memory, peers = two_selections(table, 8, 2, steps=60, traffic=traffic)
    assert memory == 0
    assert peers == pytest.approx(one), "peers get the newest of everything that they take"
    memory, peers = two_selections(table, 4, 2, steps=60, traffic=traffic)
    assert 0 < memory < one <= peers
