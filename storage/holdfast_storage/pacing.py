"""How fast a write may go, and how it is told to stop."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from holdfast_storage.failing import WriteStoppedError

_BURST_S = 0.1


class Clock(Protocol):
    """Time, and waiting that can be cut short."""

    def now(self) -> float:
        """Seconds; only differences mean something."""

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Return after `seconds`, or at once when `stop` is set."""


class SystemClock:
    """The machine's."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> None:
        stop.wait(seconds)


class Pace:
    """A token bucket: lets `bytes_per_s` through, 0 for any number, and nothing after `stop`."""

    def __init__(self, bytes_per_s: int, clock: Clock, stop: threading.Event) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._stop = stop
        self._filled_at = clock.now()
        self._tokens = self._burst = bytes_per_s * _BURST_S

    def take(self, nbytes: int) -> None:
        """Return when `nbytes` more may go.

        Raises:
            WriteStoppedError: the write shall stop.
        """
        if self._rate:
            now = self._clock.now()
            self._tokens += (now - self._filled_at) * self._rate
            self._tokens = min(self._tokens, self._burst) - nbytes
            self._filled_at = now
            if self._tokens < 0:
                self._clock.wait(-self._tokens / self._rate, self._stop)
        if self._stop.is_set():
            raise WriteStoppedError("the write was told to stop; nothing of it is visible")
