"""Emit one event when a job trains unprotected for a reason that a person has to remove. Pure.

Either replicas have diverged, which the ranks find out (`holdfast._saving.comparing`), or a daemon
has no room for a rank's snapshots. Daemons report both in their heartbeats, as the problem that
keeps the job from being protected.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import MemoryBudgetError, ReplicasDivergedError
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.steps import Look, Step
from holdfast_operator.reconciler.views import ControlState, EventReason

_REASONS = {
    ReplicasDivergedError.code: EventReason.REPLICAS_DIVERGED,
    MemoryBudgetError.code: EventReason.SNAPSHOTS_REFUSED,
}
"""Code of a problem's cause → reason of the event."""


def note_unprotected(look: Look, state: ControlState, membership: Membership) -> Step:
    """Emit an event for each reason when daemons begin to report it. Until no problem keeps the job
    from being protected, it is the same one, whatever else they report meanwhile."""
    views = look.observed.views(membership)
    troubled = [view for view in views if view is not None and view.problem]
    found: dict[EventReason, str] = {}
    for view in troubled:
        if view.problem_code in _REASONS:
            found.setdefault(_REASONS[view.problem_code], view.problem)
    noted = state.unprotected if troubled else frozenset()
    new = [reason for reason in found if reason not in noted]
    step = Step(replace(state, unprotected=noted.union(new)))
    for reason in new:
        step = step.post(reason, found[reason], warning=True)
    return step
