"""Short texts on lists and exit codes, for events and conditions. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from holdfast_core.exit_codes import (
    BEGINS_ANEW,
    FAILED_CHECK,
    PROCESS_ENDS,
    PROTECTION_REQUIRED,
)
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.kernel_messages import device_in
from holdfast_core.states import EndReason
from holdfast_operator.reconciler.observe.views import INIT_FAILED

KILLED = 128 + signal.SIGKILL
"""Exit code of a process that SIGKILL ended."""
NAMED_MAX = 8
"""Names in a list for people; a job of thousands of members must not fill its own status."""


def listed(items: Iterable[object]) -> str:
    """`a, b, c`; for a long list its beginning, and how many more there are."""
    names = [str(item) for item in items]
    if len(names) <= NAMED_MAX:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED_MAX])} and {len(names) - NAMED_MAX} more"


def roughly(seconds: float) -> str:
    """`20 s`, `3 min`: coarse, so that a status that shows how long something takes is rarely
    rewritten."""
    return f"{seconds // 10 * 10:.0f} s" if seconds < 120 else f"{seconds // 60:.0f} min"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 3, 4`."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {listed(found)}"


def failed_check(job: MoETrainingJob, code: int | None, reason: str = "") -> bool:
    """Whether an agent ended because a check of its node failed, by its exit code and the reason of
    Kubernetes. In a job that does not check its nodes this code is another program's."""
    checks = job.spec.failure_policy.check_nodes
    return checks and code == FAILED_CHECK and reason != INIT_FAILED


def checked_device(last_lines: str) -> str:
    """The GPU that the reason of a failed check names, which is the last line of an agent that does
    not take part; empty if it names none."""
    return device_in(last_lines.rpartition("\n")[2])


def agent_exit_in_words(job: MoETrainingJob, code: int, reason: str = "", message: str = "") -> str:
    """How an agent of the job ended, as `exit_in_words` does."""
    if failed_check(job, code, reason):
        return f"did not take part, because a check of its node failed (code {code})"
    return exit_in_words(code, reason, message)


def exit_in_words(code: int, reason: str = "", message: str = "") -> str:
    """`exited with code 3`, or `was killed by SIGKILL (code 137)`, or why Holdfast ended it.

    Args:
        reason: why, in one word of Kubernetes; empty or `Error` where only the code is known.
        message: the same in a sentence.
    """
    if code == BEGINS_ANEW:
        return f"ended so that training starts from the beginning (code {code})"
    if code == PROCESS_ENDS:
        return f"ended with its training world (code {code})"
    if code == PROTECTION_REQUIRED:
        return f"ended because it requires protection and its saves are refused (code {code})"
    if reason == INIT_FAILED:
        return f"was not started: {message}"
    if reason == EndReason.OOM_KILLED and code == KILLED:
        return f"was killed for lack of memory (OOMKilled, code {code})"
    if reason == EndReason.OOM_KILLED:
        return (
            f"exited with code {code}, after a process beside it was killed for lack of memory "
            f"(OOMKilled)"
        )
    if reason == EndReason.HARDWARE_FAULT:
        return f"{exit_in_words(code)}, after its kernel reported a fault of hardware"
    if reason not in ("", "Error"):
        return f"ended: {': '.join(filter(None, (reason, message)))} (code {code})"
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exited with code {code}"
    return f"was killed by {name} (code {code})"
