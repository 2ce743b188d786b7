"""Exit codes of processes that end with an error of Holdfast.

Python exits with code 1 after any uncaught exception. But if a process ends because its training
world has ended, the control loop must not mistake that for a failure of the script. So such
processes exit with codes of their own (`holdfast_core.exit_codes`), however they were started.
"""

from __future__ import annotations

import sys
from types import TracebackType

from holdfast_core.errors import (
    BeginsAnewError,
    NoRecoveryLineError,
    ProtectionRequiredError,
    RankInUseError,
    StaleEpochError,
    UnreachableError,
)
from holdfast_core.exit_codes import BEGINS_ANEW, PROCESS_ENDS, PROTECTION_REQUIRED

_ENDS_PROCESS = (NoRecoveryLineError, RankInUseError, StaleEpochError, UnreachableError)
"""Errors that concern the world of this process or its restore, and not its script."""


def exit_code_of(error: BaseException) -> int | None:
    """Return the exit code of a process that ends with `error`; None for Python's own."""
    if isinstance(error, BeginsAnewError):
        return BEGINS_ANEW
    if isinstance(error, ProtectionRequiredError):
        return PROTECTION_REQUIRED
    return PROCESS_ENDS if isinstance(error, _ENDS_PROCESS) else None


def set_exit_codes() -> None:
    """Let this process exit with `exit_code_of` an uncaught exception, after it is printed."""
    before = sys.excepthook
    if isinstance(getattr(before, "__self__", None), _Hook) or hasattr(sys, "ps1"):
        return
    sys.excepthook = _Hook(before).ended


class _Hook:
    def __init__(self, before: object) -> None:
        self._before = before

    def ended(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print `error` with the previous hook, and then exit with its code."""
        assert callable(self._before)
        self._before(kind, error, trace)
        code = exit_code_of(error)
        if code is not None:
            raise SystemExit(code)
