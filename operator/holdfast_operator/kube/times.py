"""Both clocks at one moment, and times as the API writes them. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

Clock = Callable[[], float]
"""Monotonic seconds."""
Sleep = Callable[[float], Awaitable[None]]
"""Lets so many seconds pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockPair:
    """One moment on both clocks. Kept for the life of the process, so that one moment is always
    written as the same time."""

    now: float
    """Monotonic seconds."""
    wall: float
    """Seconds since the Unix epoch."""

    def at_wall(self, now: float) -> float:
        """A monotonic time in seconds since the Unix epoch."""
        return self.wall + now - self.now

    def text(self, now: float) -> str:
        """A monotonic time as the API writes it."""
        return timestamp(self.at_wall(now))


def timestamp(wall: float) -> str:
    """metav1.Time: seconds."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(wall: float) -> str:
    """metav1.MicroTime: always six digits."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(text: object) -> float | None:
    """Seconds since the Unix epoch of either form; None for anything else."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
