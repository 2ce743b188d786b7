"""Which workers stay in their processes when the world changes. Pure; decides nothing.

Each node's agent decides for its own workers: it keeps those that follow their worlds and whose
rank and member are not to be restarted. This module announces that to people beforehand.
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


def others_stay(
    observed: ClusterView,
    membership: Membership,
    restarting: Collection[int],
    restarting_ranks: Collection[int] = (),
) -> bool:
    """Whether there are ranks that do not restart, and all of them follow."""
    views = zip(membership.members, observed.views(membership), strict=True)
    others = [view for member, view in views if member.index not in restarting]
    if not all(
        view is not None and len(view.ranks) == membership.nproc_per_node for view in others
    ):
        return False
    ranks = [rank for view in others if view is not None for rank in view.ranks]
    staying = [rank for rank in ranks if rank.rank not in restarting_ranks]
    return bool(staying) and all(rank.follows for rank in staying)


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
        and rank.rank not in membership.restarting_ranks
        for rank in ranks
    )


def partial_restart(
    restarting: Collection[int], ranks: Collection[int], takes: str, *, all_stay: bool
) -> str:
    """Text on the members and ranks that restart while all other workers stay.

    Args:
        restarting: members that restart where they are.
        ranks: ranks of other members that restart.
        all_stay: whether none restarts, here or elsewhere: others have left.
        takes: text on the nodes that take over other members, and on how many go on when some
            leave; empty when none moves or leaves.
    """
    restarts = [
        f"{what}s {listed(sorted(found))} restart" if len(found) > 1 else f"{what} {one} restarts"
        for what, found in (("member", restarting), ("rank", ranks))
        for one in sorted(found)[:1]
    ]
    stay = "their workers stay" if all_stay else "the others' workers stay"
    return ", ".join([*filter(None, [takes, *restarts]), stay])
