"""A job that cannot continue without a node waits for one, for as long as that takes. Pure.

No node is free for a member whose own is lost or takes no pods, and the job may not continue
without that member (`shrinking`). Daemons keep their snapshots, as in a suspended job, and the
agents of the other members wait. A node may be away for hours, for an upgrade or a repair, and
nothing is lost meanwhile. So only the user's settings end the wait: a failure rule on NoReplacement
whose action is Fail, or a deadline of the spec. Until then the job reports what it waits for, since
when, and what would end the wait.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from holdfast_core.job.parsing import FailureAction as RuleAction
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.membership.shrinking import (
    no_replacement_rule,
    shrinks_after_s,
    strength,
)
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.lookups import node_of
from holdfast_operator.reconciler.observe.text import listed, roughly
from holdfast_operator.reconciler.observe.views import ControlState, EventReason
from holdfast_operator.reconciler.rules import Observation, RuleResult, end

NO_SPARE = "no spare is left"
SILENT = "their daemons are silent, while nothing else holds what their memory may hold"
"""Why members that only their daemons' silence tells to be lost are not replaced."""


def await_node(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    text: str,
    members: list[int],
    *,
    why: str = NO_SPARE,
    counting: frozenset[int | None] = frozenset(),
) -> RuleResult:
    """Wait until `members` can get a node, or the job may continue without them (`shrinking`).

    Args:
        text: what has happened to them.
        why: why they have no node.
        counting: members whose causes count towards the maximum of recoveries.
    """
    result, since = _begin(observation, state, members, counting), state.no_replacement_since
    if since is None:
        result = result.post(EventReason.NO_REPLACEMENT, f"{text}; {why}", warning=True)
    waited_s = 0.0 if since is None else observation.now - since
    left = strength(observation.job, membership)
    remaining = left.active - len(members)
    copy_nodes = observation.job.spec.copy_nodes
    remaining -= remaining % copy_nodes  # the others would be idle
    who = f"members [{listed(members)}] have no node and {why}"
    may_leave = why == NO_SPARE and remaining >= left.least
    if may_leave and waited_s < shrinks_after_s(observation.job):
        left_s = shrinks_after_s(observation.job) - waited_s
        return result.wait(
            f"{who}; in {left_s:.0f} s {remaining} of {left.active} members go on without them"
        )
    short = (
        f"{remaining} members are left, and spec.minNodes is {left.least}; "
        if remaining < left.least < left.desired
        else ""
    )
    if not short and copy_nodes > 1 and may_leave:
        short = (
            f"a copy of the model takes {copy_nodes} nodes, and parity groups cannot rebuild what "
            f"those that would leave as well hold; "
        )
    failing = _fail_by_rule(observation, result.state, f"{text}; ", short)
    if failing is not None:
        return result.then(failing)
    nodes = _nodes_in_words(observation, result.state, membership, members)
    return result.wait(
        f"{who}: {short}{nodes}; waiting for {roughly(waited_s)}. "
        f"{_prospect(observation, result.state, membership, members, why)}"
    )


def await_pods(
    observation: Observation,
    state: ControlState,
    text: str,
    missing: str,
    *,
    counting: frozenset[int | None],
) -> RuleResult:
    """Wait until another controller has made the pods that are `missing`."""
    result = _begin(observation, state, (), counting)
    failing = _fail_by_rule(observation, result.state, f"{text}; {missing}; ", "")
    if failing is not None:
        return result.then(failing)
    return result.wait(f"{text}; {missing}")


def _begin(
    observation: Observation,
    state: ControlState,
    members: Collection[int],
    counting: frozenset[int | None],
) -> RuleResult:
    """Begin the wait, or continue it. Whether it counts depends on what came first: a node that was
    drained may be switched off, and is lost then."""
    begins = state.no_replacement_since is None
    known = frozenset[int]() if begins else state.wait_members
    return RuleResult(
        replace(
            state,
            no_replacement_since=observation.now if begins else state.no_replacement_since,
            wait_members=known.union(members),
            wait_counts=bool(counting - known) or (state.wait_counts and not begins),
        )
    )


def _fail_by_rule(
    observation: Observation, state: ControlState, text: str, short: str
) -> RuleResult | None:
    """Step that fails the job, if a rule of the user says so and its time is over."""
    limit_s, since = _limit_s(observation.job), state.no_replacement_since
    if limit_s is None or since is None or observation.now - since < limit_s:
        return None
    reason = (
        f"{text}no replacement within {limit_s:g} s, and the failure rule on NoReplacement: Fail "
        f"applies; {short}add spares, or remove the rule"
    )
    return end(observation, state, Outcome.FAILED, reason, "NoReplacement")


def _limit_s(job: MoETrainingJob) -> float | None:
    """Seconds after which a rule of the user fails a job that waits for a node; None without."""
    rule = no_replacement_rule(job, RuleAction.FAIL)
    return None if rule is None else rule.after_seconds or 0.0


def _nodes_in_words(
    observation: Observation, state: ControlState, membership: Membership, members: list[int]
) -> str:
    """Text on what is wrong with the nodes of `members`, without times that grow."""
    nodes = [
        (membership.member(m).node, node_of(observation.cluster, membership.member(m)))
        for m in members
    ]
    lost = [name for name, _ in nodes if observation.is_lost(name, state)]
    closed = [name for name, node in nodes if name not in lost and not node.schedulable]
    parts = [f"{listed(lost)} lost"] if lost else []
    parts += [f"no pods on {listed(closed)} (kubectl uncordon)"] if closed else []
    return ", ".join(parts) or "their nodes are about to go"


def _prospect(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    members: list[int],
    why: str,
) -> str:
    """Text on what would end the wait."""
    names = listed(membership.member(member).node for member in members)
    start = (
        "Nothing was protected yet, so it starts from the beginning"
        if state.saved is None
        else f"The job continues from its newest snapshots, which daemons keep in memory "
        f"(generation {state.saved} was safe),"
    )
    when = f"{names} or another node takes pods"
    if why == SILENT:
        when = (
            f"the daemons on {names} are back with their memory, or those nodes are gone for good"
        )
    return f"{start} once {when}; {_limits(observation, state)}"


def _limits(observation: Observation, state: ControlState) -> str:
    """Text on what the user has written that would end the job first."""
    ends = []
    limit_s, since = _limit_s(observation.job), state.no_replacement_since
    if limit_s is not None and since is not None:
        ends.append(("the failure rule on NoReplacement", since + limit_s - observation.now))
    deadline_s, active_since = observation.job.spec.active_deadline_seconds, state.active_since
    if deadline_s is not None and active_since is not None:
        ends.append(("spec.activeDeadlineSeconds", active_since + deadline_s - observation.now))
    if not ends:
        return "until then it waits"
    name, left_s = min(ends, key=lambda each: each[1])
    return f"{name} fails it in {roughly(max(0.0, left_s))}"
