"""Find out which rank of a job that hangs waits for which, from what torch has recorded. Pure.

Stacks show that ranks wait in a collective, and not in which one: two groups may be used from one
line, and with NCCL the main threads wait for their devices, in the same line on all ranks. What
torch has recorded names the group and the number of each collective, so a rank that waits in number
7 of a group waits for the members of the group that have not entered number 7.

A rank without a record proves nothing: nobody is found to be missing without a record of its own
that shows it. All of this comes from trainers: it is only ever shown, and compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from holdfast_core.inspections import GroupCollectives, InspectedProcess
from holdfast_operator.reconciler.observe.text import ranks_in_words

WAITS_NAMED_MAX = 2
"""Collectives that the words for a wait name."""
COMPARED_MAX = 65_536
"""Ranks of all groups together that are compared, or the world once; waits of few ranks are left
out first."""
HOST_BACKEND = " gloo"
"""End of the names of groups whose collectives the main thread waits for by itself."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective in which ranks wait."""

    group: str
    number: int
    operation: str
    members: tuple[int, ...]
    """Ranks of the group; empty if they are not known."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Members of the group that are known not to have entered it, and to have entered the one
    before it."""

    @property
    def place(self) -> tuple[str, int, tuple[int, ...]]:
        """What is equal for all ranks that do the same: older versions of torch give one name to
        several groups."""
        return self.group, self.number, self.members

    @property
    def entered_by_all(self) -> bool:
        """Whether all members of the group wait in it."""
        return bool(self.members) and set(self.waiting) >= set(self.members)

    @property
    def name(self) -> str:
        return f"{self.operation} {self.number} of group {self.group}"

    @property
    def text(self) -> str:
        verb = "waits" if len(self.waiting) == 1 else "wait"
        others = ranks_in_words(self.missing)
        return f"{ranks_in_words(self.waiting)} {verb} in {self.name} for {others}"


@dataclass(frozen=True, slots=True)
class CollectiveWaits:
    """All collectives in which ranks wait, those with the most waiting ranks first."""

    waits: tuple[Wait, ...]
    absent: Mapping[int, Wait]
    """The ranks that others wait for, and that wait in no collective themselves, each with the
    collective that it has not entered."""
    circle: tuple[Wait, ...]
    """Waits that are all for ranks which wait themselves, in another of these; empty if there are
    none."""

    def on_devices(self, ended: Set[int]) -> frozenset[int]:
        """Ranks whose devices wait for ranks that are missing, or have `ended`, wherever their main
        threads are."""
        return frozenset(
            rank
            for wait in self.waits
            if (wait.missing or not ended.isdisjoint(wait.members))
            and not wait.group.endswith(HOST_BACKEND)
            for rank in wait.waiting
        )

    def allow(self, culprits: Collection[int]) -> bool:
        """Whether it may be only these ranks that hold up the others, as far as torch has recorded.
        They do not if others are waited for, or have all entered what they wait in, nor if it is
        each other that they wait for. They may wait for others which wait for them."""
        known = frozenset(culprits)
        own = [wait for wait in self.waits if known.issuperset(wait.waiting)]
        others = [wait for wait in self.waits if not known.issuperset(wait.waiting)]
        held_up = known.union(*(wait.waiting for wait in others if wait.missing))
        return (
            all(known.issuperset(wait.missing) for wait in others)
            and all(held_up.issuperset(wait.missing) for wait in own)
            and not any(wait.entered_by_all for wait in self.waits)
            and not _circle(own)
        )

    @property
    def in_words(self) -> str:
        """Who waits for whom, or what else the collectives show; empty if they show nothing."""
        if circle := self.circle:
            return f"they wait for each other: {_joined(circle)}"
        if differing := self._differing:
            ranks = "; ".join(f"{ranks_in_words(w.waiting)} in {w.operation}" for w in differing)
            first = differing[0]
            return f"number {first.number} of group {first.group} is not the same on all: {ranks}"
        if missing := [wait for wait in self.waits if wait.missing]:
            return _joined(missing)
        if len(self.waits) == 1 and self.waits[0].entered_by_all:
            return (
                f"all of its ranks have entered {self.waits[0].name}, so the network or a device "
                "holds it up"
            )
        return ""

    @property
    def _differing(self) -> list[Wait]:
        """The first waits in one number of one group with different operations."""
        at_place = defaultdict[tuple[str, int, tuple[int, ...]], list[Wait]](list)
        for wait in self.waits:
            at_place[wait.place].append(wait)  # one for each operation
        return next((same[:WAITS_NAMED_MAX] for same in at_place.values() if len(same) > 1), [])


