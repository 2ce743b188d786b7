"""Which rank computes wrongly, if ranks repeat each other's work.

A device that gives the same wrong bytes each time agrees with itself, so executing a step again on
the same rank does not show it. But equal devices with equal software give equal bytes for equal
input. So the *owner* of a sample of work, one operation with its input, gives it to a *second* rank
of the same kind. Where both get the same bytes each time but not the same as each other, a *third*
one repeats it as well: the rank that the other two contradict is wrong. Where there is no third,
either may be wrong, and nobody is named.

Faults are rare. If several ranks are contradicted, at once or in one check after another, something
about them is different that their kinds do not show, such as a driver, and nobody is named either.
So one check names nobody: a second one, with other samples and partners, has to find the same rank.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

DISPUTES_MAX = 8
"""Samples of work that a third rank repeats in one check."""


class Dispute(Struct, frozen=True, kw_only=True):
    """A sample of work for which two ranks get different bytes."""

    owner: int
    sample: int
    """Number of the sample among those of its owner."""
    second: int
    third: int | None
    """Rank that repeats it as well; None if no other one is of their kind."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What the disputes of a check show."""

    wrong: tuple[int, ...] = ()
    """The rank that computes wrongly; empty if that is not known."""
    candidates: tuple[int, ...] = ()
    """Ranks of which one computes wrongly; empty if nobody does."""
    different: tuple[int, ...] = ()
    """Several ranks that others contradict, so that they are not of one kind; empty otherwise."""


def seconds(kinds: Sequence[int | None], turn: int) -> list[int | None]:
    """The rank that repeats the work of each rank; None if no other one is of its kind. Each rank
    repeats that of one rank at most.

    Args:
        kinds: digest of the device and the software of each rank; None for one that takes no part.
        turn: number of the check. In successive ones, each rank meets each other one of its kind.
    """
    found: list[int | None] = [None] * len(kinds)
    for ranks in _by_kind(kinds):
        others = len(ranks) - 1
        for at, rank in enumerate(ranks if others else ()):
            found[rank] = ranks[(at + 1 + turn % others) % len(ranks)]
    return found


def disputes(
    kinds: Sequence[int | None],
    turn: int,
    own: Sequence[Sequence[int | None]],
    repeated: Sequence[Sequence[int | None]],
) -> list[Dispute]:
    """The samples for which an owner and its second rank get different bytes: one of each owner,
    then another one, up to `DISPUTES_MAX`.

    Args:
        own: for each rank, what it gets for each sample of its own: a digest; None if it did not
            get the same each time, or could not repeat it.
        repeated: the same for each sample that it repeated.
    """
    found: list[tuple[int, Dispute]] = []
    by_kind = {rank: ranks for ranks in _by_kind(kinds) for rank in ranks}
    for owner, second in enumerate(seconds(kinds, turn)):
        if second is None:
            continue
        others = [rank for rank in by_kind[owner] if rank not in (owner, second)]
        third = others[turn % len(others)] if others else None
        pairs = enumerate(zip(own[owner], repeated[second], strict=False))
        differing = [at for at, (a, b) in pairs if a is not None and b is not None and a != b]
        for number, at in enumerate(differing):
            one = Dispute(owner=owner, sample=at, second=second, third=third)
            found.append((number, one))
    found.sort(key=lambda each: (each[0], each[1].owner))
    return [one for _, one in found[:DISPUTES_MAX]]


def judge(
    of: Sequence[Dispute],
    own: Sequence[Sequence[int | None]],
    repeated: Sequence[Sequence[int | None]],
    thirds: Sequence[int | None],
) -> Verdict:
    """Find the rank that computes wrongly.

    Args:
        own, repeated: see `disputes`.
        thirds: what the third rank of each dispute gets; None as there, or if there is none.
    """
    wrong, open_pairs = set[int](), list[tuple[int, int]]()
    for one, third in zip(of, thirds, strict=True):
        if third is not None and third == repeated[one.second][one.sample]:
            wrong.add(one.owner)
        elif third is not None and third == own[one.owner][one.sample]:
            wrong.add(one.second)
        else:
            open_pairs.append((one.owner, one.second))
    if len(wrong) > 1:
        return Verdict(different=tuple(sorted(wrong)))
    if wrong and all(wrong & {*pair} for pair in open_pairs):
        return Verdict(wrong=tuple(wrong), candidates=tuple(wrong))
    involved = {rank for pair in open_pairs for rank in pair} | wrong
    if wrong:  # two faults at once: a pair without the rank that a third has decided on
        return Verdict(different=tuple(sorted(involved)))
    # A rank that is in each dispute explains all of them, but so may the other one.
    common = {rank for rank in involved if all(rank in pair for pair in open_pairs)}
    return Verdict(candidates=tuple(sorted(common or involved)))


def agreed(before: Verdict, now: Verdict) -> Verdict:
    """What the checks since a recovery show together. Its `candidates` are in each check that found
    any, and `wrong` is a rank of which a third one has decided in one check, and which another
    check had found as well.

    Args:
        before: what the checks before have shown together.
        now: what another check has shown.
    """
    if before.different or not (now.candidates or now.different):
        return before
    if now.different:
        return now
    if not before.candidates:
        return Verdict(candidates=now.candidates)
    common = {*before.candidates} & {*now.candidates}
    if not common:
        return Verdict(different=tuple(sorted({*before.candidates, *now.candidates})))
    wrong = before.wrong or tuple(common & {*now.wrong})
    return Verdict(wrong=wrong, candidates=tuple(sorted(common)))


def _by_kind(kinds: Sequence[int | None]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for rank, kind in enumerate(kinds):
        if kind is not None:
            found.setdefault(kind, []).append(rank)
    return list(found.values())
