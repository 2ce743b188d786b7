"""Which workers stay in their processes when the world changes. Pure; decides nothing.

Each node's agent decides for its own workers: it keeps them if all of them follow their worlds and
their member is not to be restarted. This module announces that to people beforehand.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast_core.job.status import RecoveryMode
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.lookups import ranks_in
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import ClusterView
from holdfast_operator.reconciler.report.conditions import training_runs


def recovery_mode(observed: ClusterView, membership: Membership | None) -> RecoveryMode | None:
    """The effect of a recovery on the job's workers; None while ranks that may still begin to
    follow are on their way to work."""
    if membership is None:
        return None
    ranks = ranks_in(observed, membership)
    if len(ranks) == membership.world_size and all(rank.follows for rank in ranks):
        return RecoveryMode.IN_PLACE
    return RecoveryMode.RESTART if training_runs(observed, membership) else None


def others_stay(observed: ClusterView, membership: Membership, restarting: Collection[int]) -> bool:
    """Whether there are members that do not restart, and all of their ranks follow."""
    views = zip(membership.members, observed.views(membership), strict=True)
    others = [view for member, view in views if member.index not in restarting]
    return bool(others) and all(
        view is not None
        and len(view.ranks) == membership.nproc_per_node
        and all(rank.follows for rank in view.ranks)
        for view in others
    )


def may_go_on_live(observed: ClusterView, membership: Membership) -> bool:
    """Whether workers that have outlived the last world may still find that they have the whole
    state between them: some stay in this epoch, and no rank has begun from anything yet. Workers
    that find otherwise end."""
    ranks = ranks_in(observed, membership)
    if any(rank.restored_from is not RestoreSource.UNKNOWN for rank in ranks):
        return False
    return any(
        rank.follows
        and not rank.lost
        and membership.member_of(rank.rank) not in membership.restarting
        for rank in ranks
    )


def partial_restart(restarting: Collection[int], takes: str, *, all_stay: bool) -> str:
    """Text on the members that restart while the workers of all others stay.

    Args:
        restarting: members that restart where they are.
        all_stay: whether no member restarts, here or elsewhere: others have left.
        takes: text on the nodes that take over other members, and on how many go on when some
            leave; empty when none moves or leaves.
    """
    found = sorted(restarting)
    who = f"members {listed(found)} restart" if len(found) != 1 else f"member {found[0]} restarts"
    stay = "their workers stay" if all_stay else "the others' workers stay"
    return ", ".join([*filter(None, [takes, who if found else ""]), stay])
