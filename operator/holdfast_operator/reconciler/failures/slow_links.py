"""Notes nodes whose links are slow beside those of the other nodes of the job.

Daemons measure them (`holdfast_core.links`). They are reported by an event and in the status, and
nothing follows: what is slow may be a switch that several nodes share, and a member that moves
takes its state over the same network.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.job.parsing import OnStraggler
from holdfast_core.links import LinkWatch, MeasuredLinks, SlowLinks, slow_links_in_words
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.text import NAMED_MAX
from holdfast_operator.reconciler.observe.views import ControlState, EventReason
from holdfast_operator.reconciler.rules import Observation, RuleResult


def note_links(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Judge the newest measurements of links; emit events when slow ones are found, or are fast
    again."""
    if observation.job.spec.failure_policy.on_straggler is OnStraggler.IGNORE:
        return RuleResult(replace(state, links=LinkWatch()))
    if state.resumed_epoch != membership.epoch:
        return RuleResult(state)
    views = observation.cluster.views(membership)
    measured = {
        member.index: MeasuredLinks() if view is None else view.links
        for member, view in zip(membership.members, views, strict=True)
    }
    before = state.links
    watch = before.see(membership.epoch, measured)
    if watch is before:
        return RuleResult(state)
    result = RuleResult(replace(state, links=watch))
    if watch.epoch != before.epoch:
        return result
    known = {each.members for each in before.slow}
    found = [each for each in watch.slow if each.members not in known]
    if found:
        text = "; ".join(in_words(membership, each) for each in found[:NAMED_MAX])
        result = result.post(EventReason.SLOW_LINKS, text, warning=True)
    still = {each.members for each in watch.slow}
    for passed in [each for each in before.slow if each.members not in still][:NAMED_MAX]:
        ends = " and ".join(membership.member(member).node for member in passed.members)
        kind = "the link between" if len(passed.members) > 1 else "links of"
        text = f"{kind} {ends}: as fast as others again"
        result = result.post(EventReason.SLOW_LINKS_PASSED, text)
    return result


def in_words(membership: Membership, slow: SlowLinks) -> str:
    """Slow links, with the names of the nodes."""
    return slow_links_in_words(slow, {each.index: each.node for each in membership.members})
