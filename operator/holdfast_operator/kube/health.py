"""Whether the operator is well, for probes. Pure.

An operator that waits for its Lease is well. One that leads is not when a job was not looked at, or
a watch made no attempt to hear anything, for longer than they ever should: then something hangs
that only a new process heals. An API server that is away makes nobody unwell.
"""

from __future__ import annotations

from dataclasses import dataclass

LOOK_S_MAX = 180.0
WATCH_S_MAX = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """What probes are answered from."""

    leads: bool
    ready: bool
    """All of a leader's watches are in step, and daemons can dial in."""
    oldest_look_s: float = 0.0
    watches_s: tuple[tuple[str, float], ...] = ()
    """(kind of object, seconds since its watch last heard or tried)."""

    def unwell(self) -> str:
        """Why the process should be ended; empty when it is well."""
        if not self.leads:
            return ""
        if self.oldest_look_s > LOOK_S_MAX:
            return f"a job was not looked at for {self.oldest_look_s:.0f} s"
        for kind, age_s in self.watches_s:
            if age_s > WATCH_S_MAX:
                return f"the watch of {kind} is silent for {age_s:.0f} s"
        return ""

    def not_ready(self) -> str:
        """Why others should not count on this process; empty when they may."""
        if self.leads and not self.ready:
            return "the first lists of pods and nodes are on their way"
        return self.unwell()
