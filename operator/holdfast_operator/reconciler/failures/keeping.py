"""What a failed job keeps, for how long, and how a person has it go on. Pure.

A job that has failed may have failed for a reason that a person can remove: a rule that was too
strict, a script, nodes that are back. So daemons keep what they hold for
`failurePolicy.keepFailedSeconds`. In that time it can be persisted, and the job resumed: by a new
text of an annotation, since it is the word of a person and nothing that follows from the spec. A
resumed job goes on as one that was suspended does (`suspending`), its deadlines and the window of
its restarts begin anew.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import ControlState, DropJob, EventReason
from holdfast_operator.reconciler.steps import Look, Step

REASON_CHARACTERS_MAX = 300


def kept_until(job: MoETrainingJob, state: ControlState) -> float | None:
    """Time until which daemons keep the snapshots of a failed job, which is deleted no later; None
    when they do not."""
    if not state.kept or state.ended_at is None:
        return None
    kept_s, ttl_s = job.spec.failure_policy.keep_failed_seconds, job.spec.ttl_seconds_after_finished
    return state.ended_at + (kept_s if ttl_s is None else min(kept_s, ttl_s))


def free_when_due(look: Look, state: ControlState) -> Step:
    """Have daemons free what an ended job does not keep, or no longer."""
    until, step = kept_until(look.job, state), Step(state)
    if until is not None and look.now < until:
        return step
    if until is not None:
        freed_s = look.now - (state.ended_at or look.now)
        step = Step(replace(state, kept=False)).post(
            EventReason.SNAPSHOTS_FREED, f"the job failed {freed_s:.0f} s ago: its memory is freed"
        )
    if any(node.job is not None and node.connected for node in look.observed.nodes.values()):
        step = step.act(DropJob())
    return step


def resume_failed(look: Look, state: ControlState) -> Step:
    """Have a failed job go on if a person asks for it; its outcome is None then. A request from
    before its end is none."""
    request = look.job.resume_request
    if state.outcome is None or not request or request == state.resume_request:
        return Step(replace(state, resume_request=request))
    refusal = _refusal(state)
    if refusal:
        answered = Step(replace(state, resume_request=request))
        return answered.post(EventReason.NOT_RESUMED, refusal, warning=True)
    if state.kept and state.membership is None:
        return Step(state)  # no daemon that holds it has dialled yet
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
        suspended=state.membership is not None and not look.job.spec.trainer.external,
        active_since=None,
        ran=False,
        restarts=(),
        fruitless=0,
        failure=None if state.failure is None else replace(state.failure, times=0),
    )
    return Step(resumed).post(
        EventReason.RESUMED, f"a person has the job go on, which had failed: {why}"
    )


def _refusal(state: ControlState) -> str:
    """Why the job cannot go on, and what can be done; empty when it can."""
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
