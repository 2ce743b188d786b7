"""Limits how often callers may call: calls that come too fast wait, and beyond that are refused.

Each caller (a session, a job, a peer) has its own account of calls: `burst` at once, then `per_s`.
A call beyond that waits its turn, up to `WAIT_S_MAX`, while other callers are served. A call that
would have to wait longer is refused, but only after that time, so that a retry gains nothing. A
trainer that saves in a tight loop thus slows down itself, not the training of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.errors import RateLimitedError

WAIT_S_MAX = 1.0
"""Longest delay of a call: shorter than the time for which callers wait for an answer."""

CALLERS_MAX = 4096
"""Accounts that are kept; beyond that, the one that was opened first is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Calls that one caller may make: `burst` at once, then `per_s`."""

    per_s: float
    burst: int


SESSION_RATE = Rate(per_s=200.0, burst=400)
"""Calls of one session: a save takes three, and no save can be protected in less than a few
milliseconds."""
JOB_RATE = Rate(per_s=300.0, burst=600)
"""Other calls of one job's trainers and agents on this node, such as Hello and Restore."""
STRANGER_RATE = Rate(per_s=200.0, burst=400)
"""Calls for jobs that are not on this node, and for the daemon's status: all callers that have a
right to them share one account."""
STRANGERS = (("strangers",), STRANGER_RATE)
REFUSAL_RATE = Rate(per_s=200.0, burst=400)
"""Calls that are refused because the caller has no right: all such callers share one account."""
REFUSALS = (("refusals",), REFUSAL_RATE)
PEER_RATE = Rate(per_s=100.0, burst=200)
"""Reports of one member, or directives of one job. The newest wins, so senders lose nothing by
waiting."""
SUSPECT_RATE = Rate(per_s=5.0, burst=20)
"""Suspicions of one job: each causes a snapshot to be verified."""
FETCH_RATE = Rate(per_s=500.0, burst=2000)
"""Manifests that the peers of one job request: a few for each rank and generation."""
LINKS_RATE = Rate(per_s=20.0, burst=200)
"""Measurements of links that the peers of one job request: each a few, when its launcher starts."""


class Accounts:
    """The accounts of all callers of a service (the generic cell rate algorithm: one number each).

    Args:
        clock: monotonic seconds.
        limited: called for each call that is refused.
    """

    def __init__(
        self, clock: Callable[[], float], limited: Callable[[], None] = lambda: None
    ) -> None:
        self._clock, self._limited = clock, limited
        self._due: dict[tuple[str, ...], float] = {}
        """Caller → time at which its calls so far are paid off, at its rate."""

    def __len__(self) -> int:
        return len(self._due)

    def wait_s(self, caller: tuple[str, ...], rate: Rate) -> float:
        """Seconds that this call has to wait. More than WAIT_S_MAX: the call must be refused, and
        is not counted."""
        now = self._clock()
        due = max(self._due.get(caller, now), now)
        wait_s = due - now - (rate.burst - 1) / rate.per_s
        if wait_s > WAIT_S_MAX:
            return wait_s
        if caller not in self._due and len(self._due) >= CALLERS_MAX:
            del self._due[next(iter(self._due))]
        self._due[caller] = due + 1 / rate.per_s
        return max(wait_s, 0.0)

    async def admit(self, caller: tuple[str, ...], rate: Rate) -> None:
        """Return when it is the call's turn.

        Raises:
            RateLimitedError: the call would have to wait longer than WAIT_S_MAX.
        """
        wait_s = self.wait_s(caller, rate)
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, WAIT_S_MAX))
        if wait_s > WAIT_S_MAX:
            self._limited()
            raise RateLimitedError(
                f"{' '.join(caller)} calls more than {rate.per_s:.0f} times per second; wait for "
                f"the answer to a call, and save less often"
            )
