"""How often callers may ask: back-pressure for those in a hurry, a refusal for those in a frenzy.

Each caller (a session, a job, a peer) has its own account of calls: `burst` at once, then `per_s`.
A call beyond that waits its turn, up to `WAIT_S_MAX`, while other callers are served; a call that
would have to wait longer is refused, after that time, so that asking again is no way around it. A
trainer that saves in a tight loop so slows down itself, not the training of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.errors import RateLimitedError

WAIT_S_MAX = 1.0
"""The longest that a call is held up: less than callers wait for an answer."""

CALLERS_MAX = 4096
"""Accounts that are kept; the one that was opened first is closed for another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What one caller may do."""

    per_s: float
    burst: int


SESSION_RATE = Rate(per_s=200.0, burst=400)
"""Calls of one session: a save takes three, and none can be protected in less than a few
milliseconds."""
JOB_RATE = Rate(per_s=300.0, burst=600)
"""Other calls of one job's trainers and agents on this node, such as Hello and Restore."""
STRANGER_RATE = Rate(per_s=200.0, burst=400)
"""Calls for jobs that are not on this node, and questions about the daemon: of all callers that
have a right to them, together."""
STRANGERS = (("strangers",), STRANGER_RATE)
REFUSAL_RATE = Rate(per_s=200.0, burst=400)
"""Calls that are refused because the caller has no right: of all such callers together."""
REFUSALS = (("refusals",), REFUSAL_RATE)
PEER_RATE = Rate(per_s=100.0, burst=200)
"""Reports and directives of one member. The newest wins, so that senders lose nothing by
waiting."""
SUSPECT_RATE = Rate(per_s=5.0, burst=20)
"""Suspicions of one job: each has a snapshot verified."""
FETCH_RATE = Rate(per_s=500.0, burst=2000)
"""Manifests that the peers of one job ask for: a few of each rank in a generation."""


class Accounts:
    """The accounts of all callers of a service (the generic cell rate algorithm: one number each).

    Args:
        clock: monotonic seconds.
        limited: told, for each call that was refused.
    """

    def __init__(
        self, clock: Callable[[], float], limited: Callable[[], None] = lambda: None
    ) -> None:
        self._clock, self._limited = clock, limited
        self._due: dict[tuple[str, ...], float] = {}
        """When a caller's calls so far are paid off, at its rate."""

    def __len__(self) -> int:
        return len(self._due)

    def wait_s(self, caller: tuple[str, ...], rate: Rate) -> float:
        """How long this call has to wait; more than WAIT_S_MAX for one that does not count and is
        to be refused."""
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
            RateLimitedError: it would take too long.
        """
        wait_s = self.wait_s(caller, rate)
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, WAIT_S_MAX))
        if wait_s > WAIT_S_MAX:
            self._limited()
            raise RateLimitedError(
                f"{' '.join(caller)} calls more than {rate.per_s:.0f} times a second; wait for the "
                f"answer to a call, and save less often"
            )
