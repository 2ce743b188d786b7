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

_WORDS = {
    EventReason.REPLICAS_DIVERGED: ReplicasDivergedError.words,
    EventReason.SNAPSHOTS_REFUSED: MemoryBudgetError.words,
}
"""Reason of the event → words by which the problem is recognized."""


def note_unprotected(look: Look, state: ControlState, membership: Membership) -> Step:
    """Emit an event for each reason when daemons begin to report it. Until no problem keeps the job
    from being protected, it is the same one, whatever else they report meanwhile."""
    views = look.observed.views(membership)
    problems = [view.problem for view in views if view is not None and view.problem]
    found = {
        reason: next((problem for problem in problems if words in problem), "")
        for reason, words in _WORDS.items()
    }
    noted = state.unprotected if problems else frozenset()
    new = [reason for reason, problem in found.items() if problem and reason not in noted]
    step = Step(replace(state, unprotected=noted.union(new)))
    for reason in new:
        step = step.post(reason, found[reason], warning=True)
    return step
