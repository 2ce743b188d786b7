"""States that daemons, the control loop and trainers report to each other.

Their values travel between processes and are stored in status files, metrics and the catalogue: a
member may be renamed, its value may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

_State = TypeVar("_State", bound=StrEnum)


def _named(states: type[_State], word: str, unknown: _State) -> _State:
    """The state that `word` names; `unknown` for a word that this version does not know."""
    return next((state for state in states if state == word), unknown)


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
    def of(cls, word: str) -> RankHealth:
        """The state that `word` names; OFFLINE for an unknown word."""
        return _named(cls, word, cls.OFFLINE)


class RestoreSource(StrEnum):
    """Where the bytes of a restore came from."""

    UNKNOWN = ""
    """No source has been reported yet, or one that this version does not define."""
    NONE = "none"
    """No source: training started from the beginning."""
    LOCAL = "local"
    PARITY = "parity"
    STORAGE = "storage"

    @classmethod
    def of(cls, word: str) -> RestoreSource:
        """The source that `word` names; UNKNOWN for an unknown word."""
        return _named(cls, word, cls.UNKNOWN)


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
    def of(cls, word: str) -> RestorePhase:
        """The phase that `word` names; UNKNOWN for an unknown word."""
        return _named(cls, word, cls.UNKNOWN)


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
