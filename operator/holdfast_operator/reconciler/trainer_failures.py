"""What trainers wrote before they failed, and scripts that fail alike before their first step.

A failure whose cause lies in the script comes back in every restart: an import that is missing, a
wrong argument. Until the job has completed a step nothing shows that its script can run at all, so
the same end three times in a row is an error of the job, not a fault to recover from. What is
alike shows in the last line: an exit code alone says too little. A rule on the exit code in
`failurePolicy.rules` says otherwise. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_core.job.parsing import FailureRule, On
from holdfast_core.last_lines import essence_of
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.counters import Outcome
from holdfast_operator.reconciler.evidence import Cause
from holdfast_operator.reconciler.failure_rules import is_permanent
from holdfast_operator.reconciler.last_failure import TrainerFailure
from holdfast_operator.reconciler.lookups import ranks_in
from holdfast_operator.reconciler.steps import Look, Step, end
from holdfast_operator.reconciler.views import (
    ControlState,
    EventReason,
)

ALIKE_MAX = 3
"""Epochs in a row that end alike before the job's first step, until the job has failed."""
TOLD_CHARACTERS_MAX = 700
"""Of last lines in an event or a reason, which Kubernetes cuts at 1024; the status has them all."""


def note_first_step(look: Look, state: ControlState, membership: Membership) -> Step:
    """Remember that the job's script has run."""
    start = state.started_from
    if state.stepped or start is None:
        return Step(state)
    stepped = any(rank.step > start for rank in ranks_in(look.observed, membership))
    return Step(replace(state, stepped=stepped))


def note_failure(state: ControlState, membership: Membership, causes: Sequence[Cause]) -> Step:
    """Remember the rank or agent whose failure was seen first in this epoch, while it is still a
    cause, and tell what it wrote when that is news."""
    cause, before = _telling(causes), state.failure
    if cause is None:
        return Step(state)
    again = before is not None and before.epoch == membership.epoch
    if before is not None and again and any(each.text == before.text for each in causes):
        return Step(state)
    found = TrainerFailure(
        epoch=membership.epoch,
        member=cause.member if cause.member is not None else -1,
        text=cause.text,
        exit_code=cause.exit_code,
        last_lines=cause.last_lines,
    )
    alike = before is not None and not again and _essence(before) == _essence(found)
    if before is not None and alike:
        found = replace(found, times=before.times + 1)
    step = Step(replace(state, failure=found))
    if found.last_lines and not alike:
        return step.tell(
            EventReason.LAST_LINES, with_last_lines(cause.text, cause.last_lines), warning=True
        )
    return step


def fail_alike(
    look: Look, state: ControlState, membership: Membership, rules: Sequence[FailureRule]
) -> Step:
    """End a job whose script has ended alike too often before its first step."""
    failure = state.failure
    if failure is None:
        return Step(state)
    if failure.epoch != membership.epoch:  # this one ended by something else
        return Step(replace(state, failure=replace(failure, times=0)))
    if state.stepped or failure.times < ALIKE_MAX or not failure.last_lines:
        return Step(state)
    if not is_permanent(failure.exit_code) or any(rule.on is On.EXIT_CODE for rule in rules):
        return Step(state)
    text = (
        f"{failure.text}, {failure.times} times alike before the job's first step; correct "
        f"its script (or restart it all the same, by a failure rule on ExitCode)"
    )
    reason = with_last_lines(text, failure.last_lines)
    return end(look, state, Outcome.FAILED, reason, "FailsBeforeFirstStep")


def with_last_lines(text: str, lines: str) -> str:
    """What failed, and below it what it wrote last."""
    if len(lines) > TOLD_CHARACTERS_MAX:
        lines = lines[-TOLD_CHARACTERS_MAX:].partition("\n")[2] or lines[-TOLD_CHARACTERS_MAX:]
    return f"{text}; it wrote last:\n{lines}" if lines else text


def _telling(causes: Sequence[Cause]) -> Cause | None:
    """The failure that says most: of those that ended by themselves, one with last lines."""
    exits = [cause for cause in causes if cause.on is On.EXIT_CODE]
    return next((cause for cause in exits if cause.last_lines), exits[0] if exits else None)


def _essence(failure: TrainerFailure) -> tuple[int | None, str]:
    return failure.exit_code, essence_of(failure.last_lines)
