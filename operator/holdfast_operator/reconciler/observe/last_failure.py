"""The newest failure of a trainer, and ends for lack of memory, as control loops remember them and
people see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerFailure:
    """Failure of a rank or an agent that ended by itself with an error."""

    epoch: int
    """Epoch of the failure."""
    member: int
    text: str
    """The failure in words, such as "rank 3 exited with code 1"."""
    exit_code: int | None = None
    last_lines: str = ""
    """Last lines that it wrote; empty when they were not kept."""
    times: int = 1
    """Number of epochs in a row, up to this one, that ended with a failure like it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShortage:
    """Ends for lack of memory at one step of the job."""

    epoch: int
    """Newest epoch that ended so."""
    step: int
    """Newest step that was known when the first of them ended."""
    times: int = 1
    """Number of epochs that ended so, with no step beyond that one between them."""
