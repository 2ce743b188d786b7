"""Jobs that train while their saves are refused, until a person removes the reason. Pure.

Such reasons are: ranks find that their replicas have diverged (`holdfast._agree.replica_check`), a
daemon has no room for a rank's snapshots, the SDK refuses to save state that it could not restore,
or a process trains and never saves. Daemons report the reason in their heartbeats. Training
continues: a rank without a session reports its steps like any other.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import ReplicasDivergedError, UnsavedError, refuses_saves
from holdfast_core.last_lines import essence_of
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.text import ranks_in_words
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    Condition,
    ConditionType,
    ControlState,
    EventReason,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult

TRAINS_UNPROTECTED = "TrainsUnprotected"
"""Reason of conditions of a job whose ranks train without sessions."""
SAVES_REFUSED = "SavesRefused"
"""Reason of the condition `Protected` of a job whose ranks have sessions that refuse every save."""
UNPROTECTED = frozenset({TRAINS_UNPROTECTED, SAVES_REFUSED})
"""Reasons of the condition `Protected` of a job that trains while its saves are refused."""
TEXTS_MAX = 16
"""Different reasons of which events tell until all is well again: trainers make them up."""

_REASONS = {
    ReplicasDivergedError.code: EventReason.REPLICAS_DIVERGED,
    UnsavedError.code: EventReason.NOTHING_SAVED,
}
"""Code of a problem's cause → reason of the event, if it is not `SnapshotsRefused`."""


def is_unprotected(condition: Condition) -> bool:
    """Whether a condition tells that ranks train while their saves are refused."""
    return condition.type is ConditionType.PROTECTED and condition.reason in UNPROTECTED


def note_unprotected(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Emit an event for each refusal when daemons begin to report it. Until no problem keeps the
    job from being protected, a text is the same one even if its numbers, such as that of the step,
    have changed."""
    views = observation.cluster.views(membership)
    troubled = [view for view in views if view is not None and view.problem]
    noted = state.unprotected if troubled else frozenset()
    result = RuleResult(replace(state, unprotected=noted))
    for view in troubled:
        if not (refuses_saves(view.problem_code) or any(rank.unprotected for rank in view.ranks)):
            continue
        reason = _REASONS.get(view.problem_code, EventReason.SNAPSHOTS_REFUSED)
        text = f"{reason} {essence_of(view.problem)}"
        if text not in noted and len(noted) < TEXTS_MAX:
            noted = noted.union({text})
            result = result.post(reason, view.problem, warning=True)
    return replace(result, state=replace(state, unprotected=noted))


def refusal_of(observed: ClusterView, membership: Membership) -> tuple[str, str] | None:
    """Why saves are refused until somebody changes something: in one word for conditions, and in
    words. None where they are not, or only for a while."""
    refusing = [
        view
        for view in observed.views(membership)
        if view is not None and refuses_saves(view.problem_code)
    ]
    if not refusing:
        return None
    if any(rank.unprotected for view in refusing for rank in view.ranks):
        return TRAINS_UNPROTECTED, unprotected_in_words(observed, membership)
    return SAVES_REFUSED, refusing[0].problem


def unprotected_in_words(observed: ClusterView, membership: Membership) -> str:
    """Which ranks train without protection, and why; empty when none does."""
    views = [view for view in observed.views(membership) if view is not None]
    ranks = [rank.rank for view in views for rank in view.ranks if rank.unprotected]
    if not ranks:
        return ""
    why = next((view.problem for view in views if any(r.unprotected for r in view.ranks)), "")
    verb = "trains" if len(ranks) == 1 else "train"
    return f"{ranks_in_words(ranks)} {verb} without protection ({why or 'no reason is known'})"
