"""Lines that an earlier world captured: who rebuilds what, and whether there is a line at all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from protected_worlds import entry, first_world, held, with_members

from holdfast_core.protection import recovery
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Redundancy

LINE = Generation(1, 40)


def _only(inventories: dict[int, Inventory], members: Collection[int]) -> dict[int, Inventory]:
    return {member: inventories.get(member, Inventory()) for member in members}


@pytest.mark.parametrize("redundancy", [Redundancy.RAIM5, Redundancy.RAIM6, Redundancy.REPLICATION])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), ((0, 2, 4), (1, 3, 5))])
def test_those_who_are_left_have_the_line_if_each_group_could_bear_its_losses(
    redundancy: Redundancy, groups: tuple[tuple[int, ...], ...]
) -> None:
    before = first_world(*groups, redundancy=redundancy)
    inventories = held(before, LINE)
    bearable = 2 if redundancy is Redundancy.RAIM6 else 1
    everyone = before.world.members
    for count in range(1, len(everyone) - 1):
        for lost in combinations(everyone, count):
            left = [member for member in everyone if member not in lost]
            now = with_members(before, left)
            line = recovery.recovery_line(now, _only(inventories, left))
            worst = max(len(set(group).intersection(lost)) for group in groups)
            assert (line.generation == LINE) == (worst <= bearable), (lost, line.reason)


def test_ranks_of_lost_members_are_dealt_to_their_own_group() -> None:
    before = first_world((0, 1, 2, 3, 4), (5, 6, 7), redundancy=Redundancy.RAIM6)
    now = with_members(before, [0, 2, 4, 5, 6])
    heirs = {rank: recovery.heir(now, rank, LINE) for rank in before.world.ranks}
    assert {rank: heirs[rank] for rank in (2, 3, 6, 7)} == {2: 0, 3: 2, 6: 4, 7: 0}
    assert {rank: heirs[rank] for rank in (14, 15)} == {14: 5, 15: 6}
    stay = [rank for rank in before.world.ranks if now.has(now.member_of(rank))]
    assert all(heirs[rank] == now.member_of(rank) for rank in stay)


def test_for_a_group_that_is_gone_all_share_what_only_storage_can_have() -> None:
    before = first_world((0, 1), (2, 3), redundancy=Redundancy.RAIM5)
    now = with_members(before, [2, 3])
    assert [recovery.heir(now, rank, LINE) for rank in range(4)] == [2, 3, 2, 3]
    line = recovery.recovery_line(now, _only(held(before, LINE), [2, 3]))
    assert line.generation is None
    assert "lacks ranks [0, 1, 2, 3]" in line.reason


def test_what_an_heir_holds_counts_after_the_next_change() -> None:
    before = first_world((0, 1, 2, 3), redundancy=Redundancy.RAIM5)
    inventories = held(before, LINE)
    smaller = with_members(before, [0, 1, 3])
    rebuilt = {
        member: replace(
            inventories[member],
            snapshots=(
                *inventories[member].snapshots,
                *(
                    entry(rank, LINE)
                    for rank in smaller.ranks_of(2)
                    if recovery.heir(smaller, rank, LINE) == member
                ),
            ),
        )
        for member in (0, 1, 3)
    }
    assert recovery.is_complete(smaller, recovery.Holdings.of(smaller, rebuilt), LINE)
    grown = with_members(smaller, [0, 1, 2, 3])
    line = recovery.recovery_line(grown, _only(rebuilt, [0, 1, 2, 3]))
    assert line.generation == LINE
    assert line.reason == "generation 1.40: all ranks in daemons' memory"


@pytest.mark.parametrize(
    ("redundancy", "survives"), [(Redundancy.RAIM5, False), (Redundancy.RAIM6, True)]
)
def test_until_the_new_world_is_protected_the_old_one_bears_no_more_than_it_did(
    redundancy: Redundancy, survives: bool
) -> None:
    before = first_world((0, 1, 2, 3, 4), redundancy=redundancy)
    inventories = held(before, LINE)
    smaller = with_members(before, [0, 1, 3, 4])
    for lost in (0, 1, 3, 4):
        left = [member for member in (0, 1, 3, 4) if member != lost]
        line = recovery.recovery_line(with_members(smaller, left), _only(inventories, left))
        assert (line.generation == LINE) == survives, lost


def test_a_snapshot_of_the_present_world_counts_only_where_it_was_captured() -> None:
    now = first_world((0, 1, 2), redundancy=Redundancy.RAIM5)
    inventories = held(now, LINE)
    elsewhere = {
        0: inventories[0],
        1: replace(
            inventories[1], snapshots=(*inventories[1].snapshots, *inventories[2].snapshots)
        ),
        2: Inventory(),
    }
    holdings = recovery.Holdings.of(now, elsewhere)
    assert not recovery.is_complete(now, holdings, LINE)


def test_parity_counts_for_the_group_of_its_own_world() -> None:
    before = first_world((0, 1, 2, 3), redundancy=Redundancy.RAIM5)
    now = with_members(before, [0, 1, 3])
    holdings = recovery.Holdings.of(now, _only(held(before, LINE), [0, 1, 3]))
    assert recovery.rebuildable(now, holdings, 4, LINE)
    # The same numbers in the present world's epoch would be of another group.
    renamed = Generation(now.epoch, LINE.step)
    holdings = recovery.Holdings.of(now, _only(held(before, renamed), [0, 1, 3]))
    assert holdings.parities == {}
    assert not recovery.rebuildable(now, holdings, 0, renamed)


def test_a_generation_of_a_forgotten_world_is_no_line() -> None:
    before = first_world((0, 1, 2, 3), redundancy=Redundancy.RAIM5)
    now = replace(with_members(before, [0, 1, 3]), past=())
    line = recovery.recovery_line(now, _only(held(before, LINE), [0, 1, 3]))
    assert line.generation is None
    assert "1.40 is of a world that is no longer known" in line.reason


def test_a_generation_that_bears_what_the_line_does_not_is_kept_beside_it() -> None:
    before = first_world((0, 1), (2, 3), redundancy=Redundancy.RAIM5)
    now = replace(with_members(before, [0, 1, 2, 3]), groups=before.groups)
    line = Generation(now.epoch, LINE.step)
    older, newer = held(before, LINE), held(now, line)
    # Member 0 was rebuilt without its parity; the line has parity in the other group only.
    inventories = {
        member: Inventory(
            snapshots=(*older[member].snapshots, *newer[member].snapshots),
            parities=(older if member in (1, 2, 3) else newer)[member].parities,
        )
        for member in now.world.members
    }
    inventories[1] = replace(inventories[1], parities=(*older[1].parities, *newer[1].parities))
    holdings = recovery.Holdings.of(now, inventories)
    assert recovery.newest_survivable(now, holdings, not_after=line) is None
    assert recovery.most_survivable(now, holdings, not_after=line) == LINE
    alone = recovery.Holdings.of(now, newer)
    assert recovery.most_survivable(now, alone, not_after=line) == line


@pytest.mark.parametrize("seed", range(40))
def test_of_all_that_is_held_it_is_what_bears_the_loss_of_most_members(seed: int) -> None:
    chance = Random(seed)
    before = first_world((0, 1, 2), (3, 4, 5), redundancy=Redundancy.RAIM5)
    now = with_members(before, chance.choice([range(6), (0, 1, 3, 4), (0, 2, 3, 4, 5)]))
    newest = Generation(now.epoch, 60)
    captured = {generation: held(before, generation) for generation in (LINE, Generation(1, 50))}
    captured[newest] = held(now, newest)
    parts: dict[Generation, dict[int, Inventory]] = {}
    for generation, inventories in captured.items():
        given: dict[int, list[SnapshotEntry]] = {m: [] for m in now.world.members}
        blocks: dict[int, tuple[ParityEntry, ...]] = dict.fromkeys(now.world.members, ())
        for member, inventory in inventories.items():
            for each in inventory.snapshots:
                elsewhere = member not in given or chance.random() < 0.1
                given[chance.choice(now.world.members) if elsewhere else member].append(each)
            if member in blocks:
                blocks[member] = tuple(b for b in inventory.parities if chance.random() < 0.9)
        parts[generation] = {
            m: Inventory(snapshots=tuple(given[m]), parities=blocks[m]) for m in given
        }

    def bearable(generation: Generation) -> set[int]:
        part = parts[generation]
        return {
            lost
            for lost in part
            if recovery.recovery_line(now, part | {lost: Inventory()}).generation == generation
        }

    whole = {
        m: Inventory(
            snapshots=tuple(e for part in parts.values() for e in part[m].snapshots),
            parities=tuple(b for part in parts.values() for b in part[m].parities),
        )
        for m in now.world.members
    }
    line = bearable(newest)
    counts = {generation: len(line | bearable(generation)) for generation in parts}
    best = max(parts, key=lambda generation: (counts[generation], generation))
    found = recovery.most_survivable(now, recovery.Holdings.of(now, whole), not_after=newest)
    assert found == (best if counts[best] else None)
