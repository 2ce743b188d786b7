"""Choice of the stored generation to continue from when the daemons' memory has no recovery line.

Pure: it takes the contents of storage and returns a choice with its reason. It chooses a fresh
start only if storage was read, is the right one, and holds no copy at all. A job that waits can
still be helped by a person; training that silently started from the beginning would lose what the
copies protect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Tier

ELSEWHERE = "load it with torch.distributed.checkpoint (docs/persistence.md)"
"""Advice for a copy of another parallelism."""

MARK_FILE = "tier.json"
"""File in the job's directory from its first set on; it shows that this is the right storage."""

_NAMED_MAX = 4
"""Most copies that a reason names one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCopy:
    """A whole set in storage."""

    generation: Generation
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableCopy:
    """A set in storage that has a manifest but cannot be read."""

    generation: Generation
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Copies of a job found in storage."""

    copies: tuple[StoredCopy, ...] = ()
    """Whole sets, in any order."""
    unreadable: tuple[UnreadableCopy, ...] = ()
    marked: bool = False
    """Whether the job's mark was found. It is looked for only where there are no sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyChoice:
    """The choice. Without a generation, and with neither `fresh` nor `beyond`, the job waits."""

    reason: str
    generation: Generation | None = None
    """The generation that all ranks load."""
    fresh: bool = False
    """There is no copy: the job starts from the beginning."""
    beyond: int = 0
    """An epoch of an earlier run, which the job's epoch has to exceed first: the next capture must
    be newer than every copy."""


def choose_copy(
    found: Found,
    tier: Tier,
    *,
    epoch: int,
    world_size: Callable[[Generation], int | None],
    unusable: Mapping[Generation, str],
    current: Generation | None = None,
) -> CopyChoice:
    """The copy to load.

    Args:
        world_size: the number of ranks of the world that captured a generation; None where that
            world is not known.
        unusable: copies that some rank could not load, and why.
        current: the copy that is being loaded. It is kept while it can be used, so that a newer
            copy that reappears meanwhile does not undo what is already loaded.
    """
    copies = sorted(found.copies, key=lambda copy: copy.generation, reverse=True)
    newest = max((copy.generation.epoch for copy in copies), default=0)
    if newest >= epoch:
        return CopyChoice(
            reason=f"{tier.uri} holds generations of an earlier run, up to epoch {newest}; the "
            f"next epoch must be greater",
            beyond=newest,
        )
    if not copies and not found.unreadable:
        if tier.restore_from:
            return CopyChoice(reason=_not_there(tier, copies))
        if tier.persisted and not found.marked:
            return CopyChoice(reason=_not_the_right_one(tier))
        return CopyChoice(reason=f"{tier.uri} holds no complete copy of this job", fresh=True)
    wanted = [copy for copy in copies if tier.restore_from in ("", str(copy.generation))]
    if tier.restore_from and not wanted:
        return CopyChoice(reason=_not_there(tier, copies))
    refused: list[tuple[Generation, str]] = []
    fits: list[Generation] = []
    for copy in wanted:
        why = unusable.get(copy.generation, "")
        size = world_size(copy.generation)
        if size is None:
            why = f"is of a world that the job no longer knows; {ELSEWHERE}"
        elif copy.world_size != size:
            why = f"has {copy.world_size} ranks and the job has {size}; {ELSEWHERE}"
        if why:
            refused.append((copy.generation, why))
        else:
            fits.append(copy.generation)
    if not tier.restore_from:
        refused += [(copy.generation, copy.reason) for copy in found.unreadable]
    if not fits:
        return CopyChoice(reason=_all_refused(tier, refused))
    chosen = current if current in fits else fits[0]
    skipped = [(generation, why) for generation, why in refused if generation > chosen]
    note = f"; skipped {_refusals(skipped)}" if skipped else ""
    return CopyChoice(reason=f"generation {chosen} from {tier.uri}{note}", generation=chosen)


def _not_there(tier: Tier, copies: list[StoredCopy]) -> str:
    there = _listed([str(copy.generation) for copy in copies]) if copies else "nothing"
    return (
        f"restore.from asks for generation {tier.restore_from}, and {tier.uri} holds {there}: give "
        f"one of these, or remove restore.from"
    )


def _not_the_right_one(tier: Tier) -> str:
    return (
        f"{tier.uri} can be read but holds nothing of this job, although generation "
        f"{tier.persisted} was written there: the storage is not mounted, or it is a different "
        f"one. The job waits, because a fresh start would lose those copies. Mount the storage; "
        f"if the copies were removed on purpose, put an empty file {MARK_FILE} into the job's "
        f"directory there"
    )


def _all_refused(tier: Tier, refused: list[tuple[Generation, str]]) -> str:
    return (
        f"no copy in {tier.uri} can be used: {_refusals(refused)}. The job waits, because a fresh "
        f"start would lose them: repair them, or give the job another persistence.uri"
    )


def _refusals(refused: list[tuple[Generation, str]]) -> str:
    return _listed([f"{generation} {why}" for generation, why in refused])


def _listed(texts: list[str]) -> str:
    shown = "; ".join(texts[:_NAMED_MAX])
    more = len(texts) - _NAMED_MAX
    return f"{shown}; and {more} more" if more > 0 else shown
