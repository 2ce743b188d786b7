"""Emits one event when a job trains unprotected for a reason that a person has to remove. Pure.

Such reasons are: ranks find that their replicas have diverged (`holdfast._agree.replica_check`), a
daemon has no room for a rank's snapshots, or the SDK refuses to save state that it could not
restore. Daemons report the reason in their heartbeats. Training continues: a rank without a session
reports its steps like any other.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import MemoryBudgetError, ReplicasDivergedError
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.text import ranks_in_words
from holdfast_operator.reconciler.observe.views import ClusterView, ControlState, EventReason
from holdfast_operator.reconciler.rules import Observation, RuleResult

TRAINS_UNPROTECTED = "TrainsUnprotected"
"""Reason of conditions of a job whose ranks train without sessions."""

_REASONS = {
    ReplicasDivergedError.code: EventReason.REPLICAS_DIVERGED,
    MemoryBudgetError.code: EventReason.SNAPSHOTS_REFUSED,
}
"""Code of a problem's cause → reason of the event."""


def note_unprotected(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Emit an event for each reason when daemons begin to report it. Until no problem keeps the job
    from being protected, it is the same one, whatever else they report meanwhile."""
    views = observation.cluster.views(membership)
    troubled = [view for view in views if view is not None and view.problem]
    found: dict[EventReason, str] = {}
    for view in troubled:
        if view.problem_code in _REASONS:
            found.setdefault(_REASONS[view.problem_code], view.problem)
        elif any(rank.unprotected for rank in view.ranks):
            found.setdefault(EventReason.SNAPSHOTS_REFUSED, view.problem)
    noted = state.unprotected if troubled else frozenset()
    new = [reason for reason in found if reason not in noted]
    result = RuleResult(replace(state, unprotected=noted.union(new)))
    for reason in new:
        result = result.post(reason, found[reason], warning=True)
    return result


def unprotected_in_words(observed: ClusterView, membership: Membership) -> str:
    """Which ranks train without protection, and why; empty when none does."""
    views = [view for view in observed.views(membership) if view is not None]
    ranks = [rank.rank for view in views for rank in view.ranks if rank.unprotected]
    if not ranks:
        return ""
    why = next((view.problem for view in views if any(r.unprotected for r in view.ranks)), "")
    verb = "trains" if len(ranks) == 1 else "train"
    return f"{ranks_in_words(ranks)} {verb} without protection ({why or 'no reason is known'})"
