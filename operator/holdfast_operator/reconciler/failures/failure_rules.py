"""Which failure rule applies to a cause, and what happens to a cause that no rule matches. Pure.

The first rule that matches wins. Causes have the names that rules give after `when`:

- `NodeLost`: the daemon is silent for too long, the node is gone, or its memory is.
- `Disruption`: the cluster took the pod away (preemption, eviction, taint, deletion with its node),
  refused it on its node, or is about to take the node away (`kube.pod_reasons` has all reasons). By
  default it is replaced and does not count.
- `Hang`: no rank makes progress.
- `ExitCode`: a worker failed with a code that its agent has seen, or the agent itself did. A worker
  that died of signal n has code 128 + n. Of an init container that failed it is that one's code.
- Everything else has no name, and only `Any` matches it: a rank that is lost without a code, an
  agent that waits. A pod that a person deleted is among them, and counts: it cannot be told from a
  crash, and something that deletes pods again and again must come to an end, as it does for a Job.

The default rules end with `Any`, so that by default every exit code leads to a restart in place
that counts: a Python traceback (code 1) may be a bug, or a lost connection. The exception is the
code with which trainers end because protection is required and refused: only a rule that names it
lets the job try again. A member whose node failed a check, or whose rank ended after the kernel had
reported a fault of hardware, is replaced like one of a lost node, unless a rule names the code.

Without a rule that matches an exit code, codes 1 to 127 are permanent and fail the job, except
those in `RETRYABLE`; codes from 128 on (signals) lead to a restart in place. So does any other
cause without a rule (its node is replaced if that is lost), and it counts.

Ranks also exit with code 1 when another one dies. A rule that fails the job on it applies only
where nothing else explains it (`reconciler.evidence.principal`).
"""

from __future__ import annotations

from holdfast_core.exit_codes import PROTECTION_REQUIRED, RETRYABLE
from holdfast_core.job.parsing import FailureAction, FailureRule, MoETrainingJob, On
from holdfast_operator.reconciler.observe.evidence import Cause

SIGNALS = 128
"""Codes above this are 128 + the signal."""


def rule_for(job: MoETrainingJob, cause: Cause) -> FailureRule:
    """Find the first rule that matches, or the default when none does. A straggler and wrong bytes
    have fields of their own in the policy, and the rules for failures are not for them."""
    if cause.straggles or cause.corrupts or cause.was_corrupt:
        return FailureRule(on=On.ANY, action=FailureAction.REPLACE_NODE, count_towards_max=False)
    for rule in job.spec.failure_policy.rules:
        matches_code = rule.on is On.EXIT_CODE and cause.exit_code in rule.values
        if rule.on is On.ANY and (cause.exit_code == PROTECTION_REQUIRED or cause.unfit_node):
            continue
        if rule.on is On.ANY or matches_code or (rule.on is cause.on and not rule.values):
            return rule
    if cause.unfit_node:
        return FailureRule(on=On.ANY, action=FailureAction.REPLACE_NODE)
    if cause.on is On.EXIT_CODE and is_permanent(cause.exit_code):
        return FailureRule(on=On.EXIT_CODE, action=FailureAction.FAIL)
    return FailureRule(on=On.ANY, action=FailureAction.RESTART_IN_PLACE)


def is_permanent(code: int | None) -> bool:
    """Whether an exit code alone shows that trying again is useless; None means that the code is
    unknown."""
    return code is not None and 0 < code < SIGNALS and code not in RETRYABLE


def distinguishes_exit_codes(job: MoETrainingJob) -> bool:
    """Whether the exit code of a rank can change what is done: then the code is waited for."""
    if job.spec.snapshot.require_protection:
        return True
    rules = job.spec.failure_policy.rules
    general = next((rule for rule in rules if rule.on is On.ANY), None)
    if general is None:
        return True
    return any(
        rule.on is On.EXIT_CODE
        and (rule.action, rule.count_towards_max) != (general.action, general.count_towards_max)
        for rule in rules
    )
