"""Agents that wait on this node for the world of a job.

Heartbeats report the agents whose job has no member here: the control loop lets a joining member in
once its agent waits. Must not decide whether an agent is wanted: the control loop stops unwanted
agents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

JOBS_MAX = 64
"""Jobs that are counted at once: an agent may ask for a job that is not of this cluster."""
LINGER_S = 1.0
"""Time for which an agent counts as waiting after its last call: it asks again at once."""


class WaitingAgents:
    """Jobs for whose world agents wait. For one event loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._until: dict[str, float] = {}

    @contextmanager
    def waiting(self, job: str) -> Iterator[None]:
        """Count an agent of `job` as waiting, unless too many jobs have one."""
        if job not in self._calls and len(self.jobs()) >= JOBS_MAX:
            yield
            return
        self._calls[job] += 1
        try:
            yield
        finally:
            self._calls[job] -= 1
            if not self._calls[job]:
                del self._calls[job]
            self._until[job] = self._clock() + LINGER_S

    def jobs(self) -> frozenset[str]:
        """Jobs for whose world an agent waits now."""
        now = self._clock()
        self._until = {job: until for job, until in self._until.items() if now < until}
        return frozenset(self._calls) | frozenset(self._until)
