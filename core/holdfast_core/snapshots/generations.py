"""Generations: the names of snapshots, and the line from which a job resumes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, slots=True)
class Generation:
    """The snapshots of all ranks for one step, captured in one epoch.

    The epoch is part of the identity because a step that is executed again after a recovery belongs
    to another timeline: bytes of the two must never be mixed. Order is by epoch, then step:
    anything captured after a recovery is newer than everything captured before it.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Generation:
        """The generation that `str()` wrote as `epoch.step`."""
        epoch, _, step = text.partition(".")
        return cls(int(epoch), int(step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The decision where an epoch starts: a generation, or None for a fresh start."""

    generation: Generation | None
    reason: str = field(compare=False)
    stored: bool = field(default=False, compare=False)
    """True when memory had no line and the generation was loaded from storage."""
