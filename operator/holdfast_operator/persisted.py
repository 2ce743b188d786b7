"""What durable storage changes for the control loop. Pure.

Daemons look into storage and decide what to load; nothing of it is done here. But two words of
theirs matter: that an earlier run of the same name left generations of later epochs there, which
the job has to pass before it may begin, and that storage cannot be read, which people should see.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.values import Membership
from holdfast_operator.draft import Draft
from holdfast_operator.recovering import begin_epoch
from holdfast_operator.replacing import Moves
from holdfast_operator.views import Condition, ConditionType, ControlState, Observed


def pass_stored_epochs(draft: Draft, membership: Membership) -> bool:
    """Begin the epoch after those that storage knows, if this one is not: generations are ordered
    by epoch, and what comes next must be newer than every copy. Nothing has failed, so nothing is
    counted."""
    views = draft.observed.views(membership)
    stored = max((view.stored_epoch for view in views if view is not None), default=0)
    if stored < membership.epoch:
        return False
    draft.state = replace(draft.state, epoch=max(draft.state.epoch, stored))
    fruitless = draft.state.fruitless
    begin_epoch(draft, membership, Moves(), ())
    draft.state = replace(draft.state, fruitless=fruitless)
    draft.tell(
        "EarlierRun",
        f"storage holds generations of an earlier run up to epoch {stored}; epoch "
        f"{draft.state.epoch} begins",
    )
    return True


def storage_condition(observed: Observed, state: ControlState) -> Condition | None:
    """Whether copies can be read; None for jobs without durable storage. Before a copy is needed
    nobody reads any, so that it says only that nothing is known to be wrong."""
    membership = state.membership
    if membership is None or membership.tier is None:
        return None
    kind = ConditionType.STORAGE_REACHABLE
    views = observed.views(membership)
    problems = [view.storage_problem for view in views if view is not None]
    problem = next((text for text in problems if text), "")
    if problem:
        return Condition(type=kind, status=False, reason="CannotLoad", message=problem)
    return Condition(type=kind, status=True, reason="NothingWrong", message=membership.tier.uri)
