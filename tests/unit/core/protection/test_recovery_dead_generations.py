"""Generations that some rank will never complete: every state of two and three ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from holdfast_core.protection.recovery import dead_generations
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Member, Membership

RankState = tuple[str, str, int]
"""What a rank has of step 1 and of step 2 ("", "writing", "held"), and the last step it passed."""


def membership(n: int, epoch: int = 1) -> Membership:
    places = tuple(
        Member(index=i, node=f"n{i}", memory_id=f"m{i}", peer_address="", bulk_address="")
        for i in range(n)
    )
    return Membership(
        job="default.a", epoch=epoch, members=places, nproc_per_node=1, groups=(tuple(range(n)),)
    )


def snapshot(rank: int, generation: Generation) -> SnapshotEntry:
    return SnapshotEntry(rank=rank, generation=generation, manifest_digest=1, payload_bytes=100)


def rank_states() -> Iterator[RankState]:
    yield from product(("", "writing", "held"), ("", "writing", "held"), (0, 1, 2))


def inventory_of(rank: int, state: RankState, epoch: int) -> Inventory:
    steps = {1: state[0], 2: state[1]}
    return Inventory(
        snapshots=tuple(
            snapshot(rank, Generation(epoch, step)) for step, s in steps.items() if s == "held"
        ),
        writing=tuple(
            (rank, Generation(epoch, step)) for step, s in steps.items() if s == "writing"
        ),
        passed=((rank, Generation(epoch, state[2])),) if state[2] else (),
    )


@pytest.mark.parametrize("n", [2, 3])
def test_a_generation_is_dead_when_some_rank_can_no_longer_complete_it(n: int) -> None:
    members = membership(n)
    choices = list(rank_states()) if n == 2 else [s for s in rank_states() if s[0] != "writing"]
    for world in product(choices, repeat=n):
        found = {rank: inventory_of(rank, state, epoch=1) for rank, state in enumerate(world)}
        expected = tuple(
            Generation(1, step)
            for step in (1, 2)
            if any(state[step - 1] == "held" for state in world)
            and not all(state[step - 1] or state[2] < step for state in world)
        )
        assert dead_generations(members, found) == expected, world


def test_generations_of_older_epochs_are_for_the_line_to_settle() -> None:
    members = membership(2, epoch=2)
    found = {
        0: inventory_of(0, ("held", "", 2), epoch=1),
        1: inventory_of(1, ("", "", 2), epoch=1),
    }
    assert dead_generations(members, found) == ()
    assert dead_generations(membership(2), found) == (Generation(1, 1),)


def test_parity_of_a_generation_that_a_rank_has_passed_is_dead_too() -> None:
    members = membership(2)
    entry = ParityEntry(lane=0, generation=Generation(1, 6), group=(0, 1), sources=((1, 1),))
    found = {0: Inventory(parities=(entry,), passed=((0, Generation(1, 6)),)), 1: Inventory()}
    assert dead_generations(members, found) == (Generation(1, 6),)


def test_a_node_that_remembers_the_saves_of_another_members_rank_decides_nothing() -> None:
    members = membership(2)
    found = {
        1: Inventory(passed=((1, Generation(1, 2)),)),
        0: inventory_of(0, ("held", "held", 2), epoch=1),
    }
    stale = replace(found[0], passed=(*found[0].passed, (1, Generation(1, 0))))
    assert dead_generations(members, {**found, 0: stale}) == dead_generations(members, found)
    assert dead_generations(members, found) == (Generation(1, 1), Generation(1, 2))
