"""Virtual time and an unreliable network, both driven by one seeded generator."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

HAPPENINGS_MAX = 300_000
"""Most callbacks and effects of daemons in one schedule; the longest have some ten thousand."""


class Clock:
    """Runs callbacks in the order of virtual time; at equal times, in the order of the calls."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.rng = rng
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._happened = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, action))

    def step(self) -> bool:
        """Run the next callback; False when there is none."""
        if not self._queue:
            return False
        self.happens()
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True

    def happens(self) -> None:
        """Count one more happening: even daemons that keep each other busy at a single moment must
        come to an end.

        Raises:
            AssertionError: when there were more than `HAPPENINGS_MAX`.
        """
        self._happened += 1
        assert self._happened <= HAPPENINGS_MAX, f"no end: busy at {self.now:.3f} s"


class Network:
    """Loses, delays, repeats and reorders messages; cuts nodes off."""

    def __init__(self, clock: Clock, *, loss: float, repeat: float, slow: float) -> None:
        self._clock = clock
        self._loss, self._repeat, self._slow = loss, repeat, slow
        self.cut: set[str] = set()

    def reaches(self, a: str, b: str) -> bool:
        return a == b or (a not in self.cut and b not in self.cut)

    def send(self, sender: str, receiver: str, deliver: Callable[[], None]) -> None:
        """Deliver a message once, twice, late or never."""
        rng = self._clock.rng
        if not self.reaches(sender, receiver) or rng.random() < self._loss:
            return
        copies = 2 if rng.random() < self._repeat else 1
        for _ in range(copies):
            delay_s = rng.uniform(0.0005, 0.004)
            if rng.random() < self._slow:
                delay_s += rng.uniform(0.02, 1.5)
            self._clock.after(delay_s, deliver)
