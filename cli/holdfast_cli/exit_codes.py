"""Exit codes of the `holdfast` command."""

from __future__ import annotations

FAILED = 1
"""The job failed."""
BAD_INPUT = 2
INTERRUPTED = 130
"""Exit code that a shell reports after SIGINT."""
