"""A load that takes experts from memory and the rest from storage, on real files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from expert_snapshots import Made, expected, made

from holdfast_core.errors import StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_manifest, manifest_digest
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Tier
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.durable.loader import Loader
from holdfast_daemon.durable.stored_sets import TierSets
from holdfast_daemon.engine.effects import HeldSlot, LoadStored, OpenStored, Rebuilt
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.memory.arenas import SealedSlot
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_storage.sets import SetStore

JOB = "default.run1"
HOMES = (("layer0/expert0", "layer0/expert1", "layer0/expert2"),)
FIRST, LINE, LATER = (Generation(1, step) for step in (1, 2, 3))
SCOPE = EpochScope(membership=None)


class Bench:
    """A node that holds a snapshot newer than the newest set, and two sets."""

    def __init__(self, root: Path) -> None:
        self.storage = JobStorage(NodeStorage(root / "node", 1 << 24), JOB)
        self.storage.adopt()
        self.loader = Loader(self.storage, JOB, TierSets)
        self.tier = Tier(uri=str(root / "tier"), experts=1)
        self.store = SetStore(self.tier.uri, JOB)
        versions = dict.fromkeys(HOMES[0], FIRST)
        self._persist(made(0, HOMES, FIRST, versions, job=JOB), None)
        versions = dict.fromkeys(HOMES[0], LINE)
        self._persist(made(0, HOMES, LINE, versions, job=JOB), FIRST)
        self.later = made(0, HOMES, LATER, versions | {HOMES[0][2]: LATER}, job=JOB)
        self.held = self._seal(self.later)

    def _persist(self, one: Made, base: Generation | None) -> None:
        def read(first: int, end: int) -> Iterator[memoryview]:
            yield memoryview(one.payload)[first:end]

        plan = self.store.plan_rank(one.layout, one.content, 1, base)
        generation = one.content.generation
        file = self.store.write_rank(
            generation, 0, layout=one.layout, manifest=one.manifest, read=read, plan=plan
        )
        self.store.commit(generation, [file])

    def _seal(self, one: Made) -> HeldSlot:
        arena = self.storage.allocate(0, one.layout)
        arena.write(PieceMap(slot=2, places=b""), 0, memoryview(one.payload))
        sealed = SealedSlot(manifest=one.content, encoded=one.manifest)
        self.storage.seal(0, one.content.layout_id, 2, sealed)
        digest = manifest_digest(one.manifest)
        return HeldSlot(slot=2, manifest=one.content, digest=digest, places=b"")

    def load(self, *held: HeldSlot) -> tuple[Manifest, bytes, Rebuilt]:
        opened = self.loader.open(
            OpenStored(tier=self.tier, rank=0, world_rank=0, generation=LINE, held=held), SCOPE
        )
        manifest = decode_manifest(opened.manifest)
        rebuilt = self.loader.load(
            LoadStored(
                tier=self.tier,
                rank=0,
                slot=0,
                manifest=manifest,
                encoded=opened.manifest,
                held=held,
            ),
            SCOPE,
        )
        payload = bytearray(manifest.payload_bytes)
        self.storage.held(0, LINE).read_into(0, memoryview(payload))
        return manifest, bytes(payload), rebuilt


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def versions_of(manifest: Manifest) -> list[Generation]:
    return [expert.generation for expert in manifest.experts]


def test_memory_has_what_a_copy_left_out_and_no_newer_step_has_touched(bench: Bench) -> None:
    """The copy holds expert 0 anew. Memory has expert 1 as it was then; expert 2 is newer there."""
    manifest, payload, rebuilt = bench.load(bench.held)
    assert versions_of(manifest) == [LINE, LINE, FIRST]
    assert payload == expected(0, HOMES, manifest)
    assert rebuilt.mixture == (
        "2 experts from memory, 1 from storage, 1 of them older than the snapshot"
    )


def test_without_memory_both_are_as_old_as_storage_has_them(bench: Bench) -> None:
    manifest, payload, _ = bench.load()
    assert versions_of(manifest) == [LINE, FIRST, FIRST]
    assert payload == expected(0, HOMES, manifest)


def test_memory_that_was_cut_is_not_used_and_does_not_condemn_storage(bench: Bench) -> None:
    os.truncate(bench.storage.arena(0, bench.later.content.layout_id).path, 0)
    with pytest.raises(StorageError, match="was cut"):
        bench.load(bench.held)


def test_a_wrong_byte_in_memory_is_not_used_and_does_not_condemn_storage(bench: Bench) -> None:
    arena = bench.storage.arena(0, bench.later.content.layout_id)
    wrong = bytes([bench.later.payload[4 * 64] ^ 1])
    arena.write(PieceMap(slot=2, places=b""), 4 * 64, memoryview(wrong))
    with pytest.raises(StorageError, match="in memory does not match its digest"):
        bench.load(bench.held)
    with pytest.raises(StorageError):
        bench.storage.held(0, LINE)


def test_memory_of_another_layout_is_left_alone(bench: Bench) -> None:
    other = replace(bench.held, manifest=replace(bench.held.manifest, layout_id="0" * 32))
    store = bench.store
    opened = store.open_rank(store.complete()[0], 0, [_Never(other.manifest)])
    assert versions_of(opened.content) == [LINE, FIRST, FIRST]


class _Never:
    def __init__(self, content: Manifest) -> None:
        self.content = content

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        raise AssertionError("it was read")


def test_a_persisted_rank_names_the_older_versions_that_its_set_may_give_back(bench: Bench) -> None:
    plan = bench.store.plan_rank(bench.later.layout, bench.later.content, 1, LINE)
    assert plan is not None
    assert {(e.unit, e.generation, e.tokens) for e in plan.older} == {
        (HOMES[0][1], FIRST, 100),
        (HOMES[0][2], FIRST, 100),
    }
