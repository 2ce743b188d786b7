"""Measures how this rank divides its steps: its own work, and waiting for other ranks.

In a job with synchronous collectives all ranks have equally long steps, so only this division
shows which rank is slow (`holdfast_core.stragglers`). A step goes from one `save` to the next. The
time in which the training thread waits in torch (`torch_waits`), and the time that Holdfast takes
itself, are not its own work; everything else is.

Everything here runs on the training thread, and must stay cheap: a step costs two readings of the
clock, a wait two as well. Medians are computed once in a window of steps, which is at least as long
as `WINDOW_S`, so that a daemon is not asked to take more of them than it passes on.

Whatever fails here ends the measurement, and neither training nor a save.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from threading import get_ident
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from holdfast_core.stragglers import WINDOW_STEPS, StepTimes

_log = logging.getLogger("holdfast")
_P = ParamSpec("_P")
_R = TypeVar("_R")

WINDOW_S = 1.0
"""Least length of a window."""
WINDOW_STEPS_MAX = 128
"""Steps of a window that are kept, however short they are: their medians are computed between two
steps."""
WAITS_MAX = 1024
"""Waits of one step that are kept one by one."""
SKIPPED_WINDOWS = 1
"""Windows at the start of a session that are not reported: they warm up."""


_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class _Step(NamedTuple):
    """One measured step, in seconds."""

    step_s: float
    own_s: float
    wait_s: float
    data_s: float
    processor_s: float


def _guarded(
    method: Callable[Concatenate[StepMeter, _P], _R],
) -> Callable[Concatenate[StepMeter, _P], _R | None]:
    """`method`, which does nothing once the meter is stopped, and stops it if it fails."""

    @functools.wraps(method)
    def call(self: StepMeter, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if self._stopped:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception:
            _log.debug("the parts of steps are not measured any more", exc_info=True)
            self.stop()
            return None

    return call


class StepMeter:
    """The times of one session's rank. No method raises.

    Args:
        stage: its pipeline stage.
    """

    def __init__(self, stage: int = 0) -> None:
        self._stage = stage
        self.thread = get_ident()
        """The thread that trains: the last one that called `on_step`."""
        self._steps: list[_Step] = []
        self._passed = 0
        """Steps of the window, also those that are not in `_steps`."""
        self._windows = 0
        self._stopped = False
        self._step: int | None = None
        """The step after which the present one began; None before the first."""
        self._began_s = self._window_began_s = self._delayed_s = 0.0
        self._begin(0.0, 0.0)

    def _begin(self, now_s: float, processor_s: float) -> None:
        self._began_s, self._processor_s = now_s, processor_s
        self._waits: list[tuple[float, float]] = []
        self._waited_s = self._held_s = self._data_s = 0.0
        self._backward: tuple[Any, float] | None = None

    def stop(self) -> None:
        """Measure nothing any more."""
        self._stopped = True
        self._steps.clear()
        self._begin(0.0, 0.0)

    @_guarded
    def on_wait(self, began_s: float, ended_s: float) -> None:
        """Note a wait for other ranks."""
        if len(self._waits) >= WAITS_MAX:
            self._waited_s += sum(end - begin for begin, end in self._waits)
            self._waits.clear()
        self._waits.append((began_s, ended_s))

    @_guarded
    def on_batch(self, began_s: float, ended_s: float) -> None:
        """Note the time that a data loader took for a batch."""
        self._data_s += ended_s - began_s

    @_guarded
    def on_held(self, began_s: float, ended_s: float) -> None:
        """Note time that Holdfast took on the training thread."""
        began_s = max(began_s, self._began_s)  # `save` begins a step itself
        waited_s = sum(end - begin for begin, end in self._waits if begin >= began_s)
        self._held_s += max(0.0, ended_s - began_s - waited_s)

    @_guarded
    def on_forward(self, reducer: Any, now_s: float) -> None:
        """Note that the forward pass of a DistributedDataParallel has ended, whose `reducer` will
        wait for other ranks at the end of the backward pass, unseen by Python."""
        self._backward = (reducer, now_s)

    @_guarded
    def before_optimizer(self, now_s: float) -> None:
        """Note that gradients are complete: since the last one of this rank was, it has waited for
        the others."""
        pending, self._backward = self._backward, None
        if pending is None:
            return
        reducer, forward_ended_s = pending
        ready_s = forward_ended_s + max(reducer.get_backward_stats(), default=0) * 1e-9
        if forward_ended_s < ready_s < now_s:
            self._waits = [each for each in self._waits if each[0] < ready_s]
            self.on_wait(ready_s, now_s)

    @_guarded
    def on_step(self, step: int) -> StepTimes | None:
        """Note that `save` was called after `step`. Returns the times of a window that has ended
        with it."""
        now_s, processor_s = time.monotonic(), time.thread_time()
        passed, thread = step - self._step if self._step is not None else 0, get_ident()
        if passed > 0 and thread == self.thread:
            self._add(passed, now_s, processor_s)
        else:
            self._steps.clear()
        self._step, self.thread = step, thread
        self._begin(now_s, processor_s)
        if not self._steps:
            self._window_began_s, self._delayed_s, self._passed = now_s, delayed_s(), 0
            return None
        long = now_s - self._window_began_s >= WINDOW_S
        if not long or len(self._steps) < WINDOW_STEPS:
            return None
        return self._end_window(now_s)

    def _add(self, passed: int, now_s: float, processor_s: float) -> None:
        """Keep the times of the `passed` steps that have ended."""
        self._passed += passed
        step_s = now_s - self._began_s
        wait_s = self._waited_s + sum(end - begin for begin, end in self._waits)
        own_s = max(0.0, step_s - wait_s - self._held_s)
        used_s = processor_s - self._processor_s
        measured = (step_s, own_s, wait_s, min(self._data_s, own_s), used_s)
        if len(self._steps) < WINDOW_STEPS_MAX:
            self._steps.append(_Step(*(each / passed for each in measured)))

    def _end_window(self, now_s: float) -> StepTimes | None:
        steps, self._steps = self._steps, []
        passed, self._passed = self._passed, 0
        delay_s = (delayed := delayed_s()) - self._delayed_s
        self._window_began_s, self._delayed_s = now_s, delayed
        self._windows += 1
        if self._windows <= SKIPPED_WINDOWS:
            return None
        middle = _Step(*(median(column) for column in zip(*steps, strict=True)))
        return StepTimes(
            window=self._windows - SKIPPED_WINDOWS,
            steps=len(steps),
            stage=self._stage,
            step_s=middle.step_s,
            own_s=middle.own_s,
            own_spread_s=median(abs(each.own_s - middle.own_s) for each in steps),
            wait_s=middle.wait_s,
            data_s=middle.data_s,
            processor_s=middle.processor_s + max(0.0, delay_s) / passed,
        )


def delayed_s() -> float:
    """Seconds for which the calling thread could have run, but had no processor; 0 where the kernel
    does not show it."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
