"""Survival of experts in seats: by hand for a few nodes, and by every set of lost nodes."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import yaml
from plan_command import JOB

from holdfast_cli.planner.models.seated_experts import (
    fewest_nodes,
    survives_in_seats,
    two_copies,
)
from holdfast_core.elastic_experts.plans import ExpertRoom, PlanRules
from holdfast_core.elastic_experts.survival import NODES_MAX
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job


def job(nodes: int = 4, nproc: int = 1, **elastic: Any) -> MoETrainingJob:
    document = yaml.safe_load(JOB)
    spec = document["spec"]
    spec |= {"nodes": nodes, "nprocPerNode": nproc, "parallelism": {"dp": nodes * nproc}}
    del spec["model"]
    if elastic:
        spec["elastic"] = elastic
    return parse_job(document)


def equal(experts: int) -> tuple[float, ...]:
    return (1 / experts,) * experts


def test_a_job_without_seats_is_not_asked() -> None:
    assert survives_in_seats(job(), equal(4)) is None
    assert fewest_nodes(job(), 64) == 1


def test_pairs_of_nodes_that_hold_the_same_experts_are_the_fatal_ones() -> None:
    """Two of six pairs: four experts, each on two of four nodes with two seats."""
    survives = survives_in_seats(job(seatsPerRank=2, placement="Recovery"), equal(4))
    assert survives is not None
    assert [survives(4, lost) for lost in range(5)] == pytest.approx([1, 1, 2 / 3, 0, 0])
    # Three nodes have six seats: two experts have one copy, both on one node; two share the others.
    assert [survives(3, lost) for lost in range(4)] == pytest.approx([1, 2 / 3, 0, 0])


def test_an_expert_with_one_copy_is_lost_with_its_node() -> None:
    survives = survives_in_seats(job(seatsPerRank=1, minCopies=1), equal(4))
    assert survives is not None
    assert [survives(4, lost) for lost in range(5)] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(("nodes", "seats", "experts"), [(5, 3, 4), (6, 4, 8), (4, 2, 3)])
def test_survival_is_that_of_every_set_of_lost_nodes(nodes: int, seats: int, experts: int) -> None:
    this = job(nodes, seatsPerRank=seats)
    survives, portions = survives_in_seats(this, equal(experts)), equal(experts)
    assert survives is not None and this.elastic is not None
    tokens = [round(1_000_000 * portion) for portion in portions]
    plan = PlanRules.of_job(this.elastic).plan([tokens], ExpertRoom(nodes=nodes, rank_seats=seats))
    (layer,) = plan.layers
    held = [set(layer.experts_of(rank)) for rank in range(nodes)]
    for lost in range(nodes + 1):
        sets = list(combinations(range(nodes), lost))
        alive = [
            set().union(*(held[node] for node in range(nodes) if node not in gone))
            == set(range(experts))
            for gone in sets
        ]
        assert survives(nodes, lost) == pytest.approx(sum(alive) / len(sets))


def test_more_nodes_than_plans_are_made_for_count_on_the_copies_that_seats_hold() -> None:
    nodes = 2 * NODES_MAX
    survives = survives_in_seats(job(seatsPerRank=1, minCopies=3), equal(64))
    assert survives is not None
    assert [survives(nodes, lost) for lost in (1, 2, 3)] == [1, 1, 0]


def test_seats_that_cannot_hold_all_experts_are_refused() -> None:
    survives = survives_in_seats(job(seatsPerRank=1), equal(8))
    assert survives is not None and fewest_nodes(job(seatsPerRank=1), 8) == 8
    with pytest.raises(InvalidJobError, match="do not fit 4 nodes"):
        survives(4, 1)


def test_two_copies_are_assumed_where_no_plan_is_known() -> None:
    assert [two_copies(9, lost) for lost in (1, 2, 3)] == [1, 0, 0]
