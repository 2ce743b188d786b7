"""The newest failure of a trainer, as control loops remember it and people are shown it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerFailure:
    """A rank, or an agent, that ended by itself with an error."""

    epoch: int
    """In which it failed."""
    member: int
    text: str
    """What failed and how, such as "rank 3 exited with code 1"."""
    exit_code: int | None = None
    last_lines: str = ""
    """What it wrote last; empty where nobody kept that."""
    times: int = 1
    """Epochs in a row, up to this one, that ended by a failure like it."""
