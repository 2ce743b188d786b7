"""Which members the next epoch goes on without, and how few of them are enough. Pure.

A job with `minNodes` below `nodes` does not wait for a node: if no spare is ready, it goes on at
once with the members that are left, and grows again later (`growing`). A spare that is ready
replaces the lost node instead, since that costs no more. Below `minNodes` the job waits for a node,
as one without `minNodes` does.

Members whose memory may still be there leave only while their parity groups can rebuild it
(`replacing`), and those that still train leave right after a generation was protected, so that
nothing is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast_core.job.parsing import FailureAction as RuleAction
from holdfast_core.job.parsing import FailureRule, MoETrainingJob, On
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.replacing import Moves
from holdfast_operator.reconciler.steps import Look
from holdfast_operator.reconciler.views import ControlState

NO_REPLACEMENT_S = 300.0
"""How long a job waits for a node to replace a lost one when no rule sets the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strength:
    """Members that a job has, wants and needs."""

    active: int
    desired: int
    least: int


def strength(job: MoETrainingJob, membership: Membership | None) -> Strength:
    """Strength of the job; without a membership, no member is active."""
    return Strength(
        active=0 if membership is None else len(membership.members),
        desired=job.spec.nodes,
        least=job.spec.least_nodes,
    )


def patience_s(job: MoETrainingJob) -> float:
    """Seconds that the job waits for a node that it cannot do without before it fails."""
    rule = _no_replacement(job)
    if rule is None:
        return NO_REPLACEMENT_S
    after_s = rule.after_seconds or 0.0
    return max(after_s, NO_REPLACEMENT_S) if rule.action is RuleAction.SHRINK else after_s


def shrinks_after_s(job: MoETrainingJob) -> float:
    """Seconds that the job waits for a node before it goes on without."""
    rule = _no_replacement(job)
    if rule is None or rule.action is not RuleAction.SHRINK:
        return 0.0
    return rule.after_seconds or 0.0


def just_saved(look: Look, state: ControlState, membership: Membership) -> bool:
    """Whether a generation of this epoch was found to be safe at this look: the best moment for a
    recovery that nothing has made necessary."""
    saved = state.saved
    return saved is not None and saved.epoch == membership.epoch and state.saved_at == look.now


def leave_out(
    look: Look,
    state: ControlState,
    membership: Membership,
    moves: Moves,
    rules: Iterable[FailureRule],
) -> Moves:
    """`moves`, with the members that the next epoch goes on without."""
    job, since = look.job, state.no_replacement_since
    spare = len(membership.members) - job.spec.least_nodes
    if spare <= 0:
        return moves
    waited_s = 0.0 if since is None else look.now - since
    lost = [*moves.unplaced, *(moves.held if waited_s >= patience_s(job) else ())]
    at_once = any(rule.action is RuleAction.SHRINK for rule in rules)
    if len(lost) > spare or (lost and not at_once and waited_s < shrinks_after_s(job)):
        return moves
    leaving = set(lost)
    if state.ran and len(moves.stuck) <= spare - len(leaving):
        leaving.update(moves.stuck)
    if just_saved(look, state, membership):
        leaving.update(moves.warned[: spare - len(leaving)])
    return replace(
        moves,
        leaving=frozenset(leaving),
        unplaced=[],
        held=[member for member in moves.held if member not in leaving],
    )


def _no_replacement(job: MoETrainingJob) -> FailureRule | None:
    rules = job.spec.failure_policy.rules
    return next((rule for rule in rules if rule.on is On.NO_REPLACEMENT), None)
