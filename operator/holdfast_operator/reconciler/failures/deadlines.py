"""How long a job may take, and how long it is kept after its end. Pure.

Deadlines count from the first look at the job, or from its last resumption, as those of a
Kubernetes Job do.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import ControlState, DeleteJob
from holdfast_operator.reconciler.steps import Look, Step, end


def note_activity(look: Look, state: ControlState) -> Step:
    """Start the deadlines of a job that is not suspended."""
    if state.active_since is not None:
        return Step(state)
    return Step(replace(state, active_since=look.now, ran=False))


def fail_when_overdue(look: Look, state: ControlState) -> Step:
    """Fail the job if a deadline has passed."""
    spec = look.job.spec
    assert state.active_since is not None
    active_s = look.now - state.active_since
    limit_s = spec.active_deadline_seconds
    if limit_s is not None and active_s >= limit_s:
        reason = f"the job is not complete after spec.activeDeadlineSeconds = {limit_s:g} s"
        return end(look, state, Outcome.FAILED, reason, "DeadlineExceeded")
    limit_s = spec.pre_running_deadline_seconds
    if limit_s is not None and not state.ran and active_s >= limit_s:
        reason = f"not all ranks were at work after spec.preRunningDeadlineSeconds = {limit_s:g} s"
        return end(look, state, Outcome.FAILED, reason, "PreRunningDeadlineExceeded")
    return Step(state)


def delete_when_due(look: Look, state: ControlState) -> Step:
    """Ask for the deletion of a job that ended long enough ago."""
    ttl_s, ended_at = look.job.spec.ttl_seconds_after_finished, state.ended_at
    if ttl_s is None or ended_at is None or look.now - ended_at < ttl_s:
        return Step(state)
    return Step(state, (DeleteJob(),))
