"""A limit of how often something is done in a time, whoever asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast_core.errors import RateLimitedError


class Window:
    """At most `count_max` in each `window_s` seconds. Thread-safe.

    Args:
        what: names it in messages, in the plural.
    """

    def __init__(
        self,
        what: str,
        count_max: int,
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._count_max, self._window_s = what, count_max, window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began, self._count = clock(), 0

    def take(self) -> None:
        """Count one more.

        Raises:
            RateLimitedError: there were too many lately.
        """
        with self._lock:
            now = self._clock()
            if now - self._began >= self._window_s:
                self._began, self._count = now, 0
            if self._count >= self._count_max:
                raise RateLimitedError(
                    f"{self._what}: more than {self._count_max} in {self._window_s:g} s"
                )
            self._count += 1
