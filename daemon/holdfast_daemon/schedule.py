"""Schedules the daemon's periodic work: all of it is due at the same moments.

Waking an idle processor costs more than most of this work does, so it is woken once for all of it.
"""

from __future__ import annotations

PERIOD_S = 1.0
"""Seconds between two rounds of the gauges and the scrub."""


def until_next(period_s: float, now: float) -> float:
    """Seconds from `now` to the next whole multiple of `period_s`, both on the monotonic clock."""
    return period_s - now % period_s
