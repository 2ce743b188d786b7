"""Results of rules add up in order, and end where one of them waits."""

from __future__ import annotations

from dataclasses import replace

from virtual_world import make_job

from holdfast_operator.reconciler.membership.own_pods import OwnPods
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    ControlState,
    DropJob,
    EventReason,
    FenceNode,
    StopAgent,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult, run_rules

OBSERVATION = Observation(job=make_job(), cluster=ClusterView(nodes={}), now=5.0, pods=OwnPods())


def _count(observation: Observation, state: ControlState) -> RuleResult:
    return RuleResult(replace(state, counted=state.counted + 1)).post(
        EventReason.ADOPTED, f"at {observation.now:g} s"
    )


def _wait_for_two(_: Observation, state: ControlState) -> RuleResult:
    return RuleResult(state, (DropJob(),), waiting="two are enough" if state.counted >= 2 else None)


def test_each_rule_begins_where_the_one_before_led() -> None:
    result = run_rules((_count, _wait_for_two, _count), OBSERVATION, ControlState())
    assert (result.state.counted, result.actions, result.waiting) == (2, (DropJob(),), None)
    assert [event.message for event in result.events] == ["at 5 s", "at 5 s"]


def test_no_rule_is_followed_after_one_that_waits() -> None:
    result = run_rules((_count, _count, _wait_for_two, _count), OBSERVATION, ControlState())
    assert (result.state.counted, result.waiting) == (2, "two are enough")


def test_rules_are_given_what_they_are_about() -> None:
    def add(_: Observation, state: ControlState, number: int) -> RuleResult:
        return RuleResult(replace(state, counted=state.counted + number))

    assert run_rules((add, add), OBSERVATION, ControlState(), 4).state.counted == 8


def test_a_node_is_fenced_once_and_agents_are_stopped_each_time() -> None:
    fence, stop = FenceNode(node="n1"), StopAgent(member=0, node="n1")
    result = RuleResult(ControlState(), (fence,)).then(RuleResult(ControlState(), (fence, stop)))
    assert result.act(stop).actions == (fence, stop, stop)
