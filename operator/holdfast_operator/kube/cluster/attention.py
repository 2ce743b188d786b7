"""Tracks whether this process has been listening, and notices daemons that fall silent.

A silent daemon sends no event, so the operator checks all daemons regularly, once for all jobs. A
process that was itself held up has not read the heartbeats that arrived: then earlier silence
proves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast_operator.control.server import ControlServer
from holdfast_operator.reconciler.observe.lookups import SUSPECT_AFTER_HEARTBEATS

TICK_S = 0.1
LAPSE_HEARTBEATS = 2.0
"""Pause of this process after which silence from before it proves nothing."""


class Attention:
    """Checks for daemons that have fallen silent. `run` it as a task.

    Args:
        wake: called with the keys of the jobs that a daemon's silence affects.
    """

    def __init__(
        self,
        server: ControlServer,
        *,
        clock: Callable[[], float],
        wake: Callable[[frozenset[str]], None],
    ) -> None:
        self._server, self._clock, self._wake = server, clock, wake
        self._late: frozenset[str] = frozenset()
        self._ticked_at = clock()
        self.lapsed_at = self._ticked_at

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """Check all daemons once."""
        self.listened_since(self._clock())
        late = self.late()
        for name in sorted(late - self._late):
            self._wake(self._server.jobs_on(name))
        self._late = late

    def listened_since(self, time: float) -> bool:
        """Whether this process has been listening without a long pause since `time`."""
        now = self._clock()
        if now - self._ticked_at > max(LAPSE_HEARTBEATS * self._server.heartbeat_s, 2 * TICK_S):
            self.lapsed_at = now
        self._ticked_at = now
        return time >= self.lapsed_at

    def late(self) -> frozenset[str]:
        """Nodes whose daemons are not connected, or are late with their heartbeats."""
        limit = self._clock() - SUSPECT_AFTER_HEARTBEATS * self._server.heartbeat_s
        return frozenset(
            name
            for name, view in self._server.nodes().items()
            if not view.connected or view.heartbeat_at < limit
        )
