"""What a starting daemon found of a job on its node. Only says it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.values import Generation, Line, Membership
from holdfast_daemon.arenas import AdoptedArena
from holdfast_daemon.blocks import ParityRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedParity:
    """A sealed parity block that a starting daemon found."""

    lane: int
    slot: int
    record: ParityRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedJob:
    """What a starting daemon found of a job. Nothing of it is verified yet."""

    membership: Membership | None
    """None when there is none, or none that can be read."""
    line: Line | None
    retained: Generation | None
    arenas: tuple[AdoptedArena, ...]
    parities: tuple[AdoptedParity, ...]
    problems: tuple[str, ...]
    """What was damaged and removed, in words."""
