"""Find out which rank of a job that hangs waits for which, from what torch has recorded. Pure.

Stacks show that ranks wait in a collective, and not in which one: two groups may be used from one
line, and with NCCL the main threads wait for their devices, in the same line on all ranks. What
torch has recorded names the group and the number of each collective, so a rank that waits in number
7 of a group waits for the members of the group that have not entered number 7.

A rank without a record proves nothing: nobody is found to be missing without a record of its own
that shows it. All of this comes from trainers: it is only ever shown, and compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from holdfast_core.inspections import GroupCollectives, InspectedProcess
from holdfast_operator.reconciler.observe.text import ranks_in_words

WAITS_NAMED_MAX = 2
"""Collectives that the words for a wait name."""
HOST_BACKEND = " gloo"
"""End of the names of groups whose collectives the main thread waits for by itself."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective in which ranks wait."""

    group: str
    number: int
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Members of the group that are known not to have entered it."""
    entered_by_all: bool
    """Whether all members of the group are known to have entered it."""

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

    @property
    def on_devices(self) -> frozenset[int]:
        """Ranks whose devices wait for missing ranks, wherever their main threads are."""
        return frozenset(
            rank
            for wait in self.waits
            if wait.missing and not wait.group.endswith(HOST_BACKEND)
            for rank in wait.waiting
        )

    @property
    def circle(self) -> tuple[Wait, ...]:
        """Waits that are all for ranks which wait themselves, in another of these; empty if there
        are none."""
        found = tuple(wait for wait in self.waits if wait.missing)
        while True:
            waiting = {rank for wait in found for rank in wait.waiting}
            missing = {rank for wait in found for rank in wait.missing}
            kept = tuple(
                wait
                for wait in found
                if waiting.intersection(wait.missing) and missing.intersection(wait.waiting)
            )
            if kept == found:
                return found
            found = kept

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
        for first in self.waits:
            same = [w for w in self.waits if (w.group, w.number) == (first.group, first.number)]
            if len({wait.operation for wait in same}) > 1:
                return same[:WAITS_NAMED_MAX]
        return []


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
    where: dict[tuple[str, int, str, tuple[int, ...]], list[int]] = {}
    for rank, groups in sorted(recorded.items()):
        for each in groups.values():
            if each.pending:
                members = _members(rank, each, ranks)
                where.setdefault((each.group, each.pending, each.operation, members), []).append(
                    rank
                )
    waits: list[Wait] = []
    for (group, number, operation, members), waiting in where.items():
        entered = {
            rank: recorded[rank][group].entered >= number
            for rank in members
            if group in recorded.get(rank, {})
        }
        wait = Wait(
            group=group,
            number=number,
            operation=operation,
            waiting=tuple(waiting),
            missing=tuple(rank for rank, has in entered.items() if not has),
            entered_by_all=bool(members) and all(entered.get(rank, False) for rank in members),
        )
        waits.append(wait)
    waits.sort(key=lambda wait: (-len(wait.waiting), wait.waiting))
    busy = {rank for rank, groups in recorded.items() if any(g.operation for g in groups.values())}
    absent = {rank: wait for wait in reversed(waits) for rank in wait.missing if rank not in busy}
    return CollectiveWaits(waits=tuple(waits), absent=absent)


def _members(rank: int, group: GroupCollectives, ranks: Collection[int]) -> tuple[int, ...]:
    """The ranks of a group as one of them knows them; empty if they are not known."""
    members = group.members or (tuple(sorted(ranks)) if group.size == len(ranks) else ())
    return members if rank in members and set(members) <= set(ranks) else ()


def _joined(waits: Iterable[Wait]) -> str:
    texts = [wait.text for wait in waits]
    more = len(texts) - WAITS_NAMED_MAX
    shown = texts if more <= 0 else [*texts[:WAITS_NAMED_MAX], f"and {more} more collectives"]
    return ", and ".join(shown[:2]) if more <= 0 else ", ".join(shown)
