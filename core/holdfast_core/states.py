"""States that daemons, the control loop and trainers report to each other.

Their values travel between processes and are stored in status files, metrics and the catalogue: a
member may be renamed, its value may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

_State = TypeVar("_State", bound=StrEnum)


def _named(states: type[_State], name: str, unknown: _State) -> _State:
    """The state called `name`; `unknown` for a name that this version does not know."""
    return next((state for state in states if state == name), unknown)


class RankHealth(StrEnum):
    """What a rank is doing, in the terms of REFT §4.2."""

    HEALTHY = "HEALTHY"
    SNAPSHOTTING = "SNAPSHOTTING"
    UNHEALTHY = "UNHEALTHY"
    OFFLINE = "OFFLINE"

    @property
    def at_work(self) -> bool:
        """Whether the rank's SDK has a session."""
        return self in (RankHealth.HEALTHY, RankHealth.SNAPSHOTTING)

    @classmethod
    def of(cls, name: str) -> RankHealth:
        """The state called `name`; OFFLINE for an unknown name."""
        return _named(cls, name, cls.OFFLINE)


class RestoreSource(StrEnum):
    """Where the bytes of a restore came from."""

    UNKNOWN = ""
    """No source has been reported yet, or one that this version does not define."""
    NONE = "none"
    """No source: training started from the beginning."""
    LIVE = "live"
    """Processes that stayed had it, or gave it to new ones: nothing was restored."""
    LOCAL = "local"
    PARITY = "parity"
    STORAGE = "storage"

    @classmethod
    def of(cls, name: str) -> RestoreSource:
        """The source called `name`; UNKNOWN for an unknown name."""
        return _named(cls, name, cls.UNKNOWN)


class EndReason(StrEnum):
    """Why a worker failed, in the words that Kubernetes has for the end of a container, where it
    has one."""

    UNKNOWN = ""
    """The exit code has to do, or a reason that this version does not define."""
    OOM_KILLED = "OOMKilled"
    """The kernel killed it, or a process below it, for lack of memory."""
    HARDWARE_FAULT = "HardwareFault"
    """The kernel had just reported that a device or the memory of its node is at fault."""

    @classmethod
    def of(cls, name: str) -> EndReason:
        """The reason called `name`; UNKNOWN for an unknown name."""
        return _named(cls, name, cls.UNKNOWN)


class RestorePhase(StrEnum):
    """Stage that a restore has reached."""

    UNKNOWN = ""
    """Phase that this version does not define."""
    INVENTORIES = "inventories"
    """Daemons verify what they hold."""
    STORAGE = "storage"
    """Daemons wait for the list of sets in durable storage."""
    LOAD = "load"
    """The rank's snapshot is read from durable storage."""
    REBUILD = "rebuild"
    """The rank's snapshot is rebuilt from its parity group."""
    READY = "ready"

    @property
    def waits_for_storage(self) -> bool:
        """Whether the restore waits for durable storage alone."""
        return self in (RestorePhase.STORAGE, RestorePhase.LOAD)

    @classmethod
    def of(cls, name: str) -> RestorePhase:
        """The phase called `name`; UNKNOWN for an unknown name."""
        return _named(cls, name, cls.UNKNOWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreProgress:
    """Progress of a restore that a trainer waits for, as the daemon reports it."""

    phase: RestorePhase
    done: int = 0
    total: int = 0
    """Number of daemons in `inventories`, of bytes in `load`."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.phase} {self.done}/{self.total} {self.detail}".strip()
