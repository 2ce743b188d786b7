"""Copies that leave experts out: whatever is written and removed, what is there can be read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from choice_bounds import persist_bound
from expert_snapshots import PIECE, Made, expected, made, rank_layout
from expert_worlds import world
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.durable.rank_files import (
    PartialFile,
    decode_header,
    describe_file,
    encode_header,
)
from holdfast_core.durable.retention import FoundSet, SetState, choose_removals
from holdfast_core.durable.sets import StoredSet, checked_files, decode_set, encode_set
from holdfast_core.durable.sparse_files import (
    BaseSet,
    Composition,
    compose,
    expert_runs,
    may_build_on,
    plan_rank,
)
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import decode_layout, first_bad_piece
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.snapshots.stored import RankFile, StoredUnit
from holdfast_core.snapshots.units import UnitKey

HOMES = (
    ("layer0/expert0", "layer0/expert1", "layer1/expert0"),
    ("layer0/expert2", "layer1/expert1"),
)
UNITS = sorted(unit for home in HOMES for unit in home)


@dataclass
class Tier:
    """Sets as they would lie in storage, without storage."""

    homes: tuple[tuple[str, ...], ...] = HOMES
    sets: dict[Generation, StoredSet] = field(default_factory=dict)
    files: dict[tuple[Generation, int], dict[int, bytes]] = field(default_factory=dict)
    heads: dict[tuple[Generation, int], tuple[Manifest, tuple[ExpertVersion, ...]]] = field(
        default_factory=dict
    )

    def persist(self, snapshots: list[Made], base: Generation | None, k: int) -> StoredSet:
        generation = snapshots[0].content.generation
        described = [self._write(one, base, k) for one in snapshots]
        stored = StoredSet(
            job="job",
            generation=generation,
            topology="raw",
            created=0.0,
            files=checked_files(described, generation),
        )
        stored = decode_set(encode_set(stored), job="job", generation=generation)
        self.sets[generation] = stored
        return stored

    def _write(self, one: Made, base: Generation | None, k: int) -> RankFile:
        rank, generation = one.content.rank, one.content.generation
        known = None
        if base is not None:
            head, older = self.heads[base, rank]
            known = BaseSet(stored=self.sets[base], experts=(*head.experts, *older))
        plan = plan_rank(decode_layout(one.layout), one.content, known, k)
        sparse = PartialFile(pieces=plan.pieces, older=plan.older)
        header = encode_header(one.layout, one.manifest, sparse)
        read = decode_header(header)
        assert (read.pieces, read.older, read.decoded) == (plan.pieces, plan.older, one.content)
        self.heads[generation, rank] = read.decoded, read.older
        self.files[generation, rank] = {
            piece: one.payload[piece * PIECE : (piece + 1) * PIECE]
            for first, end in plan.pieces
            for piece in range(first, end)
        }
        return describe_file(header, one.manifest, plan.units, sparse)

    def read(
        self, generation: Generation, rank: int, memory: tuple[Made, ...] = ()
    ) -> tuple[Composition, bytes]:
        units = self.sets[generation].files[rank].units
        own, older = self.heads[generation, rank]
        others = sorted({u.held_in for u in units} - {generation})
        holders = {g: (i, self.heads[g, rank][0]) for i, g in enumerate(others, start=1)}
        slots = [(1 + len(others) + i, one.content) for i, one in enumerate(memory)]
        layout = rank_layout(rank, len(self.homes), self.homes[rank])
        found = compose(layout, own, older, units, holders, slots)
        sources = [self.files[generation, rank], *(self.files[g, rank] for g in others)]
        for one in memory:
            pieces = range(-(-len(one.payload) // PIECE))
            sources.append({p: one.payload[p * PIECE : (p + 1) * PIECE] for p in pieces})
        total = -(-own.payload_bytes // PIECE)
        return found, b"".join(sources[found.source_of.get(p, 0)][p] for p in range(total))

    @property
    def complete(self) -> list[Generation]:
        """Newest first."""
        whole = (g for g, stored in self.sets.items() if stored.needs <= self.sets.keys())
        return sorted(whole, reverse=True)

    def clean(self, keep: int) -> None:
        found = [
            FoundSet(
                generation=g,
                state=SetState.COMPLETE if g in self.complete else SetState.HOLDER,
                modified_s=0.0,
                needs=stored.needs,
            )
            for g, stored in self.sets.items()
        ]
        newest = self.complete[:keep]
        for removal in choose_removals(found, keep=keep, keep_every=0, idle_since_s=0.0):
            del self.sets[removal.generation]
            for rank in range(len(HOMES)):
                del self.files[removal.generation, rank], self.heads[removal.generation, rank]
            # A crash may come between any two removals.
            assert self.complete[:keep] == newest

    def check(self, generation: Generation) -> None:
        for rank in range(len(HOMES)):
            found, payload = self.read(generation, rank)
            manifest = found.manifest
            assert payload == expected(rank, self.homes, manifest)
            assert first_bad_piece(memoryview(payload), manifest.digests, PIECE) is None
            stored = {u.unit: u.version for u in self.sets[generation].files[rank].units}
            held = {e.unit: e.generation for e in manifest.experts}
            assert {unit: held[unit] for unit in self.homes[rank]} == stored


def snapshots(
    generation: Generation,
    versions: dict[str, Generation],
    homes: tuple[tuple[str, ...], ...] = HOMES,
) -> list[Made]:
    return [made(rank, homes, generation, versions) for rank in range(len(homes))]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 2), st.integers(1, 3))
def test_every_kept_set_can_be_read_and_identifies_itself(seed: int, k: int, keep: int) -> None:
    """Snapshots capture some experts; some are persisted; copies are removed; sometimes training
    goes back to an earlier set and on from there."""
    chance, tier = random.Random(seed), Tier()
    epoch, step, line = 1, 0, None
    versions = dict.fromkeys(UNITS, Generation(1, 0))
    newest: Generation | None = None
    for _ in range(14):
        step += 1
        now = Generation(epoch, step)
        versions |= dict.fromkeys(chance.sample(UNITS, chance.randint(0, 3)), now)
        if chance.random() < 0.6:
            base = newest if newest is not None and may_build_on(newest, now, line) else None
            tier.persist(snapshots(now, versions), base, k)
            newest = max(tier.sets)
            tier.clean(keep)
        elif newest is not None and chance.random() < 0.2:
            back = chance.choice(tier.complete)
            versions = {
                unit.unit: unit.version for file in tier.sets[back].files for unit in file.units
            }
            epoch, step, line = epoch + 1, back.step, Line(generation=back, reason="")
        for generation in tier.complete:
            tier.check(generation)


def test_each_layer_persists_k_experts_and_no_version_twice() -> None:
    tier, versions = Tier(), dict.fromkeys(UNITS, Generation(1, 1))
    tier.persist(snapshots(Generation(1, 1), versions), None, 1)
    written: set[tuple[str, Generation]] = {(unit, Generation(1, 1)) for unit in UNITS}
    base = Generation(1, 1)
    for step in range(2, 12):
        now = Generation(1, step)
        versions |= dict.fromkeys([UNITS[step % 5], UNITS[(step + 2) % 5]], now)
        stored = tier.persist(snapshots(now, versions), base, 1)
        new = [u for file in stored.files for u in file.units if u.held_in == now]
        layers = [UnitKey.parse(unit.unit).layer for unit in new]
        assert len(layers) == len(set(layers)), "more than one expert of a layer"
        for unit in new:
            assert (unit.unit, unit.version) not in written
            written.add((unit.unit, unit.version))
        base = now


def test_files_that_no_kept_set_needs_are_removed() -> None:
    tier, order = Tier(), [Generation(1, 1)]
    tier.persist(snapshots(order[0], dict.fromkeys(UNITS, order[0])), None, 1)
    for step in range(2, 20):
        now = Generation(1, step)
        tier.persist(snapshots(now, dict.fromkeys(UNITS, now)), order[-1], 1)
        order.append(now)
        tier.clean(keep=1)
        assert tier.sets.keys() == {now, *tier.sets[now].needs}


def test_references_do_not_reach_back_farther_than_the_bound() -> None:
    tier, versions = Tier(), dict.fromkeys(UNITS, Generation(1, 1))
    stored = tier.persist(snapshots(Generation(1, 1), versions), None, 1)
    order = [Generation(1, 1)]
    for step in range(2, 30):
        now = Generation(1, step)
        versions = dict.fromkeys(UNITS, now)
        stored = tier.persist(snapshots(now, versions), order[-1], 1)
        order.append(now)
    bound = max(persist_bound(layer, 1, on_rank=3) for layer in world([3, 2]).layers)
    assert min(stored.needs) >= order[-1 - bound]


def test_fresh_experts_come_from_memory_and_the_rest_from_storage() -> None:
    """PEC figure 4."""
    tier, first, second, third = Tier(), Generation(1, 1), Generation(1, 2), Generation(1, 3)
    versions = dict.fromkeys(UNITS, first)
    tier.persist(snapshots(first, versions), None, 1)
    versions = dict.fromkeys(UNITS, second)
    stored = tier.persist(snapshots(second, versions), first, 1)
    left_out = [u.unit for u in stored.files[0].units if u.held_in == first]
    assert left_out
    later = versions | {left_out[0]: third}
    memory = snapshots(third, later)[0]
    found, payload = tier.read(second, 0, (memory,))
    held = {e.unit: e.generation for e in found.manifest.experts}
    assert held[left_out[0]] == first, "memory has it newer than the line: storage gives it"
    assert all(held[unit] == second for unit in HOMES[0] if unit != left_out[0])
    assert payload == expected(0, HOMES, found.manifest)
    assert (found.from_memory, found.from_storage, found.older) == (2, 1, 1)
    marks = {(e.unit, e.generation): e.tokens for e in found.manifest.older}
    assert marks[left_out[0], first] == 100 * first.step, "what this rank had routed to it then"


def test_a_rank_that_missed_the_news_of_a_capture_reports_the_one_before() -> None:
    """Its tokens since then count as lost: rather too many than too few."""
    tier, unit = Tier(), HOMES[1][0]
    first, second, third = (Generation(1, step) for step in (1, 2, 3))
    tier.persist(snapshots(first, dict.fromkeys(UNITS, first)), None, 1)
    ignorant = dict.fromkeys(UNITS, second) | {unit: first}
    both = [
        made(0, HOMES, second, ignorant),
        made(1, HOMES, second, dict.fromkeys(UNITS, second)),
    ]
    tier.persist(both, None, 1)
    tier.persist(snapshots(third, dict.fromkeys(UNITS, third)), second, 1)
    _, older = tier.heads[third, 0]
    assert [e.generation for e in older if e.unit == unit] == [first]
    _, exact = tier.heads[third, 1]
    assert [e.generation for e in exact if e.unit == unit] == [second]


def test_a_file_that_lacks_what_its_set_lists_is_refused() -> None:
    tier, first, second = Tier(), Generation(1, 1), Generation(1, 2)
    tier.persist(snapshots(first, dict.fromkeys(UNITS, first)), None, 1)
    stored = tier.persist(snapshots(second, dict.fromkeys(UNITS, second)), first, 1)
    head, older = tier.heads[first, 0]
    wrong = tuple(replace(e, generation=Generation(1, 0)) for e in head.experts)
    tier.heads[first, 0] = replace(head, experts=wrong), older
    with pytest.raises(CorruptError, match=r"does not hold version 1\.1"):
        tier.read(stored.generation, 0)


def test_an_expert_that_shares_a_piece_is_in_every_file() -> None:
    layout = rank_layout(0, 1, ["layer0/expert0", "layer0/expert1"])
    dense, first_expert, second_expert = layout.entries
    shared = msgspec.structs.replace(
        second_expert, offset=second_expert.offset - 1, nbytes=second_expert.nbytes
    )
    shifted = replace(
        layout,
        entries=(dense, msgspec.structs.replace(first_expert, nbytes=PIECE + 3), shared),
    )
    assert set(expert_runs(layout)) == {"layer0/expert0", "layer0/expert1"}
    assert set(expert_runs(shifted)) == set()


def test_parts_of_an_expert_are_in_storage_in_the_version_of_the_snapshot() -> None:
    """Captured at times; each version is written once, and no rank is given an older one."""
    shared, homes = "layer1/expert9", tuple((*home, "layer1/expert9") for home in HOMES)
    tier, versions = Tier(homes=homes), dict.fromkeys([*UNITS, shared], Generation(1, 1))
    base: Generation | None = None
    for step in range(1, 9):
        now = Generation(1, step)
        versions |= dict.fromkeys(UNITS, now)
        if step % 3 == 0:
            versions[shared] = now
        stored = tier.persist(snapshots(now, versions, homes), base, 1)
        base = now
        parts = [unit for file in stored.files for unit in file.units if unit.unit == shared]
        assert [part.version for part in parts] == [versions[shared]] * 2
        assert {part.held_in for part in parts} == {versions[shared]}, "written when it is new"
        tier.check(now)


@pytest.mark.parametrize(
    ("base", "generation", "line", "answer"),
    [
        ("1.4", "1.5", None, True),
        ("1.5", "1.5", None, False),
        ("1.4", "2.5", "1.4", True),
        ("1.4", "2.5", "1.3", False),
        ("1.4", "3.9", "2.6", False),
        ("2.4", "3.9", "2.6", True),
        ("1.4", "2.5", None, False),
    ],
)
def test_a_copy_names_only_copies_of_its_own_past(
    base: str, generation: str, line: str | None, answer: bool
) -> None:
    before = Line(generation=Generation.parse(line), reason="") if line else None
    assert may_build_on(Generation.parse(base), Generation.parse(generation), before) is answer


def test_a_set_that_ranks_hold_in_different_versions_is_refused() -> None:
    tier, first = Tier(), Generation(1, 1)
    stored = tier.persist(snapshots(first, dict.fromkeys(UNITS, first)), None, 1)
    other = StoredUnit(unit=HOMES[0][0], version=Generation(1, 0), held_in=first)
    files = [stored.files[0], replace(stored.files[1], units=(other,))]
    with pytest.raises(CorruptError, match="different versions of parts of"):
        checked_files(files, first)
