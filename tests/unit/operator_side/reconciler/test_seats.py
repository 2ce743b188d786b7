"""Uneven copies of experts, as trainers report them: the condition, and an event for each plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from virtual_world import World, make_job

from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.errors import InvalidJobError
from holdfast_operator.reconciler.observe.counters import from_document, to_document

KIND = "ExpertsReplicated"
PLAN = PlanReport(
    epoch=1,
    step=0,
    cause=PlanCause.START,
    ranks=4,
    rank_seats=3,
    layers=2,
    experts=6,
    least_nodes=2,
    busiest_node=1.125,
)


def working(**spec: Any) -> World:
    """A job of four ranks that train, one on each node."""
    world = World(make_job(spec=spec))
    world.settle(3.0)
    world.train(10)
    world.look()
    return world


def report(world: World, *plans: PlanReport) -> None:
    """Have the members' daemons report these, one each."""
    world.plans = dict(zip(world.nodes_of_members(), plans, strict=False))
    world.look()


def test_a_job_without_uneven_copies_has_no_such_condition() -> None:
    assert KIND not in {c.type.value for c in working().decision.conditions}


def test_a_job_with_seats_has_the_condition_before_any_rank_reports() -> None:
    world = working(elastic={"seatsPerRank": 3})
    assert world.condition(KIND)[:2] == (None, "NotReported")


def test_the_condition_tells_the_newest_plan_and_why_it_was_made() -> None:
    world = working()
    report(world, PLAN)
    assert world.condition(KIND) == (
        True,
        "Replicated",
        "every expert is on at least 2 nodes: 2 layers of 6 experts in 3 seats of 4 ranks, the "
        "busiest node with 1.125 × the mean; since epoch 1, step 0, when training began",
    )
    newer = replace(PLAN, step=200, cause=PlanCause.LOADS, busiest_node=1.0)
    report(world, newer, PLAN)  # the second daemon's ranks report later
    assert "step 200, when loads had changed" in world.condition(KIND)[2]
    report(world, PLAN)
    assert world.state.plan == newer


def test_each_plan_is_one_event_and_one_that_leaves_single_copies_warns() -> None:
    world = working()
    report(world, *[PLAN] * 4)
    world.look()
    fewer = replace(PLAN, epoch=2, step=12, cause=PlanCause.WORLD, ranks=2, least_nodes=1)
    report(world, *[fewer] * 2)
    status, reason, message = world.condition(KIND)
    assert (status, reason) == (False, "SingleCopy")
    assert message.startswith("some expert is on one node only: 2 layers of 6 experts in 3 seats")
    assert "spec.elastic.seatsPerRank" in message
    posted = [event for event in world.events if event.reason == "ExpertsSeated"]
    assert [event.warning for event in posted] == [False, True]


def test_a_control_loop_that_starts_again_knows_the_plan() -> None:
    world = working()
    report(world, PLAN)
    found = from_document(to_document(world.state, now=5.0, wall=5.0), now=5.0, wall=5.0)
    assert found.plan == PLAN


@pytest.mark.parametrize(
    "wrong",
    [
        {"busiest_node": float("nan")},
        {"epoch": 2**63},
        {"step": 2**63},
        {"ranks": 0},
        {"layers": 0},
        {"least_nodes": 0},
        {"least_nodes": 5},
        {"experts": 13},
    ],
    ids=str,
)
def test_numbers_of_no_plan_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError):
        replace(PLAN, **wrong)
