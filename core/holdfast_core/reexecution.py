"""Which rank computed wrongly, if one step was executed several times from the same state.

A computation that is repeated gives the same bytes, so executions that differ show that something
went wrong in one of them. Of three, the two that agree were right. But most ranks then differ,
because they have received what was computed wrongly elsewhere. So each execution records what its
rank gave to each communication with other ranks. A rank whose first difference comes after it took
part in a communication to which another rank had given other bytes may have got it from there. A
rank whose first difference comes before any of these has made it itself.

Digests are equal or they are not: there is no tolerance. They come from the ranks of one job, which
conclude the same from the same digests. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

GIVEN_MAX = 50_000
"""Communications of one execution that are recorded."""


class Given(Struct, frozen=True, array_like=True, gc=False):
    """What one rank gave to one communication."""

    key: str
    """Identifies the communication: equal on all ranks that take part, and in each execution."""
    digest: int
    """Digest of the bytes; 0 where the rank only receives."""


class Execution(Struct, frozen=True, kw_only=True):
    """One rank's record of an execution, up to the moment when its gradients were complete."""

    given: tuple[Given, ...] = ()
    """What it gave to others, in the order of its program."""
    gradients: dict[str, int] = {}
    """Unit → digest of the rank's part of its gradients."""
    whole: bool = True
    """Whether each communication is recorded."""


class Judgement(Struct, frozen=True, kw_only=True):
    """What three executions show."""

    repeatable: bool
    """Whether two of them agree. Otherwise training is not deterministic."""
    wrong: tuple[int, ...] = ()
    """Ranks that computed wrongly in the third; empty if that is not known."""
    differing: tuple[int, ...] = ()
    """Ranks that have differences, their own or received ones."""
    unit: str = ""
    """First unit whose gradients a wrong rank, or else a differing one, had wrong; empty if no
    gradients differ."""


def judge(
    first: Sequence[Execution], second: Sequence[Execution], third: Sequence[Execution]
) -> Judgement:
    """Find the ranks that computed wrongly in one of three executions that are not all equal.

    Args:
        first, second, third: records of all ranks, in their order.
    """
    if second == third:
        odd, right = first, third
    elif first == third:
        odd, right = second, third
    else:
        differing = [
            r for r, (one, other) in enumerate(zip(second, third, strict=True)) if one != other
        ]
        return Judgement(repeatable=False, differing=tuple(differing))
    differing = [r for r, (one, other) in enumerate(zip(odd, right, strict=True)) if one != other]
    wrong = culprits(odd, right)
    # Faults are rare: if each rank has made its own difference, the program is what differs.
    if len(wrong) == len(odd) > 1:
        return Judgement(repeatable=False, differing=tuple(differing))
    whole = all(each.whole for each in (*odd, *right))
    named = tuple(sorted(wrong)) if whole and len(wrong) == 1 else ()
    units = [
        unit
        for rank in named or differing
        for unit in sorted(odd[rank].gradients)
        if odd[rank].gradients[unit] != right[rank].gradients.get(unit)
    ]
    return Judgement(
        repeatable=True,
        wrong=named,
        differing=tuple(differing),
        unit=units[0] if units else "",
    )


def culprits(odd: Sequence[Execution], right: Sequence[Execution]) -> frozenset[int]:
    """The ranks that differ between two executions, and cannot have received it from another."""
    spread = [_other_bytes(*both) for both in zip(odd, right, strict=True)]
    found = set()
    for rank, (one, other) in enumerate(zip(odd, right, strict=True)):
        if one == other:
            continue
        took_part = {each.key for each in one.given[: _first_difference(one, other)]}
        elsewhere = frozenset[str]().union(*(s for r, s in enumerate(spread) if r != rank))
        if not took_part & elsewhere:
            found.add(rank)
    return frozenset(found)


def _first_difference(one: Execution, other: Execution) -> int:
    """Number of communications before the first to which two executions gave other bytes."""
    for at, both in enumerate(zip(one.given, other.given, strict=False)):
        if both[0] != both[1]:
            return at
    return min(len(one.given), len(other.given))


def _other_bytes(one: Execution, other: Execution) -> frozenset[str]:
    """The communications to which two executions gave other bytes."""
    return frozenset(each.key for each in {*one.given} ^ {*other.given})
