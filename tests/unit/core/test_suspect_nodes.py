"""Which nodes are closed to new pods because they fail again and again, and when they open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.node_failures import HALF_LIFE_S, FailureKind, NodeFailure, Rating, Record
from holdfast_core.suspect_nodes import (
    OPEN_BELOW,
    SUSPECT_SCORE,
    Mark,
    NodeState,
    SuspectPlan,
    SuspectPolicy,
    closed_max,
    plan,
    suspicions,
)

NOW = 1.7e9
NONE, TAINT, CORDON = SuspectPolicy.NONE, SuspectPolicy.TAINT, SuspectPolicy.CORDON


def closed(name: str, mark: Mark = Mark.TAINT) -> NodeState:
    """A node that Holdfast has closed."""
    return NodeState(name=name, marked=mark, intact=True, closed=True)


def failures(
    *jobs: str, kind: FailureKind = FailureKind.LOST_RANK, alike: str = ""
) -> tuple[NodeFailure, ...]:
    """A failure of each of `jobs`, an hour apart."""
    return tuple(
        NodeFailure(kind=kind, job=job, epoch=hour, at=NOW - 3600.0 * hour, alike=alike)
        for hour, job in enumerate(jobs)
    )


def scores(record: Record, later_s: float = 0.0) -> dict[str, float]:
    found = suspicions(record, now=NOW + later_s, half_life_s=HALF_LIFE_S)
    return {node: round(rating.score, 1) for node, rating in found.items()}


def nodes(count: int, *changed: NodeState) -> list[NodeState]:
    names = {state.name for state in changed}
    others = (f"n{number}" for number in range(count))
    return [*changed, *(NodeState(name=name) for name in others if name not in names)]


def bad(*names: str) -> dict[str, Rating]:
    return {name: Rating(4.0 - at / 10, "many", 4) for at, name in enumerate(names)}


def test_three_failures_of_two_jobs_close_a_node_until_they_have_faded() -> None:
    record = {"n1": failures("a", "a", "b")}
    rated = suspicions(record, now=NOW, half_life_s=HALF_LIFE_S)
    assert plan(nodes(3), rated, TAINT) == SuspectPlan(close=("n1",))
    marked = nodes(3, closed("n1"))
    for half_lives, opened in ((0.0, ()), (1.0, ()), (2.0, ()), (3.0, ("n1",))):
        later = NOW + half_lives * HALF_LIFE_S
        rated = suspicions(record, now=later, half_life_s=HALF_LIFE_S)
        assert plan(marked, rated, TAINT) == SuspectPlan(open=opened), half_lives


@pytest.mark.parametrize("kind", list(FailureKind))
def test_what_the_script_of_one_job_may_cause_closes_no_node(kind: FailureKind) -> None:
    of_scripts = {"LostRank", "Hang", "FailedStart", "Straggling"}
    found = scores({"n1": failures("a", "a", "a", kind=kind)})
    assert (found == {}) == (kind.value in of_scripts)
    assert scores({"n1": failures("a", "b", kind=kind)}) != {}


def test_a_script_that_fails_alike_on_several_nodes_counts_for_none_of_them() -> None:
    alike = failures("a", "a", kind=FailureKind.FAILED_START, alike="m")
    assert scores({"n1": (*alike, *failures("b")), "n2": alike}) == {}


def test_two_losses_are_not_yet_many() -> None:
    rated = suspicions(
        {"n1": failures("a", "b", kind=FailureKind.LOST_NODE)}, now=NOW, half_life_s=HALF_LIFE_S
    )
    assert rated["n1"].score > SUSPECT_SCORE
    assert plan(nodes(9), rated, CORDON) == SuspectPlan()


def test_only_a_share_of_the_nodes_is_closed_and_the_worst_come_first() -> None:
    assert [closed_max(count) for count in (1, 2, 3, 19, 20, 64)] == [0, 0, 1, 1, 2, 6]
    suspects = bad("n3", "n1", "n2")
    assert plan(nodes(25), suspects, TAINT) == SuspectPlan(close=("n3", "n1"), left=("n2",))
    # Those that others have closed count, too, and what is closed stays closed.
    others = nodes(25, NodeState(name="n7", closed=True), NodeState(name="n8", closed=True))
    assert plan(others, suspects, TAINT) == SuspectPlan(left=("n3", "n1", "n2"))
    ours = [closed(f"n{n}") for n in (1, 2, 3)]
    assert plan(nodes(5, *ours), suspects, TAINT) == SuspectPlan()


def test_what_somebody_else_has_closed_or_opened_stays_so() -> None:
    cordoned = NodeState(name="n1", closed=True)
    opened = NodeState(name="n2", marked=Mark.TAINT)
    states = nodes(30, cordoned, opened)
    assert plan(states, bad("n1", "n2"), TAINT) == SuspectPlan(opened=("n2",))
    # Whoever closes it after that: it is not Holdfast.
    noted = NodeState(name="n2", marked=Mark.OPENED, closed=True)
    assert plan(nodes(30, noted), bad("n2"), TAINT) == SuspectPlan()
    # Without failures, the annotation goes, and what others have closed is not opened.
    assert plan(states, {}, TAINT) == SuspectPlan(open=("n2",))


def test_another_policy_takes_back_what_the_earlier_one_did() -> None:
    ours = closed("n1")
    assert plan(nodes(5, ours), bad("n1"), CORDON) == SuspectPlan(open=("n1",))
    assert plan(nodes(5), bad("n1"), CORDON) == SuspectPlan(close=("n1",))
    assert plan(nodes(5, ours), bad("n1"), NONE) == SuspectPlan(open=("n1",), left=())


@given(
    states=st.lists(
        st.builds(
            NodeState,
            name=st.integers(0, 40).map(str),
            marked=st.sampled_from(Mark),
            intact=st.booleans(),
            closed=st.booleans(),
        ),
        unique_by=lambda state: state.name,
    ),
    rated=st.dictionaries(
        st.integers(0, 40).map(str),
        st.builds(Rating, st.floats(0, 16), st.just(""), st.integers(0, 8)),
    ),
    policy=st.sampled_from(SuspectPolicy),
)
def test_plans_keep_the_limit_and_touch_nothing_else(
    states: list[NodeState], rated: dict[str, Rating], policy: SuspectPolicy
) -> None:
    by_name = {state.name: state for state in states}
    found = plan(states, rated, policy)
    assert not set(found.close) & set(found.open)
    for name in found.close:
        assert by_name[name].marked is Mark.NONE and not by_name[name].closed
        assert rated[name].score >= SUSPECT_SCORE and policy is not NONE
    for name in found.open:
        assert by_name[name].marked is not Mark.NONE
        assert (
            by_name[name].marked.value != policy.value
            or rated.get(name, Rating()).score < OPEN_BELOW
        )
    assert not set(found.opened) & {*found.close, *found.open}
    kept = {state.name for state in states if state.closed} - set(found.open)
    if found.close:
        assert len(kept) + len(found.close) <= closed_max(len(states))
