"""Tally of a session's saves: counted, logged once per cause, reported to the daemon."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass

from holdfast._capture.loss import NO_LOSS, Loss
from holdfast._daemon.client import TrainerReport
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError, SnapshotSkippedError

_log = logging.getLogger("holdfast")
_NUMBERS = re.compile(r"\d+")


@dataclass(kw_only=True, slots=True)
class SaveCounters:
    """Outcomes of a session's saves."""

    committed: int = 0
    skipped: int = 0
    failed: int = 0
    failure: str = ""
    """Newest cause of a skipped or failed save; empty when the last save succeeded."""
    failure_code: str = ""
    """`HoldfastError.code` of that cause."""
    step: int = 0
    """Step of the newest save."""
    save_period_s: float = 0.0
    """Time between the last two saves."""
    loss: Loss = NO_LOSS
    """Loss of training in experts that snapshots leave out; all 0 when they capture everything."""
    plan: PlanReport | None = None
    """Expert plan of this world; None without uneven copies."""
    staged_s: float = 0.0
    """Time from the call of the newest staged save until its tensors could change again."""
    copied_bytes: int = 0
    """Bytes of tensors that the newest staged save copied."""
    interval_steps: int = 0
    """Steps from snapshot to snapshot, where the interval follows from measurement; else 0."""


IDLE_S = 0.5
"""Interval at which an idle saver checks for anything to report."""

CAUSES_MAX = 1000
"""Most remembered causes, which are not logged again; beyond it, all of them are forgotten."""


class Tally:
    """Counters of a session, and the causes already logged. Any thread may call it."""

    def __init__(self) -> None:
        self.counters = SaveCounters()
        self.changed = False
        """Whether anything changed since the last report."""
        self._causes: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, step: int, save_period_s: float) -> None:
        """Note that a save of `step` was called, `save_period_s` after the previous one."""
        self.counters.step, self.counters.save_period_s = step, save_period_s
        self.changed = True

    def commit(self) -> None:
        """Count a committed snapshot."""
        with self._lock:
            self.counters.committed += 1
            self.counters.failure = self.counters.failure_code = ""
            self.changed = True

    def refuse(self, step: int, error: HoldfastError) -> None:
        """Count a save that was skipped or failed; log it unless its cause was logged before."""
        skipped = isinstance(error, SnapshotSkippedError)
        with self._lock:
            if skipped:
                self.counters.skipped += 1
            else:
                self.counters.failed += 1
            self.counters.failure, self.counters.failure_code = str(error), error.code
            cause = f"{error.code} {_NUMBERS.sub('#', str(error))}"
            first = cause not in self._causes
            if first and len(self._causes) >= CAUSES_MAX:
                self._causes.clear()
            self._causes.add(cause)
            self.changed = True
        if first:
            level = logging.WARNING if skipped else logging.ERROR
            _log.log(level, "step %d was not saved: %s", step, error)

    def forgive(self) -> None:
        """Forget the logged causes, as the daemon is back: later failures are logged again."""
        with self._lock:
            self._causes.clear()

    def report(self, session: str, problem: HoldfastError | None) -> TrainerReport:
        """Make the report for the daemon; `problem` is the reason why nothing can be saved any
        more."""
        with self._lock:
            self.changed = False
            counters = self.counters
            return TrainerReport(
                session=session,
                step=counters.step,
                skipped=counters.skipped,
                failed=counters.failed,
                failure=str(problem) if problem else counters.failure,
                failure_code=problem.code if problem else counters.failure_code,
                save_period_s=counters.save_period_s,
                staged_s=counters.staged_s,
                interval_steps=counters.interval_steps,
                loss=counters.loss.report,
                plan=counters.plan,
            )
