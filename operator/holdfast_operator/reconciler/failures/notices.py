"""Copies to durable storage that are requested at once, because nodes will be taken away soon, or
because a user asks for one. Pure.

A notice leaves a minute or two. In that time a spare takes over the member, or the job continues
without it (`recovering`), and parity can bear a single loss. But notices often come to many nodes
together, for one reason, and then none of this is enough: so the newest protected generation is
copied at once, whatever else happens. Each notice leads to one request: daemons retry by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast_core.job.schema import COPY_ANNOTATION
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    ControlState,
    EventReason,
    PersistNow,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult


def ask_for_copy(
    observation: Observation, state: ControlState, before: Membership | None
) -> RuleResult:
    """Request a copy for each new notice, and for each new request of a user. This comes after all
    other rules: a request before the next epoch would be for a generation of the epoch that has
    ended.

    Args:
        before: the membership before this look, since a member with a notice may have moved.
    """
    membership = state.membership
    freed = state.outcome is not None and not state.kept
    if membership is None or membership.tier is None or freed:
        return RuleResult(state)
    found = dict(_notices(observation.cluster, before or membership, state))
    new = sorted(found.keys() - state.noticed)
    request = observation.job.copy_request
    result = RuleResult(replace(state, noticed=frozenset(found), copy_request=request))
    reasons = [found[name] for name in new]
    if request and request != state.copy_request:
        reasons.append(f"the annotation {COPY_ANNOTATION} asks for a copy")
    if not reasons:
        return result
    saved = state.saved
    which = "the next generation" if saved is None else f"generation {saved} or a newer one"
    text = f"{'; '.join(reasons)}; {which} is copied to {membership.tier.uri} now"
    return result.post(EventReason.COPY_REQUESTED, text, warning=bool(new)).act(PersistNow())


def asked_because(state: ControlState) -> str:
    """Why a copy was requested, as an addition to a condition; empty when none was."""
    if not state.noticed:
        return ""
    return f"; a copy was requested because notice was given for {listed(sorted(state.noticed))}"


def _notices(
    observed: ClusterView, membership: Membership, state: ControlState
) -> Iterator[tuple[str, str]]:
    """Yield (node, announced event) for members' nodes, and for nodes that members have just left:
    the same notice must not count as new later."""
    members = {member.node: member.index for member in membership.members}
    for name in members.keys() | state.noticed:
        node = observed.nodes.get(name)
        if node is not None and node.disruption and not node.gone:
            yield name, f"node {name} will be taken away: {node.disruption}"
        elif name in members:
            agent = observed.agent(members[name], name)
            if agent is not None and agent.disruption:
                yield name, f"the agent of member {agent.member} on {name}: {agent.disruption}"
