"""How long a job may run, and how long it is kept after its end. Pure.

As for a Kubernetes Job, deadlines count from the first turn of the job's control loop, or from its
last resumption.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import ControlState, DeleteJob
from holdfast_operator.reconciler.rules import Observation, RuleResult, end


def note_activity(observation: Observation, state: ControlState) -> RuleResult:
    """Start the deadlines of a job that is not suspended."""
    if state.active_since is not None:
        return RuleResult(state)
    return RuleResult(replace(state, active_since=observation.now, ran=False))


def fail_when_overdue(observation: Observation, state: ControlState) -> RuleResult:
    """Fail the job if a deadline has passed."""
    spec = observation.job.spec
    assert state.active_since is not None
    active_s = observation.now - state.active_since
    limit_s = spec.active_deadline_seconds
    if limit_s is not None and active_s >= limit_s:
        reason = f"the job is not complete after spec.activeDeadlineSeconds = {limit_s:g} s"
        return end(observation, state, Outcome.FAILED, reason, "DeadlineExceeded")
    limit_s = spec.pre_running_deadline_seconds
    if limit_s is not None and not state.ran and active_s >= limit_s:
        reason = f"not all ranks were at work after spec.preRunningDeadlineSeconds = {limit_s:g} s"
        return end(observation, state, Outcome.FAILED, reason, "PreRunningDeadlineExceeded")
    return RuleResult(state)


def delete_when_due(observation: Observation, state: ControlState) -> RuleResult:
    """Ask for the deletion of a job that ended long enough ago."""
    ttl_s, ended_at = observation.job.spec.ttl_seconds_after_finished, state.ended_at
    if ttl_s is None or ended_at is None or observation.now - ended_at < ttl_s:
        return RuleResult(state)
    return RuleResult(state, (DeleteJob(),))
