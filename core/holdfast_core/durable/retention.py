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
from holdfast_core.snapshots.generations import Generation


class SetState(StrEnum):
    """What was found where a set lies."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    """It has a manifest, and the manifest or a file that it names is not what it must be."""
    UNCOMMITTED = "uncommitted"
    """It has no manifest: it is being written, or was given up."""
    HOLDER = "holder"
    """Sets that it names were removed, and a complete set names it: nobody restores it, and what
    its files hold is needed."""
    UNKNOWN = "unknown"
    """The storage did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSet:
    """A set as it was found."""

    generation: Generation
    state: SetState
    modified_s: float
    """When the newest of its files was written, seconds since 1970."""
    needs: frozenset[Generation] = frozenset()
    """Other sets, whose files hold experts that this one names."""


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

    Nothing goes that a set which stays to be restored needs. What a set needs that stays only
    because of others may go: it is a holder from then on, or sets would hold each other for ever.
    So wherever a crash comes between two removals, the sets that stay have all that they need.
    Where sets need others and one is unknown, which may need any before it, none before it goes.

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
    newest = complete[:keep]
    needed = frozenset[Generation]().union(
        *(
            each.needs
            for each in found
            if each.generation in newest
            or (each.state is SetState.COMPLETE and is_for_good(each.generation, keep_every))
            or each.state is SetState.UNKNOWN
        )
    )
    unknown = [each.generation for each in found if each.state is SetState.UNKNOWN]
    name_others = any(each.needs for each in found)
    newest_unknown = max(unknown, default=None) if name_others else None
    removals = []
    for each in sorted(found, key=lambda each: each.generation):
        if each.generation in writing or each.generation in needed:
            continue
        if newest_unknown is not None and each.generation < newest_unknown:
            continue
        newer = sum(generation > each.generation for generation in complete)
        reason = ""
        match each.state:
            case SetState.COMPLETE if newer >= keep and not is_for_good(
                each.generation, keep_every
            ):
                reason = f"{newer} newer sets are complete, and {keep} are kept"
            case SetState.DAMAGED if newer >= keep:
                reason = f"it is damaged, and {newer} newer sets are complete"
            case SetState.HOLDER if newer >= keep:
                reason = "no set that is kept needs it any more"
            case SetState.UNCOMMITTED if newer and each.modified_s < idle_since_s:
                reason = f"it was never completed, and {complete[0]} is complete"
        if reason:
            removals.append(Removal(generation=each.generation, reason=reason))
    return tuple(removals)


def is_for_good(generation: Generation, keep_every: int) -> bool:
    """Whether a complete set of `generation` is never removed."""
    return bool(keep_every) and generation.step % keep_every == 0
