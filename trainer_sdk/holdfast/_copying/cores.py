"""Placement of threads that work side by side on different cores, where cores are few.

Threads that pass the interpreter's lock to each other wake each other, and Linux prefers to run a
woken thread on the core of the one that woke it. Two copying threads then share one core for tens
of milliseconds while the other core idles, which is most of the time that a small snapshot takes.
Where there are many cores the kernel finds an idle one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

_CORES_MAX = 2
"""Cores for each thread above which threads are not placed."""


def apart(work: Callable[[], None], side: int, sides: int) -> Callable[[], None]:
    """Wrap `work` so that its thread runs only on the cores of one of `sides` disjoint sets; the
    thread's previous cores are restored when it ends."""

    def run() -> None:
        allowed = os.sched_getaffinity(0)
        if sides < 2 or not sides <= len(allowed) <= _CORES_MAX * sides:
            work()
            return
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, sorted(allowed)[side::sides])
        try:
            work()
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, allowed)

    return run
