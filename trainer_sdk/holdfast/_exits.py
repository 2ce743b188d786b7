"""Exit codes of a process that ends by an error which Holdfast has raised.

Python ends with code 1 after any uncaught exception. Where a process ends because its training
world did, the control loop must not take that for a failure of the script: such processes end with
codes of their own (`holdfast_core.exit_codes`), however they were started.
"""

from __future__ import annotations

import sys
from types import TracebackType

from holdfast_core.errors import (
    BeginsAnewError,
    NoRecoveryLineError,
    RankInUseError,
    StaleEpochError,
    UnreachableError,
)
from holdfast_core.exit_codes import BEGINS_ANEW, PROCESS_ENDS

_ENDS_PROCESS = (NoRecoveryLineError, RankInUseError, StaleEpochError, UnreachableError)
"""Errors about the world of this process and what it is to restore: nothing of its script."""


def exit_code_of(error: BaseException) -> int | None:
    """Exit code of a process that `error` ends; None where Python's own is right."""
    if isinstance(error, BeginsAnewError):
        return BEGINS_ANEW
    return PROCESS_ENDS if isinstance(error, _ENDS_PROCESS) else None


def set_exit_codes() -> None:
    """Let this process end with `exit_code_of` an uncaught exception, after whatever prints it."""
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
        """Print `error` as before; then end with its code."""
        assert callable(self._before)
        self._before(kind, error, trace)
        code = exit_code_of(error)
        if code is not None:
            raise SystemExit(code)
