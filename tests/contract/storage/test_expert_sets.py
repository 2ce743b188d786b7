"""Sets that name the experts in older ones, over all kinds of places."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from expert_snapshots import PIECE, Made, expected, made
from stored_snapshots import JOB
from tiers import TierUnderTest

from holdfast_core.durable.choice import MARK_FILE
from holdfast_core.durable.sets import encode_set, set_name
from holdfast_core.errors import CorruptError, InvalidJobError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.stored import RankFile
from holdfast_storage import finding, sets
from holdfast_storage.sets import SetStore
from holdfast_storage.whole_sets import WholeSet

HOMES = (("layer0/expert0", "layer0/expert1"), ("layer0/expert2", "layer0/expert3"))
UNITS = sorted(unit for home in HOMES for unit in home)
FIRST, SECOND, THIRD = (Generation(1, step) for step in (10, 20, 30))


@dataclass(frozen=True, slots=True)
class Slot:
    """A snapshot in memory."""

    content: Manifest
    payload: bytes

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        buffer[:] = self.payload[first_piece * PIECE : end * PIECE]


def write(store: SetStore, one: Made, base: Generation | None, k: int = 1) -> RankFile:
    def read(first: int, end: int) -> Iterator[memoryview]:
        for at in range(first, end, 50):
            yield memoryview(one.payload)[at : min(at + 50, end)]

    content = one.content
    return store.write_rank(
        content.generation,
        content.rank,
        layout=one.layout,
        manifest=one.manifest,
        read=read,
        plan=store.plan_rank(one.layout, content, k, base),
    )


def persist(
    store: SetStore,
    generation: Generation,
    versions: dict[str, Generation],
    base: Generation | None,
) -> list[RankFile]:
    files = [
        write(store, made(rank, HOMES, generation, versions, job=JOB), base)
        for rank in range(len(HOMES))
    ]
    store.commit(generation, files)
    return files


def persist_three(store: SetStore) -> list[list[RankFile]]:
    """Every expert is new in each; each names what it leaves out."""
    written, base = [], None
    for generation in (FIRST, SECOND, THIRD):
        written.append(persist(store, generation, dict.fromkeys(UNITS, generation), base))
        base = generation
    return written


def check(store: SetStore) -> None:
    """Every complete set has the bytes of the versions that its manifest says."""
    for stored in store.complete():
        for rank in range(stored.world_size):
            opened = store.open_rank(stored, rank)
            found = bytearray(opened.content.payload_bytes)
            opened.read_into(0, opened.pieces, memoryview(found))
            assert found == expected(rank, HOMES, opened.content)
            versions = {u.unit: u.version for u in stored.files[rank].units}
            held = {e.unit: e.generation for e in opened.content.experts}
            assert {unit: held[unit] for unit in HOMES[rank]} == versions


def test_a_copy_holds_one_expert_of_a_layer_and_names_the_others(tier: TierUnderTest) -> None:
    store = tier.store()
    first, second, third = persist_three(store)
    whole = sum(file.bytes - file.header_bytes for file in first)
    for files, generation in ((second, SECOND), (third, THIRD)):
        new = [u for file in files for u in file.units if u.held_in == generation]
        assert len(new) == 1
        payload = sum(file.bytes - file.header_bytes for file in files)
        assert payload == whole - 3 * 2 * PIECE
    assert [s.generation for s in store.complete()] == [THIRD, SECOND, FIRST]
    check(store)


def test_a_set_whose_manifest_nobody_would_read_is_not_complete(
    tier: TierUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tier.store()
    persist(store, FIRST, dict.fromkeys(UNITS, FIRST), None)
    for module in (sets, finding):
        monkeypatch.setattr(module, "MANIFEST_BYTES_MAX", len(encode_set(store.complete()[0])))
    with pytest.raises(InvalidJobError, match=r"leave persistence\.experts out"):
        persist(store, Generation(10, 20), dict.fromkeys(UNITS, Generation(10, 20)), FIRST)
    assert [s.generation for s in store.complete()] == [FIRST]
    check(store)


def test_pieces_are_read_one_by_one_and_in_runs(tier: TierUnderTest) -> None:
    store = tier.store()
    persist_three(store)
    stored = store.complete()[0]
    opened = store.open_rank(stored, 0)
    wanted = expected(0, HOMES, opened.content)
    for first in range(opened.pieces):
        for end in range(first + 1, opened.pieces + 1):
            found = bytearray(len(wanted[first * PIECE : end * PIECE]))
            opened.read_into(first, end, memoryview(found))
            assert found == wanted[first * PIECE : end * PIECE]


def test_what_a_kept_set_needs_is_not_removed(tier: TierUnderTest) -> None:
    store, chance = tier.store(), random.Random(7)
    versions: dict[str, Generation] = dict.fromkeys(UNITS, Generation(1, 0))
    base = None
    for step in range(1, 9):
        now = Generation(1, step)
        versions |= dict.fromkeys(chance.sample(UNITS, 2), now)
        persist(store, now, versions, base)
        store.clean(keep=1, keep_every=0)
        base = now
        check(store)
        complete = store.complete()
        assert not complete.rejected
        assert complete[0].generation == now
        assert {path.partition("/")[0] for path in tier.files()} - {"latest.json", MARK_FILE} == {
            set_name(each) for each in (now, *complete[0].needs)
        }


def test_a_set_without_what_it_names_is_not_a_set(tier: TierUnderTest) -> None:
    store = tier.store()
    persist_three(store)
    tier.remove(f"{set_name(FIRST)}/manifest.json")
    found = store.complete()
    assert list(found) == []
    assert all(f"needs generation {FIRST}" in rejected.reason for rejected in found.rejected)


def test_a_set_that_names_what_is_not_there_is_not_committed(tier: TierUnderTest) -> None:
    store = tier.store()
    persist(store, FIRST, dict.fromkeys(UNITS, FIRST), None)
    versions = dict.fromkeys(UNITS, SECOND)
    snapshots = [made(rank, HOMES, SECOND, versions, job=JOB) for rank in range(2)]
    files = [write(store, one, FIRST) for one in snapshots]
    tier.remove(f"{set_name(FIRST)}/manifest.json")
    with pytest.raises(CorruptError, match=f"stays incomplete: it needs generation {FIRST}"):
        store.commit(SECOND, files)
    assert store.complete() == []


def test_a_base_that_is_gone_or_of_another_world_costs_a_copy_of_all_experts(
    tier: TierUnderTest,
) -> None:
    store = tier.store()
    files = persist(store, SECOND, dict.fromkeys(UNITS, SECOND), FIRST)
    assert all(u.held_in == SECOND for file in files for u in file.units)
    alone = made(0, [UNITS], THIRD, dict.fromkeys(UNITS, THIRD), job=JOB)
    assert all(u.held_in == THIRD for u in write(store, alone, SECOND).units)


def test_a_wrong_byte_in_the_older_file_is_found(tier: TierUnderTest) -> None:
    store = tier.store()
    persist_three(store)
    stored = store.complete()[0]
    unit = next(u for f in stored.files for u in f.units if u.held_in == FIRST)
    rank = next(f.rank for f in stored.files if unit in f.units)
    path = f"{set_name(FIRST)}/rank-{rank:05d}.safetensors"
    data = bytearray(tier.get(path))
    at = next(f for f in store.complete()[2].files if f.rank == rank).header_bytes
    at += PIECE * (1 + 2 * HOMES[rank].index(unit.unit))
    data[at] ^= 1
    tier.put(path, bytes(data))
    opened = store.open_rank(stored, rank)
    with pytest.raises(CorruptError, match="does not match its digest"):
        opened.read_into(0, opened.pieces, memoryview(bytearray(opened.content.payload_bytes)))


def test_memory_gives_fresh_experts_and_storage_the_rest(tier: TierUnderTest) -> None:
    store = tier.store()
    persist_three(store)
    stored = store.complete()[0]
    later = Generation(1, 31)
    versions = dict.fromkeys(UNITS, THIRD) | {HOMES[0][0]: later}
    memory = made(0, HOMES, later, versions, job=JOB)
    opened = store.open_rank(stored, 0, [Slot(memory.content, memory.payload)])
    held = {e.unit: e.generation for e in opened.content.experts}
    assert held[HOMES[0][1]] == THIRD, "fresher than storage may have it"
    assert held[HOMES[0][0]] <= THIRD, "never newer than the copy"
    found = bytearray(opened.content.payload_bytes)
    opened.read_into(0, opened.pieces, memoryview(found))
    assert found == expected(0, HOMES, opened.content)
    assert "1 experts from memory, 1 from storage" in opened.mixture


def test_a_whole_model_is_read_from_sets_that_name_others(
    tier: TierUnderTest,
) -> None:
    store = tier.store()
    persist_three(store)
    stored = store.complete()[0]
    source = WholeSet(lambda rank: store.open_rank(stored, rank), stored.world_size)
    for file in stored.files:
        payload = expected(file.rank, HOMES, source.manifests[file.rank])
        for index, unit in enumerate(HOMES[file.rank]):
            tensor = source.tensors[f"{unit}.weight"]
            at = PIECE * (1 + 2 * index)
            assert (
                source.array(tensor, (0,), (2 * PIECE,)).tobytes() == payload[at : at + 2 * PIECE]
            )


@pytest.mark.parametrize("crashes", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_crash_in_the_middle_of_cleaning_leaves_only_sets_that_can_be_read(
    tier: TierUnderTest, monkeypatch: pytest.MonkeyPatch, crashes: int
) -> None:
    for survives in range(crashes):
        store = tier.store()
        versions = dict.fromkeys(UNITS, Generation(1, 0))
        base = None
        for step in range(1 + 10 * survives, 6 + 10 * survives):
            now = Generation(1, step)
            versions |= dict.fromkeys(UNITS, now)
            persist(store, now, versions, base)
            base = now
        root = store._root
        left = [survives]
        delete = root.delete

        def dying(paths, left=left, delete=delete):  # type: ignore[no-untyped-def]
            if not left[0]:
                raise StorageError("the writer died")
            left[0] -= 1
            delete(paths)

        with monkeypatch.context() as patch:
            patch.setattr(root, "delete", dying, raising=True)
            with suppress(StorageError):
                store.clean(keep=1, keep_every=0)
        assert store.complete()[0].generation == base
        check(store)
