"""States that daemons, the control loop and trainers name to each other.

Their values travel between processes and stand in status files, metrics and the catalogue: a member
may be renamed, its value may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RankHealth(StrEnum):
    """What a rank does, in the words of REFT §4.2."""

    HEALTHY = "HEALTHY"
    SNAPSHOTTING = "SNAPSHOTTING"
    UNHEALTHY = "UNHEALTHY"
    OFFLINE = "OFFLINE"

    @property
    def at_work(self) -> bool:
        """Whether the rank's SDK has a session."""
        return self in (RankHealth.HEALTHY, RankHealth.SNAPSHOTTING)

    @classmethod
    def of(cls, word: str) -> RankHealth:
        """The state that `word` names; OFFLINE for a word that this version does not know."""
        try:
            return cls(word)
        except ValueError:
            return cls.OFFLINE


class RestoreSource(StrEnum):
    """Where the bytes of a restore came from."""

    UNKNOWN = ""
    """Nobody has reported it yet."""
    NONE = "none"
    """Nowhere: training began from the beginning."""
    LOCAL = "local"
    PARITY = "parity"
    STORAGE = "storage"

    @classmethod
    def of(cls, word: str) -> RestoreSource:
        """The source that `word` names; UNKNOWN for a word that this version does not know."""
        try:
            return cls(word)
        except ValueError:
            return cls.UNKNOWN


class RestorePhase(StrEnum):
    """How far a restore is."""

    UNKNOWN = ""
    """The daemon names a phase that this version does not know."""
    INVENTORIES = "inventories"
    """Daemons verify what they hold."""
    STORAGE = "storage"
    """Durable storage is asked what it holds."""
    LOAD = "load"
    """The rank's snapshot is read from durable storage."""
    REBUILD = "rebuild"
    """The rank's snapshot is rebuilt from its parity group."""
    READY = "ready"

    @property
    def waits_for_storage(self) -> bool:
        """Whether only durable storage can bring the restore on."""
        return self in (RestorePhase.STORAGE, RestorePhase.LOAD)

    @classmethod
    def of(cls, word: str) -> RestorePhase:
        """The phase that `word` names; UNKNOWN for a word that this version does not know."""
        try:
            return cls(word)
        except ValueError:
            return cls.UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreProgress:
    """What a daemon reports of a restore that a trainer waits for."""

    phase: RestorePhase
    done: int = 0
    total: int = 0
    """Daemons in `inventories`, bytes in `load`."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.phase} {self.done}/{self.total} {self.detail}".strip()
