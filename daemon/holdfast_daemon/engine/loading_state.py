"""What the engine knows of storage in one epoch. Plain records; `loading` changes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core.durable.choice import Found
from holdfast_core.snapshots.generations import Generation


@dataclass(slots=True)
class Loading:
    """One epoch's dealings with storage: of the leader, which looks, and of those who load."""

    looking: bool = False
    found: Found | None = None
    """What the leader saw when it looked last; None until it has."""
    why: str = ""
    """Why memory has no line, in the words of the decision."""
    logged_reason: str = ""
    """The leader's newest choice, in words."""
    problem: str = ""
    """Why there is no line yet, in words for people; empty when all is well."""
    beyond: int = 0
    """An epoch in storage that this one does not come after; 0: none."""
    tries: dict[str, int] = field(default_factory=dict)
    """What has failed how often in a row."""
    failed: dict[tuple[int, Generation], str] = field(default_factory=dict)
    """Ranks' snapshots whose bytes in storage are not right, and what is wrong."""
