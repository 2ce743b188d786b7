"""Tells once that replicas of a job have diverged. Pure.

The ranks find it out and name the unit and themselves (`holdfast._comparing`); their words come
with the daemons' heartbeats, as what keeps the job from being protected.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import ReplicasDivergedError
from holdfast_core.values import Membership
from holdfast_operator.draft import Draft


def note_divergence(draft: Draft, membership: Membership) -> None:
    """Tell when ranks begin to say so. Until nothing keeps the job from being protected, it is the
    same divergence, whatever else they say meanwhile."""
    views = draft.observed.views(membership)
    problems = [view.problem for view in views if view is not None and view.problem]
    found = [problem for problem in problems if ReplicasDivergedError.words in problem]
    if found and not draft.state.diverged:
        draft.tell("ReplicasDiverged", found[0], warning=True)
    diverged = bool(found) or (draft.state.diverged and bool(problems))
    draft.state = replace(draft.state, diverged=diverged)
