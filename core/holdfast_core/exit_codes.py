"""Exit codes with a meaning of their own: of trainers, and of the launchers that start them.

Those from 79 on belong to Holdfast alone. A trainer exits with 79 or 80 when Holdfast, and not the
script, has decided that it ends; so these never count as failures of the script. They lie outside
the ranges that others use: 1 and 2 (Python, shells), 64 to 78 (sysexits), 126 and 127 (shells),
128 + n (signal n).
"""

from __future__ import annotations

ASKS_RESTART = 42
"""A script asks to be started again."""
NO_DAEMON = 69
"""A launcher's daemon stayed away (EX_UNAVAILABLE)."""
JOB_ENDED = 75
"""The job ended for a launcher while it waited for its next world (EX_TEMPFAIL)."""
DENIED = 77
"""A launcher's daemon denied it the job (EX_NOPERM)."""
PROCESS_ENDS = 79
"""This process cannot continue, but a new one may: its epoch has ended, it was fenced, or its
daemon, or ranks that it needs, cannot be reached."""
BEGINS_ANEW = 80
"""Training starts from the beginning, which only new processes can do. All processes exit together,
so none of them is kept."""
PROTECTION_REQUIRED = 81
"""Saves are refused, and the job or the script requires protection. Only a person can change that,
so the job fails, unless a failure rule names this code."""
FAILED_CHECK = 82
"""A launcher does not take part, because a check of its node failed. Another node should take its
place, and the failure counts against this one."""

HOLDFAST_DECIDED = frozenset({PROCESS_ENDS, BEGINS_ANEW})
"""Codes with which Holdfast ends a trainer."""
RETRYABLE = frozenset({ASKS_RESTART, NO_DAEMON, JOB_ENDED}) | HOLDFAST_DECIDED
"""Codes below 128 that ask for a restart."""
