"""Every state that a small world can be in, against an oracle that moves bytes.

A snapshot has one of two versions, A and B, as after a step that was executed twice. The oracle
gives each chunk of each version a number of its own, makes parity blocks by XOR of the versions
that a block was made from, and rebuilds by XOR with what is held now: whatever does not fit
together comes out as a number that no version has. It shares no code with
`holdfast_core.protection.recovery`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import xxhash

from holdfast_core.protection.recovery import (
    Holdings,
    is_complete,
    is_protected,
    newest_protected,
    newest_survivable,
    rebuildable,
    recovery_line,
)
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory, ParityEntry, SnapshotEntry
from holdfast_core.snapshots.membership import Member, Membership, Redundancy

OLD, NEW = Generation(1, 5), Generation(1, 6)
A, B = 0xA, 0xB

Groups = tuple[tuple[int, ...], ...]
Version = int | None


@dataclass(frozen=True)
class State:
    """What is held of one generation, with one rank per member."""

    snapshots: tuple[Version, ...]
    """Version that each member holds."""
    parities: tuple[tuple[Version, ...] | None, ...]
    """For each member's block the version of each member that went into it; its own is None."""
    groups: Groups = field(repr=False)

    def without(self, lost: Sequence[int]) -> State:
        return replace(
            self,
            snapshots=tuple(None if i in lost else s for i, s in enumerate(self.snapshots)),
            parities=tuple(None if i in lost else p for i, p in enumerate(self.parities)),
        )


def membership(groups: Groups, nproc_per_node: int = 1, epoch: int = 1) -> Membership:
    places = tuple(
        Member(index=i, node=f"n{i}", memory_id=f"m{i}", peer_address="", bulk_address="")
        for i in sorted(m for group in groups for m in group)
    )
    return Membership(
        job="default.a",
        epoch=epoch,
        members=places,
        nproc_per_node=nproc_per_node,
        groups=groups,
    )


def snapshot(rank: int, generation: Generation, digest: int) -> SnapshotEntry:
    return SnapshotEntry(
        rank=rank, generation=generation, manifest_digest=digest, payload_bytes=100
    )


def inventories(states: Mapping[Generation, State]) -> dict[int, Inventory]:
    (groups,) = {state.groups for state in states.values()}
    group_of = {m: group for group in groups for m in group}
    found = {}
    for member, group in group_of.items():
        snapshots = []
        parities = []
        for generation, state in states.items():
            version, sources = state.snapshots[member], state.parities[member]
            if version is not None:
                snapshots.append(snapshot(member, generation, version))
            if sources is not None:
                made_from = tuple(
                    (m, v) for m, v in enumerate(sources) if v is not None and m in group
                )
                parities.append(
                    ParityEntry(lane=0, generation=generation, group=group, sources=made_from)
                )
        found[member] = Inventory(snapshots=tuple(snapshots), parities=tuple(parities))
    return found


# --- the oracle ----------------------------------------------------------------------------------


def number(member: int, version: int, owner: int) -> int:
    """The chunk of a member's version that goes into the block of `owner`."""
    return xxhash.xxh3_64_intdigest(bytes((member, version, owner)))


def rebuilt_version(state: State, lost: int) -> Version:
    """The version of `lost` that its group can rebuild, None when it cannot. In a pair the parity
    is a copy, but two losses in a group are two losses: no decision counts on luck."""
    group = next(group for group in state.groups if lost in group)
    if any(state.snapshots[member] is None for member in group if member != lost):
        return None
    chunks = {}
    for owner in group:
        if owner == lost:
            continue
        sources = state.parities[owner]
        if sources is None:
            return None
        chunk = 0
        for member in group:
            made_from = sources[member]
            if member != owner and made_from is not None:
                chunk ^= number(member, made_from, owner)
        for member in group:
            if member in (owner, lost):
                continue
            held = state.snapshots[member]
            if held is None:
                return None
            chunk ^= number(member, held, owner)
        chunks[owner] = chunk
    for version in (A, B):
        if all(chunk == number(lost, version, owner) for owner, chunk in chunks.items()):
            return version
    return None


def oracle_restorable(state: State) -> bool:
    return all(
        version is not None or rebuilt_version(state, member) is not None
        for member, version in enumerate(state.snapshots)
    )


def has_line(state: State) -> bool:
    """A generation of which only parity is left is not looked at, although pairs, whose parity is
    a copy, could be rebuilt from it: all of them would have to have lost their arenas at once."""
    return any(state.snapshots) and oracle_restorable(state)


def oracle_protected(state: State) -> bool:
    """Held by all, and still the same bytes after the loss of any one member of each group."""
    return None not in state.snapshots and all(
        rebuilt_version(state.without(lost), member) == state.snapshots[member]
        for lost in product(*state.groups)
        for member in lost
    )


