"""When what a daemon does again and again is due: at the same moments, and not each at its own.

An idle processor costs more to wake than most of this work does, and so it is woken once for all
of it.
"""

from __future__ import annotations

PERIOD_S = 1.0
"""Between the gauges' and the scrub's turns."""


def until_next(period_s: float, now: float) -> float:
    """Seconds from `now` to the next whole multiple of `period_s`, both on the monotonic clock."""
    return period_s - now % period_s
