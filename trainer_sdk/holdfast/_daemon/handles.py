"""The handle that `save` returns: one future for each stage that a snapshot can reach."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from holdfast_core.errors import HoldfastError, StepOrderError

_STEPS = range(2**63)
_SHOWN_BITS_MAX = 128
_SHOWN_CHARACTERS_MAX = 40


def completed_steps(step: object) -> int:
    """Convert the argument of `save` to a number of completed steps.

    Raises:
        StepOrderError: the argument is not a whole number from 0 to 2**63 - 1.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # whether it can is the question
    except TypeError:
        number = -1
    if number in _STEPS:
        return number
    if isinstance(step, int) and step.bit_length() > _SHOWN_BITS_MAX:
        shown = f"an integer of {step.bit_length()} bits"  # Python refuses to print very long ones.
    else:
        plain = step is None or isinstance(step, int | float | str)
        shown = repr(step)[:_SHOWN_CHARACTERS_MAX] if plain else f"a {type(step).__qualname__}"
    raise StepOrderError(
        f"save() was called with {shown}; a step is a whole number from 0 to 2**63 - 1: pass the "
        f"completed steps"
    )


class SaveHandle:
    """The outcome of one save, stage by stage.

    The result of each future is the step. If the save is skipped or fails, the stages that it did
    not reach fail with the reason, a HoldfastError. Nothing is ever raised into training.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged: Future[int] = Future()
        """Done when the bytes are in the arena. Tensors may change again."""
        self.committed: Future[int] = Future()
        """Done when the daemon has sealed the manifest. The snapshot survives this process."""
        self.protected: Future[int] = Future()
        """Done when all ranks of the job have their parity on other nodes. The snapshot survives
        the loss of this node."""
        self.persisted: Future[int] = Future()
        """Done when this generation, or a newer one, is complete in durable storage. Training
        survives the loss of the cluster. Never done if the job has no durable storage."""
        self._stages = (self.staged, self.committed, self.protected)
        self._first = step
        """Step to which a restore of the snapshot brings training back. For the session only."""
        self._on_committed: Callable[[], None] | None = None
        """Called just before `committed` is done: by then the save is counted. For the session
        only."""
        self._slots = 0
        """Number of slots in the arena; 0 until a slot is granted. For the session only."""
        self._lock = threading.Lock()
        for future in (*self._stages, self.persisted):
            future.set_running_or_notify_cancel()  # So that no caller can cancel a stage.

    @property
    def error(self) -> HoldfastError | None:
        """Why the snapshot did not reach a stage; None if nothing has failed so far."""
        for future in self._stages:
            if future.done() and (error := future.exception()) is not None:
                assert isinstance(error, HoldfastError)
                return error
        return None

    def _reach(self, last: Future[int]) -> None:
        """Complete `last` and every earlier stage. For the session only."""
        with self._lock:
            for future in self._stages[: self._stages.index(last) + 1]:
                if not future.done():
                    if future is self.committed and self._on_committed is not None:
                        self._on_committed()
                    future.set_result(self.step)

    def _fail(self, error: HoldfastError) -> None:
        """Fail every stage that is not done with `error`. For the session only."""
        with self._lock:
            for future in (*self._stages, self.persisted):
                if not future.done():
                    future.set_exception(error)

    def _fail_protection(self, error: HoldfastError) -> None:
        """Fail `protected` with `error`; the snapshot may still be persisted. For the session
        only."""
        with self._lock:
            if not self.protected.done():
                self.protected.set_exception(error)

    def _follow(self, other: SaveHandle) -> None:
        """Complete or fail each stage together with the same stage of `other`, a later save of the
        same window. For the session only."""

        def follow(mine: Future[int], its: Future[int]) -> None:
            error = its.exception()
            with self._lock:
                if not mine.done():
                    mine.set_result(self.step) if error is None else mine.set_exception(error)

        pairs = zip((*self._stages, self.persisted), (*other._stages, other.persisted), strict=True)
        for mine, its in pairs:
            its.add_done_callback(partial(follow, mine))

    def _persist(self) -> None:
        """Complete `persisted`. For the session only."""
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
