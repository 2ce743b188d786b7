"""Copies in the idle time of a pipeline stage (MoEtion §5.3, algorithm 4).

The training loop says when it waits for another stage; what every recent step had of such time is
counted on. A capture has its blocks handed out here: those that fit into the bubbles while one is
open, the others beside the computation. What is left when training needs its tensors is handed out
at once, as it is when the time of a step has passed without the bubbles that were counted on.

Must not be used without pipeline parallelism: there are no bubbles then, and nothing to hand out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast_core.experts.bubbles import CopySchedule, common_windows, schedule_copies

STEPS_KEPT = 4
"""Steps with a snapshot whose bubbles are remembered."""


@dataclass(frozen=True, slots=True)
class PieceBlock:
    """Pieces that are copied together."""

    first: int
    """The number of the first one."""
    nbytes: int
    """Of those that are copied."""


class Bubbles:
    """The idle times of this rank's stage, as its training loop tells of them.

    Args:
        stages: of the pipeline, at least 2.
        clock: in seconds.
    """

    def __init__(self, stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stages, self._clock = stages, clock
        self._changed = threading.Condition()
        self._steps: deque[list[float]] = deque(maxlen=STEPS_KEPT)
        """Seconds of the bubbles between a save and the next change of the tensors."""
        self._step: list[float] | None = None
        """Those of the step under way; None when tensors may change."""
        self._open = False
        self._began_s, self._step_s = clock(), 0.0
        self._bytes_s = 0.0
        """How fast blocks are copied; 0 before the first was."""
        self.waited_s = 0.0
        """Of the newest capture: while none of its threads copied, for want of a bubble."""

    # --- the training thread ----------------------------------------------------------------------

    @contextmanager
    def bubble(self) -> Iterator[None]:
        """While the stage waits for another one."""
        with self._changed:
            self._open = True
            self._changed.notify_all()
        began_s = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._open = False
                if self._step is not None:
                    self._step.append(self._clock() - began_s)

    def begin(self) -> None:
        """A snapshot was asked for: from here on tensors stay as they are."""
        with self._changed:
            now = self._clock()
            self._began_s, self._step_s = now, now - self._began_s
            self._step = []

    def end(self) -> None:
        """Tensors are about to change: what is not copied yet is waited for."""
        with self._changed:
            if self._step is not None:
                self._steps.append(self._step)
            self._step = None
            self._changed.notify_all()

    # --- the copying threads ----------------------------------------------------------------------

    def feed(self, blocks: Sequence[PieceBlock]) -> Feed:
        """Hands out the blocks of one capture to the threads that call it."""
        return Feed(self, blocks)

    def schedule(self, nbytes: int) -> CopySchedule:
        """What of a capture is kept for the bubbles; nothing before both were measured."""
        windows_s = common_windows(self._steps) if self._bytes_s else ()
        return schedule_copies(nbytes, self._bytes_s or 1.0, windows_s, stages=self._stages)


class Feed:
    """The blocks of one capture, in the order in which threads are to copy them."""

    def __init__(self, bubbles: Bubbles, blocks: Sequence[PieceBlock]) -> None:
        self._bubbles = bubbles
        self._nbytes = sum(block.nbytes for block in blocks)
        with bubbles._changed:
            self.schedule = bubbles.schedule(self._nbytes)
        self._kept: deque[int] = deque()
        """For bubbles."""
        self._free: deque[int] = deque()
        left = self.schedule.bubble_bytes
        for block in blocks:
            left -= block.nbytes
            (self._kept if left >= 0 else self._free).append(block.first)
        self._created_s = bubbles._clock()
        self._copying: set[int] = set()
        """Threads that copy a block."""
        self._since_s = 0.0
        """When the first of them began."""
        self._copying_s = 0.0
        """How long any of them has copied; without the time under way."""

    def __call__(self) -> int | None:
        """The first piece of the next block, once it may be copied; None when none is left."""
        bubbles, me = self._bubbles, threading.get_ident()
        with bubbles._changed:
            if me in self._copying:
                self._copying.remove(me)
                if not self._copying:
                    self._copying_s += bubbles._clock() - self._since_s
            while (first := self._next()) is None and self._kept:
                bubbles._changed.wait(bubbles._began_s + bubbles._step_s - bubbles._clock())
            if first is not None:
                if not self._copying:
                    self._since_s = bubbles._clock()
                self._copying.add(me)
            elif not self._copying:
                self._measure()
            return first

    def _measure(self) -> None:
        """All is copied: what that took, without the time in which all threads waited."""
        bubbles, copying_s = self._bubbles, self._copying_s
        bubbles.waited_s = bubbles._clock() - self._created_s - copying_s
        if copying_s:
            bubbles._bytes_s = self._nbytes / copying_s

    def _next(self) -> int | None:
        bubbles = self._bubbles
        now = bubbles._open or bubbles._step is None
        if self._kept and (now or bubbles._clock() >= bubbles._began_s + bubbles._step_s):
            return self._kept.popleft()
        return self._free.popleft() if self._free else None
