"""The newest failure of a trainer, ends for lack of memory, and replicas with wrong bytes, as
control loops remember them and people see them."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.corruption import Proof


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
    kernel_messages: str = ""
    """Lines that the kernel of its node wrote about it; empty where it could not be asked."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LastCorruption:
    """Newest divergence of a job's replicas, as control loops remember it and people see it."""

    epoch: int
    step: int
    """Step after which replicas differed."""
    proof: Proof
    equal_step: int | None = None
    """Newest step before that after which they were equal, if that is known."""
    unit: str = ""
    """First unit that differed."""
    ranks: tuple[int, ...] = ()
    """Ranks that are wrong; while nobody knows that, those one of which is."""
    member: int | None = None
    """Member of the ranks that are known to be wrong; None if they are of several."""
    node: str = ""
    """Node of that member at that time."""
    compared_all: bool = False
    """Whether every generation is from before the divergence."""
    text: str = ""
    """All of this in words."""
