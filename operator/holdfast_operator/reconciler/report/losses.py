"""The tokens that recoveries cost a job whose snapshots leave experts out. Pure.

Daemons report sums by layer of their ranks' tokens (`holdfast_core.experts.loss_reports`). Only
here do the reports of all ranks become the job's figures, and only when every rank has reported in
this epoch: until then, such as during a recovery, the earlier figures stay, so that neither the
condition nor its event depends on which rank reports first.

Trainers, not this module, decide how many experts a snapshot holds.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.experts.loss_reports import JobLoss, merged
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    Condition,
    ConditionType,
    ControlState,
    EventReason,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult


def leaves_experts_out(job: MoETrainingJob) -> bool:
    """Whether recoveries of the job can lose tokens."""
    return job.spec.snapshot.policy.leaves_experts_out


def note_losses(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Remember the job's figures, and emit one event when they pass the limit."""
    if not leaves_experts_out(observation.job):
        return RuleResult(state)
    found, known = job_loss(observation.cluster, membership), state.losses
    if found is None:
        return RuleResult(state)
    result = RuleResult(replace(state, losses=found))
    if found.passed and not (known is not None and known.passed):
        return result.post(EventReason.TOKEN_LOSS_LIMIT_PASSED, _beyond(found), warning=True)
    return result


def job_loss(observed: ClusterView, membership: Membership) -> JobLoss | None:
    """Figures of all ranks together; None while one of them has not reported."""
    views = observed.views(membership)
    report = merged(view.loss for view in views if view is not None and view.loss is not None)
    if report is None or report.ranks != membership.world_size:
        return None
    return JobLoss.of(report)


def loss_condition(job: MoETrainingJob, state: ControlState) -> Condition | None:
    """Whether recoveries have lost no more than the job allows; None for a job that captures every
    expert in every snapshot."""
    if not leaves_experts_out(job):
        return None
    kind, loss = ConditionType.TOKEN_LOSS, state.losses
    if loss is None:
        message = (
            "not all ranks have reported their tokens yet, or the model has no experts "
            "that could be left out"
        )
        return Condition(type=kind, status=None, reason="NotReported", message=message)
    if not loss.routed_tokens:
        message = (
            "snapshots leave experts out, but the trainer does not count tokens, so the cost is "
            "unknown: call session.count_tokens(layer, counts) in the training loop before "
            "session.save"
        )
        return Condition(type=kind, status=None, reason="TokensNotCounted", message=message)
    if loss.passed:
        return Condition(type=kind, status=False, reason="LimitPassed", message=_beyond(loss))
    message = f"{_lost(loss)}, within the limit of {loss.limit:.2%}; {_k(loss)}"
    return Condition(type=kind, status=True, reason="WithinLimit", message=message)


def loss_text(loss: JobLoss) -> str:
    """The figures in one line, for a status."""
    return (
        f"tokens lost {loss.lost:.2%} (MLT {loss.lost_mlt:.4f}, limit {loss.limit:.2%})"
        f"  at risk now {loss.at_risk:.2%} (MLT {loss.at_risk_mlt:.4f})"
        f"  in a snapshot {loss.k} of {loss.experts_max} experts"
    )


def _lost(loss: JobLoss) -> str:
    if not loss.lost_tokens:
        return "no recovery has lost tokens"
    return (
        f"recoveries have lost {loss.lost_tokens} of {loss.routed_tokens} tokens to older experts "
        f"(PLT {loss.lost:.2%}, MLT {loss.lost_mlt:.4f})"
    )


def _beyond(loss: JobLoss) -> str:
    newest = loss.newest
    last = (
        f"; the newest recovery, of epoch {newest.epoch}, lost {newest.lost_tokens}"
        if newest is not None
        else ""
    )
    return (
        f"{_lost(loss)}, beyond the limit of {loss.limit:.2%}{last}; {_k(loss)}. Compare the "
        f"model's validation loss with that before the recoveries; to lose less, find out why "
        f"the job recovers so often, save more often, or start with more experts in each snapshot"
    )


def _k(loss: JobLoss) -> str:
    """How many experts snapshots hold, and whether that has just changed."""
    newest = loss.newest
    grown = newest is not None and newest.k_after > newest.k_before
    since = f"K grew from {newest.k_before} to {newest.k_after} then: " if newest and grown else ""
    if loss.captures_all:
        return f"{since}snapshots hold all experts"
    return f"{since}snapshots hold {loss.k} of {loss.experts_max} experts"
