"""A monotonic and a wall clock, read at the same moment. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast_operator.reconciler.observe.timestamps import timestamp

Clock = Callable[[], float]
"""Returns the time in seconds: monotonic, or since the Unix epoch for a clock named `wall`."""
Sleep = Callable[[float], Awaitable[None]]
"""Waits for a number of seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockPair:
    """The same moment on both clocks. The process keeps one pair, so that it always writes a moment
    as the same time."""

    now: float
    """Monotonic seconds."""
    wall: float
    """Seconds since the Unix epoch."""

    def at_wall(self, now: float) -> float:
        """Convert a monotonic time to seconds since the Unix epoch."""
        return self.wall + now - self.now

    def text(self, now: float) -> str:
        """Write a monotonic time as the API does."""
        return timestamp(self.at_wall(now))
