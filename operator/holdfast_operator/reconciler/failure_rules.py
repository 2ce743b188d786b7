"""Which failure rule a cause meets, and what happens to a cause that no rule matches. Pure.

The first rule that matches wins. Causes are called by what rules say after `when`:

- `NodeLost`: the daemon is silent for too long, the node is gone, or its memory is.
- `Disruption`: the cluster took the pod away (preemption, eviction, taint, deletion with its node),
  or is about to take the node away. By default it is replaced and does not count.
- `Hang`: no rank makes progress.
- `ExitCode`: a worker failed with a code that its agent has seen, or the agent itself did. A worker
  that died of signal n has code 128 + n: out of memory is 137.
- Everything else has no name and is met by `Any` alone: a rank that is lost without a code, an
  agent that waits. A pod that somebody deleted is among them, and counts: it cannot be told from a
  crash, and something that deletes pods again and again must come to an end, as it does for a Job.

The default rules end with `Any`, so that by default every exit code is restarted in place and
counts: a Python traceback (code 1) may be a bug, or a lost connection. Without a rule that matches
an exit code, codes 1 to 127 are permanent and fail the job, except those below; codes from 128 on
(signals) are restarted in place. Any other cause without a rule is restarted in place (its node
replaced if that is lost), and counts.

Code 1 is also what ranks exit with when another one dies. A rule that fails the job on it is met
only where nothing else explains it (`reconciler.evidence.principal`).
"""

from __future__ import annotations

from holdfast_core.job.parsing import FailureAction, FailureRule, MoETrainingJob, On
from holdfast_operator.reconciler.evidence import Cause

RETRYABLE = frozenset({42, 69, 75})
"""Codes below 128 that ask for a restart: 42 by convention of ours; 69 and 75 (EX_UNAVAILABLE,
EX_TEMPFAIL) are what agents exit with when their daemon stayed away, or the job ended for them."""

SIGNALS = 128
"""Codes above are 128 + the signal."""


def rule_for(job: MoETrainingJob, cause: Cause) -> FailureRule:
    """The first rule that matches, or what stands for it when none does."""
    for rule in job.spec.failure_policy.rules:
        matches_code = rule.on is On.EXIT_CODE and cause.exit_code in rule.values
        if rule.on is On.ANY or matches_code or (rule.on is cause.on and not rule.values):
            return rule
    if cause.on is On.EXIT_CODE and is_permanent(cause.exit_code):
        return FailureRule(on=On.EXIT_CODE, action=FailureAction.FAIL)
    return FailureRule(on=On.ANY, action=FailureAction.RESTART_IN_PLACE)


def is_permanent(code: int | None) -> bool:
    """Whether an exit code alone says that trying again is useless; None is unknown."""
    return code is not None and 0 < code < SIGNALS and code not in RETRYABLE


def tell_codes_apart(job: MoETrainingJob) -> bool:
    """Whether it matters with what code a rank exited: then its code is waited for."""
    rules = job.spec.failure_policy.rules
    general = next((rule for rule in rules if rule.on is On.ANY), None)
    if general is None:
        return True
    return any(
        rule.on is On.EXIT_CODE
        and (rule.action, rule.count_towards_max) != (general.action, general.count_towards_max)
        for rule in rules
    )