def collective_waits(
    ranks: Collection[int], answers: Mapping[int, InspectedProcess | None]
) -> CollectiveWaits:
    """Compare the collectives of all ranks.

    Args:
        ranks: ranks of the world.
        answers: process of each rank whose launcher has answered; None for a rank that has none any
            more.
    """
    recorded = {
        rank: {each.group: each for each in process.collectives}
        for rank, process in answers.items()
        if process is not None and process.collectives
    }
    everyone, known = tuple(sorted(ranks)), frozenset(ranks)
    where: dict[tuple[str, int, str, tuple[int, ...], bool], list[int]] = {}
    for rank, groups in sorted(recorded.items()):
        for each in groups.values():
            if each.pending:
                members = each.members if known.issuperset(each.members) else ()
                members = members if rank in members else ()
                whole = not each.members and each.size == len(everyone)
                key = (each.group, each.pending, each.operation, members, whole)
                where.setdefault(key, []).append(rank)
    waits: list[Wait] = []
    compared = 0
    for key, waiting in sorted(where.items(), key=lambda found: (-len(found[1]), found[1])):
        group, number, operation, listed, whole = key
        members = everyone if whole else listed
        compared += len(members)
        if compared > max(COMPARED_MAX, len(everyone)):
            break
        missing = _missing(group, number, members, recorded)
        waits.append(Wait(group, number, operation, members, tuple(waiting), missing))
    busy = {rank for rank, groups in recorded.items() if any(g.operation for g in groups.values())}
    absent = {rank: wait for wait in reversed(waits) for rank in wait.missing if rank not in busy}
    return CollectiveWaits(waits=tuple(waits), absent=absent, circle=_circle(waits))


def _missing(
    group: str,
    number: int,
    members: tuple[int, ...],
    recorded: Mapping[int, Mapping[str, GroupCollectives]],
) -> tuple[int, ...]:
    """Members that have not entered a collective; none if one of them is further behind than the
    collective before it. Others could not wait there then, so the group has been asked at different
    times, or is not the same one."""
    entered = {
        rank: recorded[rank][group].entered for rank in members if group in recorded.get(rank, {})
    }
    behind = tuple(rank for rank, newest in entered.items() if newest < number)
    return behind if all(entered[rank] == number - 1 for rank in behind) else ()


def _circle(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """The largest set of these waits in which each is for a rank, and has a rank waiting, that
    links it to another one of the set."""
    found = {index: wait for index, wait in enumerate(waits) if wait.missing}
    waiting_in, missing_in = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for index, wait in found.items():
        for rank in wait.waiting:
            waiting_in[rank].add(index)
        for rank in wait.missing:
            missing_in[rank].add(index)
    unchecked = set(found)
    while unchecked:
        index = unchecked.pop()
        wait = found[index]
        if any(waiting_in[r] for r in wait.missing) and any(missing_in[r] for r in wait.waiting):
            continue
        del found[index]
        for own, other, linked in (
            (waiting_in, missing_in, wait.waiting),
            (missing_in, waiting_in, wait.missing),
        ):
            for rank in linked:
                own[rank].discard(index)
                unchecked |= set() if own[rank] else other[rank]
        unchecked &= found.keys()
    return tuple(found.values())


def _joined(waits: Iterable[Wait]) -> str:
    texts = [wait.text for wait in waits]
    more = len(texts) - WAITS_NAMED_MAX
    shown = texts if more <= 0 else [*texts[:WAITS_NAMED_MAX], f"and {more} more collectives"]
    return ", and ".join(shown[:2]) if more <= 0 else ", ".join(shown)
