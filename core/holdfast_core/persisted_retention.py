"""Which sets of the durable tier stay, and which files belong to nothing.

Pure: what is there goes in, what may be removed comes out, with the reason. What is removed is
removed manifest first, so that a crash in the middle leaves files that belong to nothing, which the
next time removes, and never a set that looks complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError
from holdfast_core.values import Generation


class SetState(StrEnum):
    """What was found where a set lies."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    """It has a manifest, and the manifest or a file that it names is not what it must be."""
    UNCOMMITTED = "uncommitted"
    """It has no manifest: it is being written, or was given up."""
    UNKNOWN = "unknown"
    """The storage did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSet:
    """A set as it was found."""

    generation: Generation
    state: SetState
    modified_s: float
    """When the newest of its files was written, seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """A set that may go."""

    generation: Generation
    reason: str


def choose_removals(
    found: Sequence[FoundSet],
    *,
    keep: int,
    keep_every: int,
    idle_since_s: float,
    writing: Collection[Generation] = (),
) -> tuple[Removal, ...]:
    """Sets to remove, oldest first.

    The newest `keep` complete sets stay, and every complete one whose step is a multiple of
    `keep_every` (0: none). A set without a manifest goes when a newer set is complete, nobody
    writes it (`writing`, and no file of it is newer than `idle_since_s`). A damaged one, which no
    restore would take, goes when `keep` newer ones are complete. What is unknown stays.

    Raises:
        InvalidJobError: `keep` is below one, or `keep_every` below zero.
    """
    if keep < 1 or keep_every < 0:
        raise InvalidJobError(
            f"keep must be at least 1 and keep_every at least 0, and they are {keep} and "
            f"{keep_every}: a tier that keeps nothing protects nothing"
        )
    complete = sorted(
        (each.generation for each in found if each.state is SetState.COMPLETE), reverse=True
    )
    removals = []
    for each in sorted(found, key=lambda each: each.generation):
        if each.generation in writing:
            continue
        newer = sum(generation > each.generation for generation in complete)
        kept_for_good = keep_every and each.generation.step % keep_every == 0
        reason = ""
        match each.state:
            case SetState.COMPLETE if newer >= keep and not kept_for_good:
                reason = f"{newer} newer sets are complete, and {keep} are kept"
            case SetState.DAMAGED if newer >= keep:
                reason = f"it is damaged, and {newer} newer sets are complete"
            case SetState.UNCOMMITTED if newer and each.modified_s < idle_since_s:
                reason = f"it was never completed, and {complete[0]} is complete"
        if reason:
            removals.append(Removal(generation=each.generation, reason=reason))
    return tuple(removals)
