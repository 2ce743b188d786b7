"""A limit of bytes per second that several threads share. Limits of different jobs are different
allowances: where one is low, the debt of its callers would hold up all others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Allowance:
    """Bytes per second, shared by all callers, which name the same rate. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = 0.0

    def take(self, nbytes: int, rate_bytes_s: int, wait: Callable[[float], object]) -> None:
        """Return when `nbytes` more may move; `wait` is called with the seconds until then, if any.
        `rate_bytes_s` 0: no limit."""
        if rate_bytes_s <= 0:
            return
        with self._lock:
            now = self._clock()
            begins = max(self._paid_until, now)
            self._paid_until = begins + nbytes / rate_bytes_s
        if begins > now:
            wait(begins - now)
