"""What a failed job keeps, for how long, and how a person resumes it. Pure.

A person may be able to remove the reason for a failure: a rule that was too strict, a script, nodes
that are back. So daemons keep the job's snapshots for `failurePolicy.keepFailedSeconds`. During
that time the job can be persisted, and resumed by a new value of an annotation, because resuming is
a person's decision and does not follow from the spec. A resumed job continues like one that was
suspended (`suspending`), and its deadlines and the window of its restarts start again.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import ControlState, DropJob, EventReason
from holdfast_operator.reconciler.rules import Observation, RuleResult

REASON_CHARACTERS_MAX = 300


def kept_until(job: MoETrainingJob, state: ControlState) -> float | None:
    """Time until which daemons keep the snapshots of a failed job, which is deleted no later; None
    when they do not."""
    if not state.kept or state.ended_at is None:
        return None
    kept_s, ttl_s = job.spec.failure_policy.keep_failed_seconds, job.spec.ttl_seconds_after_finished
    return state.ended_at + (kept_s if ttl_s is None else min(kept_s, ttl_s))


def free_when_due(observation: Observation, state: ControlState) -> RuleResult:
    """Have daemons free what an ended job does not keep, or no longer keeps."""
    until, result = kept_until(observation.job, state), RuleResult(state)
    if until is not None and observation.now < until:
        return result
    if until is not None:
        freed_s = observation.now - (state.ended_at or observation.now)
        result = RuleResult(replace(state, kept=False)).post(
            EventReason.SNAPSHOTS_FREED, f"the job failed {freed_s:.0f} s ago: its memory is freed"
        )
    if any(node.job is not None and node.connected for node in observation.cluster.nodes.values()):
        result = result.act(DropJob())
    return result


def resume_failed(observation: Observation, state: ControlState) -> RuleResult:
    """Resume a failed job if a person asks for it; its outcome is None then. A request from before
    the job's end does not count."""
    request = observation.job.resume_request
    if state.outcome is None or not request or request == state.resume_request:
        return RuleResult(replace(state, resume_request=request))
    refusal = _refusal(state)
    if refusal:
        answered = RuleResult(replace(state, resume_request=request))
        return answered.post(EventReason.NOT_RESUMED, refusal, warning=True)
    if state.kept and state.membership is None:
        return RuleResult(state)  # no daemon that holds it has dialled yet
    why = state.outcome_reason.partition("\n")[0][:REASON_CHARACTERS_MAX]
    resumed = replace(
        state,
        outcome=None,
        outcome_reason="",
        outcome_word="",
        ended_at=None,
        kept=False,
        resume_request=request,
        # Pods of another controller were not stopped: what is wrong with them shows again.
        suspended=state.membership is not None and observation.pods.stops_with_job,
        active_since=None,
        ran=False,
        restarts=(),
        fruitless=0,
        failure=None if state.failure is None else replace(state.failure, times=0),
    )
    return RuleResult(resumed).post(
        EventReason.RESUMED, f"a person resumes the job, which had failed: {why}"
    )


def _refusal(state: ControlState) -> str:
    """Why the job cannot be resumed, and what can be done; empty when it can."""
    if state.outcome is Outcome.COMPLETE:
        return "the job is complete: there is nothing to resume"
    if state.kept or state.epoch <= state.void_epoch:  # or no member ever had a node
        return ""
    storage = (
        "it begins from its newest copy in durable storage"
        if state.stored is not None
        else "it begins anew, because it has no copy in durable storage"
    )
    return (
        f"the snapshots of the failed job are no longer in memory (failurePolicy.keepFailedSeconds)"
        f": delete it and apply it again; {storage}"
    )
