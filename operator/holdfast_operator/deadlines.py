"""How long a job may take, and how long it is kept after its end. Pure.

Deadlines count from the first look at the job, or from its last resumption, as those of a Job do.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.draft import Draft
from holdfast_operator.views import DeleteJob, Outcome


def note_activity(draft: Draft) -> None:
    """The job is not suspended: its deadlines run."""
    if draft.state.active_since is None:
        draft.state = replace(draft.state, active_since=draft.now, ran=False)


def is_overdue(draft: Draft) -> bool:
    """Fail the job if a deadline is over; whether that was so."""
    spec, state = draft.job.spec, draft.state
    assert state.active_since is not None
    active_s = draft.now - state.active_since
    limit_s = spec.active_deadline_seconds
    if limit_s is not None and active_s >= limit_s:
        reason = f"the job is not complete after spec.activeDeadlineSeconds = {limit_s:g} s"
        draft.end(Outcome.FAILED, reason, "DeadlineExceeded")
        return True
    limit_s = spec.pre_running_deadline_seconds
    if limit_s is not None and not state.ran and active_s >= limit_s:
        reason = f"not all ranks were at work after spec.preRunningDeadlineSeconds = {limit_s:g} s"
        draft.end(Outcome.FAILED, reason, "PreRunningDeadlineExceeded")
        return True
    return False


def delete_when_due(draft: Draft) -> None:
    """Ask for the deletion of a job that ended long enough ago."""
    ttl_s, ended_at = draft.job.spec.ttl_seconds_after_finished, draft.state.ended_at
    if ttl_s is not None and ended_at is not None and draft.now - ended_at >= ttl_s:
        draft.actions.append(DeleteJob())
