"""Steps of rules add up in order, and end where one of them waits."""

from __future__ import annotations

from dataclasses import replace

from virtual_world import make_job

from holdfast_operator.reconciler.observe.views import (
    ControlState,
    DropJob,
    EventReason,
    FenceNode,
    Observed,
    StopAgent,
)
from holdfast_operator.reconciler.steps import Look, Step, fold

LOOK = Look(job=make_job(), observed=Observed(nodes={}), now=5.0)


def _count(look: Look, state: ControlState) -> Step:
    return Step(replace(state, counted=state.counted + 1)).post(
        EventReason.ADOPTED, f"at {look.now:g} s"
    )


def _wait_for_two(_: Look, state: ControlState) -> Step:
    return Step(state, (DropJob(),), waiting="two are enough" if state.counted >= 2 else None)


def test_each_rule_begins_where_the_one_before_led() -> None:
    step = fold((_count, _wait_for_two, _count), LOOK, ControlState())
    assert (step.state.counted, step.actions, step.waiting) == (2, (DropJob(),), None)
    assert [event.message for event in step.events] == ["at 5 s", "at 5 s"]


def test_no_rule_is_followed_after_one_that_waits() -> None:
    step = fold((_count, _count, _wait_for_two, _count), LOOK, ControlState())
    assert (step.state.counted, step.waiting) == (2, "two are enough")


def test_rules_are_given_what_they_are_about() -> None:
    def add(_: Look, state: ControlState, number: int) -> Step:
        return Step(replace(state, counted=state.counted + number))

    assert fold((add, add), LOOK, ControlState(), 4).state.counted == 8


def test_a_node_is_fenced_once_and_agents_are_stopped_each_time() -> None:
    fence, stop = FenceNode(node="n1"), StopAgent(member=0, node="n1")
    step = Step(ControlState(), (fence,)).then(Step(ControlState(), (fence, stop)))
    assert step.act(stop).actions == (fence, stop, stop)
