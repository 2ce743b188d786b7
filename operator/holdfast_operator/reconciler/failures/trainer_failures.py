"""Last lines of failed trainers, and scripts that fail alike before their first step.

A failure that the script causes returns in every restart: a missing import, a wrong argument. Until
the job has completed a step, nothing shows that its script can run at all, so the same end three
times in a row is an error of the job, not a fault to recover from. Two ends are alike when both
exit code and last line are equal: an exit code alone is too little. A rule on the exit code in
`failurePolicy.rules` overrides this. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_core.job.parsing import FailureRule, On
from holdfast_core.last_lines import essence_of
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.failures.failure_rules import is_permanent
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.last_failure import TrainerFailure
from holdfast_operator.reconciler.observe.lookups import ranks_in
from holdfast_operator.reconciler.observe.views import (
    ControlState,
    EventReason,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult, end

ALIKE_MAX = 3
"""Epochs in a row that must end alike before the job's first step for the job to have failed."""
LINES_CHARACTERS_MAX = 700
"""Characters of last lines in an event or a reason, which Kubernetes cuts at 1024; the status has
them all."""
KERNEL_CHARACTERS_MAX = 250
"""Those of the kernel's messages among them."""


def note_first_step(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Remember whether the job has completed a step."""
    start = state.started_from
    if state.stepped or start is None:
        return RuleResult(state)
    stepped = any(rank.step > start for rank in ranks_in(observation.cluster, membership))
    return RuleResult(replace(state, stepped=stepped))


def note_failure(
    state: ControlState, membership: Membership, causes: Sequence[Cause]
) -> RuleResult:
    """Remember the rank or agent whose failure was seen first in this epoch, while it is still a
    cause; emit an event with its last lines when they are new."""
    cause, before = _decisive(causes, state.stepped), state.failure
    if cause is None:
        return RuleResult(state)
    again = before is not None and before.epoch == membership.epoch
    if before is not None and again and any(each.text == before.text for each in causes):
        return RuleResult(state)
    found = TrainerFailure(
        epoch=membership.epoch,
        member=cause.member if cause.member is not None else -1,
        text=cause.text,
        exit_code=cause.exit_code,
        last_lines=cause.last_lines,
        kernel_messages=cause.kernel_messages,
    )
    alike = before is not None and not again and _essence(before) == _essence(found)
    if before is not None and alike:
        found = replace(found, times=before.times + 1)
    result = RuleResult(replace(state, failure=found))
    if (found.last_lines or found.kernel_messages) and not alike:
        return result.post(EventReason.LAST_LINES, with_last_lines(cause.text, cause), warning=True)
    return result


def fail_alike(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    causes: Sequence[Cause],
    rules: Sequence[FailureRule],
) -> RuleResult:
    """End a job whose script has failed alike too often before its first step. Epochs that Holdfast
    has ended, or whose node is at fault, are passed over: they show nothing of the script, for or
    against it."""
    failure = state.failure
    if failure is None or all(c.ended_by_holdfast or c.unfit_node for c in causes):
        return RuleResult(state)
    if failure.epoch != membership.epoch:  # this one ended for another reason
        return RuleResult(replace(state, failure=replace(failure, times=0)))
    if state.stepped or failure.times < ALIKE_MAX or not failure.last_lines:
        return RuleResult(state)
    if not is_permanent(failure.exit_code) or any(rule.on is On.EXIT_CODE for rule in rules):
        return RuleResult(state)
    text = (
        f"{failure.text}, {failure.times} times in the same way before the job's first step; "
        f"correct its script (or restart it all the same, by a failure rule on ExitCode)"
    )
    reason = with_last_lines(text, failure)
    return end(observation, state, Outcome.FAILED, reason, "FailsBeforeFirstStep")


def with_last_lines(text: str, failed: Cause | TrainerFailure) -> str:
    """`text`, and below it what the kernel wrote about what failed, and its own last lines."""
    kernel = _end_of(failed.kernel_messages, KERNEL_CHARACTERS_MAX)
    lines = _end_of(failed.last_lines, LINES_CHARACTERS_MAX - len(kernel))
    text = f"{text}; the kernel wrote:\n{kernel}" if kernel else text
    between = "\nIt wrote last:" if kernel else "; it wrote last:"
    return f"{text}{between}\n{lines}" if lines else text


def _end_of(lines: str, characters: int) -> str:
    """The last of `lines`, with `characters` at most."""
    if len(lines) <= characters:
        return lines
    return lines[-characters:].partition("\n")[2] or lines[-characters:]


def _decisive(causes: Sequence[Cause], stepped: bool) -> Cause | None:
    """The most informative failure: a failure with last lines, among those that ended by
    themselves. None where Holdfast has ended all of them: then they have not failed.

    Args:
        stepped: whether the script can run: then a fault of hardware tells more than what other
            ranks wrote.
    """
    exits = [cause for cause in causes if cause.on is On.EXIT_CODE and not cause.ended_by_holdfast]
    faults = [cause for cause in exits if cause.hardware_fault]
    if faults and stepped:
        return faults[0]
    exits.sort(key=lambda cause: cause.hardware_fault)
    return next((cause for cause in exits if cause.last_lines), exits[0] if exits else None)


def _essence(failure: TrainerFailure) -> tuple[int | None, str]:
    return failure.exit_code, essence_of(failure.last_lines)