# --- all states ----------------------------------------------------------------------------------


def states(groups: Groups, versions: Sequence[Version], *, stale: bool) -> Iterator[State]:
    """All states; with `stale`, blocks were made from all versions, else from A or B throughout."""
    n = sum(len(group) for group in groups)
    group_of = {m: group for group in groups for m in group}
    blocks: list[list[tuple[Version, ...] | None]] = []
    for owner in range(n):
        others = [m for m in group_of[owner] if m != owner]
        mixes = (
            product((A, B), repeat=len(others)) if stale else ((v,) * len(others) for v in (A, B))
        )
        of_owner: list[tuple[Version, ...] | None] = [None]
        for mix in mixes:
            made_from = dict(zip(others, mix, strict=True))
            of_owner.append(tuple(made_from.get(m) for m in range(n)))
        blocks.append(of_owner)
    for held in product(versions, repeat=n):
        for parities in product(*blocks):
            yield State(held, parities, groups)


WORLDS: dict[str, list[State]] = {
    "2 members": list(states(((0, 1),), (None, A, B), stale=True)),
    "3 members": list(states(((0, 1, 2),), (None, A, B), stale=True)),
    "4 members in 2 groups": list(states(((0, 2), (1, 3)), (None, A, B), stale=True)),
    "4 members in 1 group": list(states(((0, 1, 2, 3),), (None, A), stale=False)),
}

each_world = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())


@each_world
def test_a_line_is_found_exactly_where_every_byte_can_be_had(world: list[State]) -> None:
    members = membership(world[0].groups)
    for state in world:
        line = recovery_line(members, inventories({NEW: state}))
        assert (line.generation == NEW) == has_line(state), state
        assert line.generation in (NEW, None)


@each_world
def test_a_lost_rank_is_rebuildable_exactly_where_its_bytes_come_out(world: list[State]) -> None:
    members = membership(world[0].groups)
    for state in world:
        holdings = Holdings.of(members, inventories({NEW: state}))
        for rank, version in enumerate(state.snapshots):
            if version is None:
                expected = rebuilt_version(state, rank) is not None
                assert rebuildable(members, holdings, rank, NEW) == expected, (state, rank)


@each_world
def test_protected_is_what_survives_the_loss_of_any_member_of_each_group(
    world: list[State],
) -> None:
    members = membership(world[0].groups)
    count = 0
    for state in world:
        held = Holdings.of(members, inventories({NEW: state}))
        protected = oracle_protected(state)
        assert is_protected(members, held, NEW) == protected, state
        assert is_complete(members, held, NEW) == (None not in state.snapshots)
        assert newest_protected(members, held) == (NEW if protected else None)
        count += protected
    assert count


@each_world
def test_survivable_is_what_survives_a_loss_in_every_group_that_has_lost_none(
    world: list[State],
) -> None:
    members = membership(world[0].groups)
    degraded = 0
    for state in world:
        lost = [member for member, version in enumerate(state.snapshots) if version is None]
        spared = [m for group in state.groups if not set(group) & set(lost) for m in group]
        survives = all(rebuilt_version(state, m) is not None for m in lost) and all(
            rebuilt_version(state.without([m]), m) == state.snapshots[m] for m in spared
        )
        held = Holdings.of(members, inventories({NEW: state}))
        found = [newest_survivable(members, held, not_after=g) for g in (OLD, NEW)]
        assert found == [None, NEW if survives else None], state
        degraded += survives and bool(lost)
    assert degraded


@each_world
def test_a_protected_generation_is_the_line_after_any_loss_it_protects_against(
    world: list[State],
) -> None:
    members = membership(world[0].groups)
    for state in world:
        if is_protected(members, Holdings.of(members, inventories({NEW: state})), NEW):
            choices = [(*group, None) for group in state.groups]
            for choice in product(*choices):
                lost = [m for m in choice if m is not None]
                after = inventories({NEW: state.without(lost)})
                line = recovery_line(members, after)
                assert line.generation == NEW
                how = f"ranks {sorted(lost)} from parity" if lost else "all ranks in local memory"
                assert line.reason == f"generation 1.6: {how}"


def test_of_two_generations_the_line_is_the_newest_that_can_be_restored() -> None:
    world = WORLDS["2 members"]
    members = membership(world[0].groups)
    for old, new in product(world, repeat=2):
        line = recovery_line(members, inventories({OLD: old, NEW: new}))
        candidates = [g for g, state in ((NEW, new), (OLD, old)) if has_line(state)]
        assert line.generation == (candidates[0] if candidates else None)


