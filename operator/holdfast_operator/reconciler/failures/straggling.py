"""Notes ranks for which the others wait, step after step, and the nodes that they count against.

The times of all ranks are judged in `holdfast_core.stragglers`; `failurePolicy.onStraggler` says
what follows. A straggler is reported by an event and in the status. Its node is blamed once in an
epoch, in a round in which no other node has a straggler, or soon may: what several nodes have in
common is none of theirs.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from holdfast_core.job.parsing import OnStraggler
from holdfast_core.node_failures import FailureKind
from holdfast_core.snapshots.membership import Membership
from holdfast_core.stragglers import StragglerWatch
from holdfast_operator.reconciler.observe.lookups import ranks_in
from holdfast_operator.reconciler.observe.stragglers import (
    named_stragglers,
    slow_member,
    straggler_in_words,
)
from holdfast_operator.reconciler.observe.text import NAMED_MAX, ranks_in_words
from holdfast_operator.reconciler.observe.views import BlamedNode, ControlState, EventReason
from holdfast_operator.reconciler.rules import Observation, RuleResult


def note_stragglers(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Judge the newest times of the ranks; emit events when stragglers are found, or keep pace
    again."""
    if observation.job.spec.failure_policy.on_straggler is OnStraggler.IGNORE:
        return RuleResult(replace(state, straggling=StragglerWatch()))
    if state.resumed_epoch != membership.epoch:
        return RuleResult(state)
    before = state.straggling
    at_work = (rank for rank in ranks_in(observation.cluster, membership) if rank.at_work)
    times = {rank.rank: rank.times for rank in at_work if rank.times is not None}
    watch = before.see(membership.epoch, times)
    result = RuleResult(state if watch is before else replace(state, straggling=watch))
    if watch.epoch != before.epoch:
        return result
    known = {each.rank for each in before.stragglers}
    named = named_stragglers(membership, result.state)
    found = [each for each in named if each.rank not in known]
    if found:
        text = "; ".join(straggler_in_words(membership, each) for each in found[:NAMED_MAX])
        again = {membership.member_of(each.rank) for each in found} & state.replaced_stragglers
        if again:
            text += f"; member {min(again)} was slow on another node, too, and stays on this one"
        result = result.post(EventReason.STRAGGLER, text, warning=True)
    if passed := known.difference(each.rank for each in watch.stragglers):
        text = f"{ranks_in_words(passed)} no longer holds up the others"
        result = result.post(EventReason.STRAGGLER_PASSED, text)
    return _with_blame(observation, result, membership)


def _with_blame(observation: Observation, result: RuleResult, membership: Membership) -> RuleResult:
    """`result`, which blames the node of the slow member, unless it was blamed before in this
    epoch, or the member was slow on another node, too."""
    state, watch = result.state, result.state.straggling
    member = slow_member(observation.job, membership, watch)
    if member is None or member in state.replaced_stragglers | watch.blamed:
        return result
    blamed = BlamedNode(
        node=membership.member(member).node,
        kind=FailureKind.STRAGGLING,
        epoch=membership.epoch,
        # A member that is slow on several nodes, as one that logs, counts against none of them.
        essence=f"slow member {member}",
    )
    watch = structs.replace(watch, blamed=watch.blamed | {member})
    return replace(result, state=replace(state, straggling=watch)).blame(blamed)
