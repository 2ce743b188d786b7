"""The engine's memory of storage within one epoch: a plain record that `loading` changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core.durable.choice import Found
from holdfast_core.snapshots.generations import Generation


@dataclass(slots=True)
class Loading:
    """State of storage in one epoch: the leader's search, and the loads of this daemon."""

    looking: bool = False
    found: Found | None = None
    """Result of the leader's latest look at storage; None before the first."""
    why: str = ""
    """Why memory has no line, in the words of the decision."""
    logged_reason: str = ""
    """Reason of the leader's newest logged choice, in words."""
    problem: str = ""
    """Why there is no line yet, in words for operators; empty when all is well."""
    beyond: int = 0
    """Epoch of an earlier run in storage, which this epoch must pass first; 0: none."""
    tries: dict[str, int] = field(default_factory=dict)
    """Consecutive failures of each task."""
    failed: dict[tuple[int, Generation], str] = field(default_factory=dict)
    """Snapshots found damaged in storage, by (rank, generation), and what is wrong."""
