"""Look up the slow ranks that `holdfast_core.stragglers` names, with members and nodes. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast_core.job.parsing import MoETrainingJob, OnStraggler
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_core.stragglers import Cause, Straggler, StragglerWatch
from holdfast_operator.reconciler.observe.lookups import just_saved
from holdfast_operator.reconciler.observe.views import ControlState

COOL_DOWN_S = 1800.0
"""Least time between two moves of members because a rank was slow."""


def straggler_in_words(membership: Membership, straggler: Straggler) -> str:
    """`rank 3 of member 1 on n1 is slow: …`."""
    member = membership.member(membership.member_of(straggler.rank))
    return (
        f"rank {straggler.rank} of member {member.index} on {member.node} is slow: "
        f"{straggler.in_words}"
    )


def named_stragglers(membership: Membership, state: ControlState) -> tuple[Straggler, ...]:
    """The ranks that are named in this epoch, the slowest first. Of one whose times show no cause,
    it is said whether the links of its node are slow."""
    watch, links = state.straggling, state.links
    if watch.epoch != membership.epoch:
        return ()
    named = links.named if links.epoch == membership.epoch else frozenset[int]()
    return tuple(
        replace(each, cause=Cause.NETWORK)
        if each.cause is Cause.UNKNOWN and membership.member_of(each.rank) in named
        else each
        for each in watch.stragglers
    )


def slow_member(job: MoETrainingJob, membership: Membership, watch: StragglerWatch) -> int | None:
    """The one member that is slow now, to be blamed or moved.

    None while ranks of several members are named or may soon be: what they have in common is none
    of their nodes'. None either while members are missing, because then Holdfast may itself divide
    a batch unevenly."""
    if watch.epoch != membership.epoch or len(membership.members) < job.spec.nodes:
        return None
    members = {membership.member_of(rank) for rank in watch.suspects}
    is_slow = any(map(watch.is_slow_now, watch.suspects))
    return members.pop() if len(members) == 1 and is_slow else None


def member_to_move(
    job: MoETrainingJob, membership: Membership, state: ControlState, now: float
) -> int | None:
    """The member that should move to another node now, because a rank of it is slow.

    None moves that did so before, because then its node is not the cause, nor soon after another
    one. It moves right after a generation was protected, so that its new node can rebuild that."""
    policy = job.spec.failure_policy.on_straggler
    if policy is not OnStraggler.REPLACE or job.spec.redundancy.type is Redundancy.NONE:
        return None
    member = slow_member(job, membership, state.straggling)
    if member is None or member in state.replaced_stragglers:
        return None
    moved_at = state.straggler_replaced_at
    if moved_at is not None and now - moved_at < COOL_DOWN_S:
        return None
    return member if just_saved(state, membership, now) else None
