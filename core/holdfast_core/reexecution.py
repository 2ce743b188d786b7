"""Which rank computed wrongly, if one step was executed several times from the same state.

A computation that is repeated gives the same bytes, so executions that differ show that something
went wrong in one of them. Of three, the two that agree were right. But most ranks then differ,
because they have received what was computed wrongly elsewhere. So each execution records what its
rank gave to each communication with other ranks, and the sums that it took from them. A rank whose
first difference comes after it took part in a communication to which another rank had given other
bytes may have got it from there. A rank whose first difference comes before any of these has made
it itself, or took a wrong sum: the members of a group add up each other's parts, so the wrong one
may be another rank. So a rank is named only if each sum that it took before is known, and had the
same bytes in both executions.

Digests are equal or they are not: there is no tolerance. They come from the ranks of one job, which
conclude the same from the same digests. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from msgspec import Struct, json
from msgspec.structs import replace

GIVEN_MAX = 50_000
"""Communications of one execution that are recorded."""
GROUPS_MAX = 1000
"""Groups of communications of one rank that are compared with those of other ranks."""


class Given(Struct, frozen=True, array_like=True, gc=False):
    """What one rank gave to one communication."""

    group: str
    """The group of ranks that take part, or sender, receiver and tag of a message. All ranks that
    take part give it the same name, and take part in its communications in the same order."""
    digest: int
    """Digest of the bytes; 0 where the rank only receives."""
    sums: bool = False
    """Whether ranks receive sums, which other ranks may have added up."""


class Execution(Struct, frozen=True, kw_only=True):
    """One rank's record of an execution, up to the moment when its gradients were complete."""

    given: tuple[Given, ...] = ()
    """What it gave to others, in the order of its program."""
    gradients: dict[str, int] = {}
    """Unit → digest of the rank's part of its gradients."""
    whole: bool = True
    """Whether each communication is recorded."""
    taken: dict[int, int] = {}
    """Number of a communication in `given`, from 0 on → digest of the sum that the rank took from
    it, where that is known."""

    @property
    def made(self) -> Execution:
        """What the rank made itself. Whatever it took comes from what all ranks made."""
        return replace(self, taken={})

    def digest(self) -> int:
        """Digest of what the rank made."""
        return xxhash.xxh3_64_intdigest(json.encode(self.made))


class Difference(Struct, frozen=True, kw_only=True):
    """How two executions of one rank differ: what other ranks have to know of it."""

    differs: bool = False
    first_other: dict[str, int] = {}
    """Group → number, from 1 on, of its first communication to which the executions gave other
    bytes."""
    before: dict[str, int] = {}
    """Group → number of its communications before the first difference."""
    has_sums: bool = False
    """Whether it took sums before its first difference that had other bytes, or unknown ones."""
    whole: bool = True
    """Whether each communication is in these numbers."""
    unit: str = ""
    """First unit with other gradients; empty if none has."""


class Judgement(Struct, frozen=True, kw_only=True):
    """What the differences of all ranks show."""

    wrong: tuple[int, ...] = ()
    """The rank that computed wrongly; empty if that is not known."""
    origins: tuple[int, ...] = ()
    """Ranks that have differences which they did not give each other."""
    unit: str = ""
    """First unit whose gradients one of them, or else any rank, had wrong; empty if no gradients
    differ."""


def odd_one(digests: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Of three executions, the one that differs from the other two on any rank, and one of the
    others. None if there are no such two.

    Args:
        digests: those of the executions, rank by rank.
    """
    first, second, third = zip(*digests, strict=True)
    if second == third:
        return 0, 2
    return (1, 2) if first == third else None


def difference(odd: Execution, right: Execution) -> Difference:
    """Compare two executions of one rank."""
    if odd.made == right.made:
        return Difference(whole=odd.whole)
    at = _first_difference(odd, right)
    before: dict[str, int] = {}
    for each in odd.given[:at]:
        before[each.group] = before.get(each.group, 0) + 1
    first_other: dict[str, int] = {}
    for (group, number), _ in _numbered(odd).items() ^ _numbered(right).items():
        first_other[group] = min(number, first_other.get(group, number))
    units = sorted({*odd.gradients, *right.gradients})
    bounded = max(len(before), len(first_other)) <= GROUPS_MAX
    return Difference(
        differs=True,
        first_other=first_other if bounded else {},
        before=before if bounded else {},
        has_sums=any(
            each.sums and (odd.taken.get(n) is None or odd.taken[n] != right.taken.get(n))
            for n, each in enumerate(odd.given[:at])
        ),
        whole=bounded and odd.whole and right.whole,
        unit=next((u for u in units if odd.gradients.get(u) != right.gradients.get(u)), ""),
    )


def judge(differences: Sequence[Difference]) -> Judgement:
    """Find the rank that computed wrongly.

    Args:
        differences: between a wrong execution and a right one, of all ranks in their order.
    """
    differing = tuple(rank for rank, each in enumerate(differences) if each.differs)
    found = origins(differences)
    # A rank whose record has gaps may have passed on the difference unseen.
    whole = all(each.whole for each in differences)
    certain = whole and len(found) == 1 and not differences[found[0]].has_sums
    units = [differences[rank].unit for rank in (*found, *differing)]
    return Judgement(
        wrong=found if certain else (),
        origins=found or differing,
        unit=next(filter(None, units), ""),
    )


def origins(differences: Sequence[Difference]) -> tuple[int, ...]:
    """The ranks that differ, and cannot have received it from what another rank gave."""
    # Of each group, the first communication with other bytes, of one rank and of any other one.
    firsts: dict[str, tuple[tuple[int, int], ...]] = {}
    for rank, each in enumerate(differences):
        for group, number in each.first_other.items():
            firsts[group] = tuple(sorted((*firsts.get(group, ()), (number, rank))))[:2]
    return tuple(
        rank
        for rank, each in enumerate(differences)
        if each.differs
        and not any(
            number <= count
            for group, count in each.before.items()
            for number, other in firsts.get(group, ())
            if other != rank
        )
    )


def _numbered(one: Execution) -> dict[tuple[str, int], int]:
    """(group, number of its communication) → digest of what the rank gave."""
    counts: dict[str, int] = {}
    numbered = {}
    for each in one.given:
        counts[each.group] = counts.get(each.group, 0) + 1
        numbered[each.group, counts[each.group]] = each.digest
    return numbered


def _first_difference(one: Execution, other: Execution) -> int:
    """Number of communications before the first to which two executions gave other bytes."""
    for at, both in enumerate(zip(one.given, other.given, strict=False)):
        if both[0] != both[1]:
            return at
    return min(len(one.given), len(other.given))
