"""Copying in the idle time of a pipeline stage (MoEtion §5.3, algorithm 4).

The times in which the training thread waits for another stage, the bubbles, are marked by
`Pipeline`, by `schedule_waits` for schedules of torch and of Megatron-Core, or by the training loop
itself. The schedule relies on the idle time that all recent steps had. This module hands out the
blocks of a capture: blocks that fit into the bubbles while a bubble is open, and the others during
the computation. The remaining blocks are handed out immediately once training needs its tensors, or
once the duration of a step has passed without the expected bubbles.

It must not be used without pipeline parallelism, because there are no bubbles then.
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
"""Number of recent steps with a snapshot whose bubbles the schedule considers."""


@dataclass(frozen=True, slots=True)
class PieceBlock:
    """A block of pieces that are copied together."""

    first: int
    """Number of the first piece."""
    nbytes: int
    """Number of bytes to copy."""


class Bubbles:
    """The idle times of this rank's stage.

    Args:
        stages: number of the pipeline's stages, at least 2.
        clock: time in seconds.
    """

    def __init__(self, stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stages, self._clock = stages, clock
        self._changed = threading.Condition()
        self._steps: deque[list[float]] = deque(maxlen=STEPS_KEPT)
        """Seconds of the bubbles between a save and the next change of the tensors."""
        self._step: list[float] | None = None
        """Durations of the bubbles in the present step; None while tensors may change."""
        self._depth, self._opened_s = 0, 0.0
        """Number of bubbles that are open, one within the other, and when the outermost began."""
        self._began_s, self._step_s = clock(), 0.0
        self._bytes_s = 0.0
        """Measured speed at which blocks are copied; 0 before the first capture has ended."""
        self._block_s = 0.0
        """Seconds per block at that speed."""
        self.waited_s = 0.0
        """Time in which no thread of the newest capture copied, because there was no bubble."""
        self.total_s = 0.0
        """Time of all bubbles that have ended."""
        self.copied_bytes = 0
        """Bytes of all blocks that were handed out in bubbles."""

    # --- the training thread ----------------------------------------------------------------------

    @contextmanager
    def bubble(self) -> Iterator[None]:
        """Mark the block as a time in which this stage waits for another one. A bubble within a
        bubble is the same bubble."""
        with self._changed:
            self._depth += 1
            if self._depth == 1:
                self._opened_s = self._clock()
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    bubble_s = self._clock() - self._opened_s
                    self.total_s += bubble_s
                    if self._step is not None:
                        self._step.append(bubble_s)

    def begin(self) -> None:
        """Begin a snapshot: from now on tensors do not change, until `end`."""
        with self._changed:
            now = self._clock()
            self._began_s, self._step_s = now, now - self._began_s
            self._step = []

    def end(self) -> None:
        """End the step, because training needs its tensors: the remaining blocks are handed out
        immediately."""
        with self._changed:
            if self._step is not None:
                self._steps.append(self._step)
            self._step = None
            self._changed.notify_all()

    # --- the copying threads ----------------------------------------------------------------------

    def feed(self, blocks: Sequence[PieceBlock]) -> Feed:
        """Make the feed that hands out the blocks of one capture to its threads."""
        return Feed(self, blocks)

    def schedule(self, nbytes: int) -> CopySchedule:
        """Decide how many bytes of a capture are kept for bubbles; none until the bubbles and the
        speed of copies have been measured. Bubbles in which no block can be copied do not count,
        however many there are."""
        windows_s = common_windows(self._steps) if self._bytes_s else ()
        long_s = [window_s for window_s in windows_s if window_s >= self._block_s]
        return schedule_copies(nbytes, self._bytes_s or 1.0, long_s, stages=self._stages)


class Feed:
    """The blocks of one capture, in the order in which its threads copy them."""

    def __init__(self, bubbles: Bubbles, blocks: Sequence[PieceBlock]) -> None:
        self._bubbles = bubbles
        self._block_bytes = {block.first: block.nbytes for block in blocks}
        self._nbytes = sum(self._block_bytes.values())
        with bubbles._changed:
            self.schedule = bubbles.schedule(self._nbytes)
        self._kept: deque[int] = deque()
        """First pieces of the blocks to copy in bubbles."""
        self._free: deque[int] = deque()
        """First pieces of the other blocks."""
        left = self.schedule.bubble_bytes
        for block in blocks:
            left -= block.nbytes
            (self._kept if left >= 0 else self._free).append(block.first)
        self._created_s = bubbles._clock()
        self._copying: set[int] = set()
        """Threads that are copying a block."""
        self._since_s = 0.0
        """Time at which the first of these threads began."""
        self._copying_s = 0.0
        """Time in which at least one thread copied, until all of them last paused."""

    def __call__(self) -> int | None:
        """Wait until the next block may be copied. Return its first piece, or None if no block is
        left. Each thread of the capture calls it repeatedly."""
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
                if bubbles._depth:
                    bubbles.copied_bytes += self._block_bytes[first]
            elif not self._copying:
                self._measure()
            return first

    def _measure(self) -> None:
        """Record the duration of the copies without the time in which all threads waited. Called
        when all blocks are copied."""
        bubbles, copying_s = self._bubbles, self._copying_s
        bubbles.waited_s = bubbles._clock() - self._created_s - copying_s
        if copying_s:
            bubbles._bytes_s = self._nbytes / copying_s
            bubbles._block_s = copying_s / len(self._block_bytes)

    def _next(self) -> int | None:
        bubbles = self._bubbles
        now = bubbles._depth or bubbles._step is None
        if self._kept and (now or bubbles._clock() >= bubbles._began_s + bubbles._step_s):
            return self._kept.popleft()
        return self._free.popleft() if self._free else None
