"""The replay of spot instances: its numbers of nodes, and the order of the three systems."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import mean

import pytest
from benchmarks.papers.spot_trace import (
    CHANGES,
    LENGTH_S,
    MODELS,
    SpotReplay,
    System,
    holders_of_groups,
    replay_spot,
    sizes,
    spot_tables,
)

from holdfast_cli.planner.effective_time.incidents import Draw


def draw_of(seed: int) -> Draw:
    return random.Random(seed).random


def test_the_trace_has_the_papers_two_facts() -> None:
    available, lost = 0, []
    for minute, change in CHANGES:
        if change < 0:
            lost.append((minute, change, -change / available))
        available += change
    assert lost[0][:2] == (34, -4)
    assert max(share for _, _, share in lost) == pytest.approx(0.1875)  # "a maximum of 19 %"


def test_both_replays_stay_within_ten_nodes() -> None:
    scaled = [nodes for _, nodes in sizes(SpotReplay.SCALED)]
    assert scaled == [6, 7, 8, 9, 10, 9, 10, 8, 7, 6, 5, 7, 8, 9, 10, 9]
    events = sizes(SpotReplay.EVENTS)
    assert events[:4] == ((0.0, 10), (34 * 60.0, 6), (43 * 60.0, 10), (51 * 60.0, 4))
    assert {nodes for _, nodes in events} <= set(range(2, 11))


@pytest.mark.parametrize("nodes", range(1, 11))
@pytest.mark.parametrize("experts", [8, 16])
def test_groups_of_experts_are_on_nodes_of_their_own(nodes: int, experts: int) -> None:
    if nodes * 6 < experts:
        return
    groups = holders_of_groups(experts, nodes)
    assert len(groups) == -(-experts // 6)
    assert min(groups) >= 1
    assert sum(groups) <= nodes
    if nodes * 6 >= 2 * experts and sum(groups[:-1]) <= nodes - 2:
        assert min(groups) >= 2  # two copies, so that one loss is never fatal


@pytest.mark.parametrize("replay", SpotReplay)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_elastic_trains_most_and_restarting_least(replay: SpotReplay, model: object) -> None:
    (chosen,) = (each for each in MODELS if each is model)
    samples = [
        mean(replay_spot(chosen, system, replay, draw_of(seed)).samples for seed in range(60))
        for system in System
    ]
    assert all(more >= less for more, less in pairwise(samples)), samples


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_time_is_accounted_for(model: object) -> None:
    (chosen,) = (each for each in MODELS if each is model)
    for system in System:
        for replay in SpotReplay:
            run = replay_spot(chosen, system, replay, draw_of(1))
            assert sum(run.seconds.values()) <= LENGTH_S + 1e-6
            assert run.samples > 0


def test_throughput_follows_the_number_of_nodes() -> None:
    """Where the trace gives more nodes for longer, the elastic system trains more."""
    by_replay = {
        replay: sum(
            nodes * (end_s - at_s)
            for (at_s, nodes), (end_s, _) in pairwise([*sizes(replay), (float(LENGTH_S), 0)])
        )
        for replay in SpotReplay
    }
    for model in MODELS[:1]:
        trained = {
            replay: mean(
                replay_spot(model, System.ELASTIC, replay, draw_of(seed)).samples
                for seed in range(20)
            )
            for replay in SpotReplay
        }
        ratio = trained[SpotReplay.EVENTS] / trained[SpotReplay.SCALED]
        assert ratio == pytest.approx(
            by_replay[SpotReplay.EVENTS] / by_replay[SpotReplay.SCALED], abs=0.06
        )


def test_the_tables_name_both_replays_and_claim_an_order_only() -> None:
    _, nodes, trained = spot_tables(draw_of, 4)
    assert [row[0] for row in nodes.rows] == ["scaled", "events"]
    assert len(trained.rows) == 12
    assert trained.notes[0].startswith("claimed: elastic trains no less than DS(FT)")
    assert trained.notes[-1].startswith("paper's: on its hardware")
