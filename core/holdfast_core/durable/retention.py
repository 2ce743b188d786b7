"""Choice of the stored sets to remove, and of the files that belong to no set.

Pure: it takes the sets in storage, and returns those that may be removed, with the reason. A set's
manifest is removed first, so that a crash in the middle leaves files that belong to no set, which
the next cleaning removes, and never a set that looks complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation


class SetState(StrEnum):
    """State in which a set was found."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    """The set has a manifest that is damaged, or that names a damaged or missing file."""
    UNCOMMITTED = "uncommitted"
    """The set has no manifest: it is being written, or was given up."""
    HOLDER = "holder"
    """Sets that it names were removed, and a complete set names it: it is never restored itself,
    but its files are needed."""
    UNKNOWN = "unknown"
    """The storage did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSet:
    """A set as it was found."""

    generation: Generation
    state: SetState
    modified_s: float
    """Time at which the newest of its files was written, seconds since 1970."""
    needs: frozenset[Generation] = frozenset()
    """Other sets, whose files hold experts that this one names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """A set that may be removed."""

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
    `keep_every` (0: none). A set without a manifest goes when a newer set is complete and it is no
    longer being written (it is not in `writing`, and its newest file is older than `idle_since_s`).
    A damaged set, which no restore would take, goes when `keep` newer ones are complete. An unknown
    set stays.

    A set stays when a set that may be restored needs it. A set that stays only because others need
    it does not make the sets that it needs itself stay: when they go, it becomes a holder.
    Otherwise sets would keep each other forever. So after a crash between any two removals, the
    sets that stay have all that they need. Where sets need others, no set older than an unknown one
    goes: the unknown set may need any of them.

    Raises:
        InvalidJobError: when `keep` is below one, or `keep_every` below zero.
    """
    if keep < 1 or keep_every < 0:
        raise InvalidJobError(
            f"keep is {keep} and keep_every is {keep_every}, but keep must be at least 1 and "
            f"keep_every at least 0: a tier that keeps nothing protects nothing"
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
                reason = "no kept set needs it any more"
            case SetState.UNCOMMITTED if newer and each.modified_s < idle_since_s:
                reason = f"it was never completed, and {complete[0]} is complete"
        if reason:
            removals.append(Removal(generation=each.generation, reason=reason))
    return tuple(removals)


def is_for_good(generation: Generation, keep_every: int) -> bool:
    """Whether a complete set of `generation` is never removed."""
    return bool(keep_every) and generation.step % keep_every == 0
