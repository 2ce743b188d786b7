"""Measurements of this rank's copies, protection and steps, for the budgets of MoEtion.

Copies compete with the training step and with the other ranks of the node, so their speed is
measured in place. Means and medians are over the newest few. For protection the highest speed
counts, because a small snapshot takes as long as the daemons' messages, however fast the network.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

from holdfast_core.experts.counts import UNKNOWN, Measures
from holdfast_core.snapshots.generations import Generation

_NEWEST = 8


class Durations:
    """Collector of durations. Any thread may call it."""

    def __init__(self, before: Measures = UNKNOWN) -> None:
        self._before = before
        """Measures of an earlier run, used until this one has its own."""
        self._copies: deque[tuple[int, float]] = deque(maxlen=_NEWEST)
        self._steps_s: deque[float] = deque(maxlen=_NEWEST)
        self._last: tuple[int, float] | None = None
        self._stalled_s = 0.0
        self._unprotected: dict[Generation, tuple[int, float]] = {}
        self._network_bytes_s = 0
        self._lock = threading.Lock()

    def on_save_called(self, step: int, now_s: float) -> None:
        """Note that a save of `step` was called."""
        with self._lock:
            if self._last is not None and step > self._last[0]:
                taken_s = now_s - self._last[1] - self._stalled_s
                self._steps_s.append(max(taken_s, 0.0) / (step - self._last[0]))
            self._last, self._stalled_s = (step, now_s), 0.0

    def add_stall(self, seconds: float) -> None:
        """Add time that training waited for a snapshot."""
        with self._lock:
            self._stalled_s += seconds

    def on_copied(self, generation: Generation, nbytes: int, began_s: float, now_s: float) -> None:
        """Note that new bytes of a snapshot, which may have several saves, are copied, and about to
        be protected."""
        with self._lock:
            self._copies.append((nbytes, now_s - began_s))
            earlier, _ = self._unprotected.pop(generation, (0, 0.0))
            self._unprotected[generation] = (earlier + nbytes, now_s)
            while len(self._unprotected) > _NEWEST:
                del self._unprotected[min(self._unprotected)]

    def on_protected(self, generation: Generation, now_s: float) -> None:
        """Note that the snapshot is protected."""
        with self._lock:
            nbytes, since_s = self._unprotected.pop(generation, (0, now_s))
            if now_s > since_s:
                rate = int(nbytes / (now_s - since_s))
                self._network_bytes_s = max(self._network_bytes_s, rate)

    @property
    def measures(self) -> Measures:
        """Measures so far."""
        with self._lock:
            seconds = sum(taken_s for _, taken_s in self._copies)
            nbytes = sum(copied for copied, _ in self._copies)
            step_s = statistics.median(self._steps_s) if self._steps_s else 0.0
            return Measures(
                host_bytes_s=int(nbytes / seconds) if seconds else self._before.host_bytes_s,
                network_bytes_s=self._network_bytes_s or self._before.network_bytes_s,
                step_us=round(step_s * 1e6) or self._before.step_us,
            )