def test_of_two_generations_the_newest_protected_is_found_up_to_a_limit() -> None:
    world = WORLDS["2 members"]
    members = membership(world[0].groups)
    for old, new in product(world, repeat=2):
        held = Holdings.of(members, inventories({OLD: old, NEW: new}))
        protected = [g for g, s in ((NEW, new), (OLD, old)) if oracle_protected(s)]
        assert newest_protected(members, held) == (protected[0] if protected else None)
        upto = [g for g in protected if g <= OLD]
        assert newest_protected(members, held, not_after=OLD) == (upto[0] if upto else None)


def all_of(n: int, groups: Groups, version: int = A) -> State:
    group_of = {m: group for group in groups for m in group}
    blocks = tuple(
        tuple(version if m in group_of[o] and m != o else None for m in range(n)) for o in range(n)
    )
    return State((version,) * n, blocks, groups)


# --- particular cases ----------------------------------------------------------------------------


def test_without_a_snapshot_the_job_starts_afresh_with_a_reason() -> None:
    members = membership(((0, 1),))
    assert recovery_line(members, {0: Inventory(), 1: Inventory()}) == Line(
        generation=None, reason=""
    )
    assert recovery_line(members, {0: Inventory(), 1: Inventory()}).reason == (
        "no generation in memory covers every rank: no daemon holds a snapshot"
    )


def test_too_many_losses_name_the_ranks_that_each_generation_lacks() -> None:
    state = all_of(3, ((0, 1, 2),)).without([0, 2])
    line = recovery_line(membership(state.groups), inventories({OLD: state, NEW: state}))
    assert line.reason == (
        "no generation in memory covers every rank: 1.6 lacks ranks [0, 2]; 1.5 lacks ranks [0, 2]"
    )


def test_without_redundancy_nothing_is_protected_or_rebuilt() -> None:
    state = all_of(2, ((0, 1),))
    members = replace(membership(state.groups), redundancy=Redundancy.NONE)
    held = Holdings.of(members, inventories({NEW: state}))
    assert is_complete(members, held, NEW)
    assert not is_protected(members, held, NEW)
    assert not rebuildable(members, held, 0, NEW)
    assert recovery_line(members, inventories({NEW: state})).generation == NEW
    assert recovery_line(members, inventories({NEW: state.without([0])})).generation is None


def test_parity_that_was_made_for_another_group_protects_nothing() -> None:
    state = all_of(4, ((0, 1), (2, 3)))
    other = membership(((0, 2), (1, 3)))
    held = Holdings.of(other, inventories({NEW: state}))
    assert is_complete(other, held, NEW)
    assert not is_protected(other, held, NEW)


def test_a_snapshot_on_a_member_that_is_not_its_ranks_own_does_not_count() -> None:
    members = membership(((0, 1),))
    misplaced = {0: Inventory(snapshots=(snapshot(0, NEW, A), snapshot(1, NEW, A))), 1: Inventory()}
    assert recovery_line(members, misplaced).generation is None


def test_a_generation_of_a_later_epoch_is_newer_whatever_its_step() -> None:
    groups: Groups = ((0, 1),)
    repeated = Generation(2, 3)
    line = recovery_line(
        membership(groups, epoch=3),
        inventories({NEW: all_of(2, groups), repeated: all_of(2, groups)}),
    )
    assert line.generation == repeated


def test_each_lane_needs_its_own_parity() -> None:
    members = membership(((0, 1),), nproc_per_node=2)

    def inventory(member: int, lanes: Sequence[int]) -> Inventory:
        return Inventory(
            snapshots=tuple(snapshot(rank, NEW, A) for rank in members.ranks_of(member)),
            parities=tuple(
                ParityEntry(
                    lane=lane,
                    generation=NEW,
                    group=(0, 1),
                    sources=((members.rank_at(1 - member, lane), A),),
                )
                for lane in lanes
            ),
        )

    for lanes in product(((), (0,), (1,), (0, 1)), repeat=2):
        both = {member: inventory(member, lanes[member]) for member in (0, 1)}
        held = Holdings.of(members, both)
        assert is_protected(members, held, NEW) == (lanes == ((0, 1), (0, 1)))
        for lost in (0, 1):
            line = recovery_line(members, {**both, lost: Inventory()})
            assert (line.generation == NEW) == (lanes[1 - lost] == (0, 1))


def test_a_block_that_lacks_a_source_recovers_nothing() -> None:
    state = all_of(3, ((0, 1, 2),))
    found = inventories({NEW: state.without([0])})
    (block,) = found[1].parities
    short = replace(block, sources=block.sources[:1])
    found[1] = replace(found[1], parities=(short,))
    assert recovery_line(membership(state.groups), found).generation is None
