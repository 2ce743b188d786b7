"""Health of the operator, for probes. Pure.

An operator that waits for its Lease is healthy. A leader is unhealthy when a job has had no turn,
or a watch has neither received nor tried anything, for far longer than normal: then something hangs
that only a new process can fix. An unreachable API server does not make an operator unhealthy.
"""

from __future__ import annotations

from dataclasses import dataclass

LOOK_S_MAX = 180.0
WATCH_S_MAX = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The values that answers to probes are made from."""

    leads: bool
    ready: bool
    """Whether all watches of a leader have their first lists, and daemons can connect."""
    oldest_look_s: float = 0.0
    """Seconds since the last turn of the job that has waited longest for one."""
    watches_s: tuple[tuple[str, float], ...] = ()
    """(kind of object, seconds since its watch last received something or tried to)."""

    def unwell(self) -> str:
        """Reason to end the process; empty when it is well."""
        if not self.leads:
            return ""
        if self.oldest_look_s > LOOK_S_MAX:
            return f"a job has not been looked at for {self.oldest_look_s:.0f} s"
        for kind, age_s in self.watches_s:
            if age_s > WATCH_S_MAX:
                return f"the watch of {kind} has been silent for {age_s:.0f} s"
        return ""

    def not_ready(self) -> str:
        """Reason not to rely on this process; empty when it is ready."""
        if self.leads and not self.ready:
            return "the first lists of pods and nodes have not arrived yet"
        return self.unwell()
