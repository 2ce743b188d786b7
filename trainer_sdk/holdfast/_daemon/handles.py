"""Handles that `save` returns, with one future for each stage that a snapshot reaches."""

from __future__ import annotations

import operator
import threading
from concurrent.futures import Future
from functools import partial

from holdfast_core.errors import HoldfastError, StepOrderError

_STEPS = range(2**63)
_SHOWN_BITS_MAX = 128
_SHOWN_CHARACTERS_MAX = 40


def completed_steps(step: object) -> int:
    """Convert the argument of `save` to a number of completed steps.

    Raises:
        StepOrderError: when it is not such a number.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # whether it can is the question
    except TypeError:
        number = -1
    if number in _STEPS:
        return number
    if isinstance(step, int) and step.bit_length() > _SHOWN_BITS_MAX:
        shown = f"an integer of {step.bit_length()} bits"  # Python writes no very long ones
    else:
        plain = step is None or isinstance(step, int | float | str)
        shown = repr(step)[:_SHOWN_CHARACTERS_MAX] if plain else f"a {type(step).__qualname__}"
    raise StepOrderError(
        f"save() was called with {shown}; a step is a whole number from 0 to 2**63 - 1: pass the "
        f"completed steps"
    )


class SaveHandle:
    """Outcome of one snapshot, stage by stage.

    Each future's result is the step. When a snapshot is skipped or fails, the futures of the stages
    that it did not reach get the reason, a HoldfastError; nothing is ever raised into training.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged: Future[int] = Future()
        """Done when the bytes are in the arena: tensors may change again."""
        self.committed: Future[int] = Future()
        """Done when the daemon has sealed the manifest: the snapshot survives this process."""
        self.protected: Future[int] = Future()
        """Done when parity is on other nodes, job-wide: the snapshot survives the loss of this
        node."""
        self.persisted: Future[int] = Future()
        """Done when this generation or a newer one is in durable storage, complete: training
        survives the loss of the cluster. Never reached where the job has no such storage."""
        self._stages = (self.staged, self.committed, self.protected)
        self._first = step
        """First step of the window that holds the snapshot. For the session only."""
        self._slots = 0
        """Slots of the arena that has one for the snapshot; 0 before. For the session only."""
        self._lock = threading.Lock()
        for future in (*self._stages, self.persisted):
            future.set_running_or_notify_cancel()  # a caller that waits cannot cancel a stage

    @property
    def error(self) -> HoldfastError | None:
        """Reason why the snapshot did not reach a stage; None when all is well so far."""
        for future in self._stages:
            if future.done() and (error := future.exception()) is not None:
                assert isinstance(error, HoldfastError)
                return error
        return None

    def _reach(self, last: Future[int]) -> None:
        """Mark `last` and every stage before it as reached. For the session only."""
        with self._lock:
            for future in self._stages[: self._stages.index(last) + 1]:
                if not future.done():
                    future.set_result(self.step)

    def _fail(self, error: HoldfastError) -> None:
        """Put `error` into every stage that was not reached. For the session only."""
        with self._lock:
            for future in (*self._stages, self.persisted):
                if not future.done():
                    future.set_exception(error)

    def _fail_protection(self, error: HoldfastError) -> None:
        """Put `error` into `protected` only: the snapshot may still be persisted. For the session
        only."""
        with self._lock:
            if not self.protected.done():
                self.protected.set_exception(error)

    def _follow(self, other: SaveHandle) -> None:
        """Let each stage end as that of `other` does: both are in one window. For the session
        only."""

        def follow(mine: Future[int], its: Future[int]) -> None:
            error = its.exception()
            with self._lock:
                if not mine.done():
                    mine.set_result(self.step) if error is None else mine.set_exception(error)

        pairs = zip((*self._stages, self.persisted), (*other._stages, other.persisted), strict=True)
        for mine, its in pairs:
            its.add_done_callback(partial(follow, mine))

    def _persist(self) -> None:
        """Mark the snapshot as persisted. For the session only."""
        with self._lock:
            if not self.persisted.done():
                self.persisted.set_result(self.step)

    def __repr__(self) -> str:
        names = ("staged", "committed", "protected", "persisted")
        reached = [
            name
            for name, future in zip(names, (*self._stages, self.persisted), strict=True)
            if future.done() and future.exception() is None
        ]
        fate = f"error={self.error!r}" if self.error else f"reached={reached}"
        return f"SaveHandle(step={self.step}, {fate})"
