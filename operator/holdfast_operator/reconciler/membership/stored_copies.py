"""The effect of durable storage on the control loop. Pure.

Daemons look into storage and decide what to load; the control loop does neither. But it needs two
of their reports: that an earlier run of the same name left generations of later epochs, which the
job has to pass before it may begin, and that storage cannot be read, which people should see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_core.snapshots.membership import Membership, Tier
from holdfast_operator.reconciler.failures.notices import asked_because
from holdfast_operator.reconciler.membership.recovering import begin_epoch
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    Condition,
    ConditionType,
    ControlState,
    EventReason,
    JobView,
)
from holdfast_operator.reconciler.placement import Moves
from holdfast_operator.reconciler.rules import Observation, RuleResult


def pass_stored_epochs(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Begin the epoch after those in storage, if this one is not: generations are ordered by epoch,
    and the next must be newer than every copy. Nothing has failed, so nothing is counted."""
    views = observation.cluster.views(membership)
    stored = max((view.stored_epoch for view in views if view is not None), default=0)
    if stored < membership.epoch:
        return RuleResult(state)
    passed = replace(state, epoch=max(state.epoch, stored))
    result = begin_epoch(observation, passed, membership, Moves(), ())
    result = replace(result, state=replace(result.state, fruitless=state.fruitless))
    return result.post(
        EventReason.EARLIER_RUN,
        f"storage holds generations of an earlier run up to epoch {stored}; epoch "
        f"{result.state.epoch} begins",
    ).wait()


def note_copies(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Remember the newest copy and where it is, so that storage without any copy is recognized as
    the wrong one (`holdfast_core.durable.choice`). A copy that is not newer may be in the previous
    storage."""
    if membership.tier is None:
        return RuleResult(state)
    views = observation.cluster.views(membership)
    reported = [v.persisted for v in views if v is not None and v.persisted is not None]
    newest, known = max(reported, default=None), state.stored
    if newest is None or (known is not None and newest <= known):
        return RuleResult(state)
    return RuleResult(replace(state, stored=newest, stored_in=membership.tier.uri))


def storage_conditions(
    observed: ClusterView, state: ControlState, refusal: str = ""
) -> tuple[Condition, ...]:
    """Conditions on whether copies can be read, and whether the newest could be written; none for
    jobs without durable storage. `refusal`: why the job may not persist to the location in its
    document."""
    membership = state.membership
    if membership is None:
        return ()
    if membership.tier is None:
        return (_not_allowed(refusal),) if refusal else ()
    views = [view for view in observed.views(membership) if view is not None]
    return _reachable(views, membership.tier), _persisted(views, membership.tier, state, refusal)


def _persisted(
    views: Sequence[JobView], tier: Tier, state: ControlState, refusal: str
) -> Condition:
    kind = ConditionType.PERSISTED
    newest = max((view.persisted for view in views if view.persisted is not None), default=None)
    held = (
        "nothing is in storage yet" if newest is None else f"generation {newest} is in {tier.uri}"
    )
    held += asked_because(state)
    if refusal:
        return _not_allowed(f"{held}; {refusal}")
    failure = next((view.persist_failure for view in views if view.persist_failure), "")
    if failure:
        message = f"{held}; the newest copy was given up: {failure}"
        return Condition(type=kind, status=False, reason="Failing", message=message)
    if newest is None:
        return Condition(type=kind, status=False, reason="NotYet", message=held)
    return Condition(type=kind, status=True, reason="InStorage", message=held)


def _not_allowed(message: str) -> Condition:
    return Condition(
        type=ConditionType.PERSISTED, status=False, reason="NotAllowed", message=message
    )


def _reachable(views: Sequence[JobView], tier: Tier) -> Condition:
    """Condition on reading copies. Daemons read none before one is needed: until then, true means
    only that no problem is known."""
    kind = ConditionType.STORAGE_REACHABLE
    problem = next((view.storage_problem for view in views if view.storage_problem), "")
    if problem:
        return Condition(type=kind, status=False, reason="CannotLoad", message=problem)
    return Condition(type=kind, status=True, reason="NothingWrong", message=tier.uri)
