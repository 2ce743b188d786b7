"""Placement of concurrent threads on different cores of a machine with few cores.

Threads that pass the interpreter's lock to each other wake each other, and Linux prefers to run a
woken thread on the core of the thread that woke it. So two copying threads may share one core for
tens of milliseconds while the other core is idle, which is most of the duration of a small
snapshot. On a machine with many cores, the kernel finds an idle one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

_CORES_MAX = 2
"""Number of cores per thread above which threads are not placed."""


def apart(work: Callable[[], None], side: int, sides: int) -> Callable[[], None]:
    """Wrap `work` so that its thread runs only on the cores of one of `sides` disjoint sets. When
    it ends, the thread may use its previous cores again."""

    def run() -> None:
        allowed = os.sched_getaffinity(0)
        if sides < 2 or not sides <= len(allowed) <= _CORES_MAX * sides:
            work()
            return
        with suppress(OSError):  # A sandbox may forbid it.
            os.sched_setaffinity(0, sorted(allowed)[side::sides])
        try:
            work()
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, allowed)

    return run
