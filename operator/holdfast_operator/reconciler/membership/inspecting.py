"""Inspect the processes of a job that hangs, before anything restarts them. Pure.

A restart destroys the only evidence of why a job hangs. So once a hang is noticed, launchers are
asked what their workers are doing, and the answers are waited for; then the failure rules apply as
to any failure. The wait is short and bounded, because launchers may be old, stopped or lost. A new
control loop goes on with the inspection that the daemons report.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from holdfast_core.job.hang_story import stacks_in_words
from holdfast_core.job.parsing import On
from holdfast_core.last_lines import within_bytes
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.inspections import (
    asked_in,
    diagnosis_of,
    hang_status,
    members_answered,
    reported,
)
from holdfast_operator.reconciler.observe.lookups import ranks_in
from holdfast_operator.reconciler.observe.views import (
    EVENT_BYTES_MAX,
    AskedInspection,
    ControlState,
    EventReason,
    Inspect,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult

ANSWER_S = 10.0
"""Time that launchers get to answer: they look for a request every two seconds."""
TAKEN_OVER_S = 30.0
"""Age up to which a new control loop takes an inspection over, instead of asking for another."""


def inspect_hang(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    causes: Collection[Cause],
) -> RuleResult:
    """Ask for an inspection if the job hangs, and wait until it is answered, or time is over."""
    if all(cause.on is not On.HANG for cause in causes):
        return RuleResult(state)
    asked = asked_in(state, membership)
    if asked is None:
        asked = _begun(observation, membership)
        result = RuleResult(replace(state, inspection=asked))
        result = result.act(Inspect(epoch=asked.epoch, number=asked.number))
    else:
        result = RuleResult(state)
    if asked.over:
        return result
    answered = members_answered(observation.cluster, membership, asked)
    missing = len(membership.members) - len(answered)
    if missing and observation.now - asked.asked_at < ANSWER_S:
        text = "; ".join(cause.text for cause in causes if cause.on is On.HANG)
        return result.wait(
            f"{text}; the processes are inspected: {len(answered)} of "
            f"{len(membership.members)} launchers have answered"
        )
    over = replace(result.state, inspection=replace(asked, over=True))
    diagnosis = diagnosis_of(observation.cluster, membership, over)
    assert diagnosis is not None
    hang = hang_status(observation.cluster, membership, asked, diagnosis)
    over = replace(over, hang=hang, hung_at=observation.now)
    calls = "".join(f". Innermost calls of {each}" for each in stacks_in_words(hang))
    text = f"the job hangs in epoch {membership.epoch}: {diagnosis.text}{calls}"
    return replace(result, state=over).post(
        EventReason.HANG_INSPECTED, within_bytes(text, EVENT_BYTES_MAX), warning=True
    )


def note_passed_hang(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Forget the inspection of a hang that has passed by itself, and emit an event with what it has
    shown."""
    if asked_in(state, membership) is None:
        return RuleResult(replace(state, inspection=None) if state.inspection else state)
    diagnosis = diagnosis_of(observation.cluster, membership, state)
    assert diagnosis is not None
    text = f"ranks make progress again, and nothing is restarted; before: {diagnosis.text}"
    result = RuleResult(replace(state, inspection=None))
    return result.post(EventReason.HANG_PASSED, text, warning=True)


def _begun(observation: Observation, membership: Membership) -> AskedInspection:
    """A new inspection, or one that an earlier control loop has asked for in this hang."""
    made = reported(observation.cluster, membership).values()
    number = max((each.number for each in made), default=0)
    ages_s = [each.age_s for each in made if each.number == number]
    at_work = [rank for rank in ranks_in(observation.cluster, membership) if rank.at_work]
    quiet_s = min((rank.idle_s for rank in at_work), default=TAKEN_OVER_S)
    if ages_s and max(ages_s) <= min(quiet_s, TAKEN_OVER_S):
        asked_at = observation.now - max(ages_s)
        return AskedInspection(epoch=membership.epoch, number=number, asked_at=asked_at)
    return AskedInspection(epoch=membership.epoch, number=number + 1, asked_at=observation.now)
