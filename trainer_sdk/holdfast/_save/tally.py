"""The outcomes of a session's saves: counted, logged once per cause, and reported to the daemon."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass

from holdfast._capture.loss import NO_LOSS, Loss
from holdfast._copying.bubbles import Bubbles
from holdfast._daemon.client import TrainerReport
from holdfast_core.corruption import Divergence
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError, SnapshotSkippedError
from holdfast_core.stragglers import StepTimes

_log = logging.getLogger("holdfast")
_NUMBERS = re.compile(r"\d+")


@dataclass(kw_only=True, slots=True)
class SaveCounters:
    """Outcomes of a session's saves."""

    committed: int = 0
    skipped: int = 0
    failed: int = 0
    failure: str = ""
    """Newest cause of a skipped or failed save; empty if the last save succeeded."""
    failure_code: str = ""
    """`HoldfastError.code` of that cause."""
    step: int = 0
    """Step of the newest save."""
    save_period_s: float = 0.0
    """Time between the last two saves."""
    loss: Loss = NO_LOSS
    """Training that experts which snapshots leave out may lose; all 0 if snapshots capture all
    experts."""
    plan: PlanReport | None = None
    """Expert plan of this world; None for a model without seats."""
    staged_s: float = 0.0
    """Time from the call of the newest staged save until training could change its tensors."""
    copied_bytes: int = 0
    """Bytes of tensors that the newest staged save copied."""
    hashed_on_device_bytes: int = 0
    """Bytes of them whose checksums were computed on the devices that hold the tensors."""
    hashing: str = ""
    """Which devices compute checksums, and why threads do it for others; empty for tensors in host
    memory."""
    bubble_s: float = 0.0
    """Time for which the process of this pipeline stage has waited for others, as far as the waits
    are marked, when `Session.counters` was last read; near 0 with NCCL, where the device waits
    instead, and 0 without pipeline parallelism."""
    bubble_bytes: int = 0
    """Bytes of tensors that snapshots have copied meanwhile: of all blocks whose copies began in
    these times. As old as `bubble_s`."""
    interval_steps: int = 0
    """Steps from one snapshot to the next, if the interval is measured; otherwise 0."""
    window_steps: int = 0
    """Steps of the newest sparse window; 0 where snapshots are of one step."""
    times: StepTimes | None = None
    """How the newest steps were divided into own work and waiting; None before the first window of
    steps."""


IDLE_S = 0.5
"""Interval at which an idle saver checks whether it has anything to report."""

CAUSES_MAX = 1000
"""Number of logged causes to remember, so that they are not logged again. At this number, all are
forgotten."""


class Tally:
    """The counters of a session, and the causes that were logged. Any thread may call it.

    Args:
        bubbles: the waits of this rank's pipeline stage; None without pipeline parallelism.
    """

    def __init__(self, bubbles: Bubbles | None = None) -> None:
        self._counters, self._bubbles = SaveCounters(), bubbles
        self.changed = False
        """Whether anything has changed since the last report."""
        self._causes: set[str] = set()
        self._lock = threading.Lock()

    @property
    def counters(self) -> SaveCounters:
        if self._bubbles is not None:
            self._counters.bubble_s = self._bubbles.total_s
            self._counters.bubble_bytes = self._bubbles.copied_bytes
        return self._counters

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
        """Count a skipped or failed save, and log its cause unless that was logged before."""
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
        """Forget the logged causes, so that later failures are logged again. The pipeline calls it
        when the daemon is back."""
        with self._lock:
            self._causes.clear()

    def report(
        self,
        session: str,
        problem: HoldfastError | None,
        divergence: Divergence | None = None,
    ) -> TrainerReport:
        """Make the report for the daemon.

        Args:
            session: key of the session with the daemon; empty without one.
            problem: why no further save can succeed; None while saves can.
            divergence: what the comparisons of replicas have shown; None while they are equal.
        """
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
                window_steps=counters.window_steps,
                bubble_s=counters.bubble_s,
                bubble_bytes=counters.bubble_bytes,
                loss=counters.loss.report,
                plan=counters.plan,
                times=counters.times,
                divergence=divergence,
            )
