"""The durable tier as daemons load from it: whole sets, and what is wrong with others."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from holdfast_core.durable.choice import StoredCopy
from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Tier
from holdfast_daemon.durable.loader import Loader
from holdfast_daemon.durable.stored_sets import TierSets
from holdfast_daemon.engine.effects import FindStored, LoadStored, OpenStored
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_storage.sets import SetStore

JOB, PIECE, NBYTES = "default.run1", 4096, 30_000
GENERATION = Generation(3, 1200)
LAYOUT = encode_layout(
    Layout(
        rank=0,
        world_size=1,
        topology="dp=1",
        entries=(),
        extras_offset=0,
        extras_capacity=NBYTES,
        piece_bytes=PIECE,
    )
)


def payload_of(generation: Generation) -> bytes:
    return random.Random(str(generation)).randbytes(NBYTES)


def store(directory: Path, generation: Generation = GENERATION) -> Path:
    """A set of one rank; its directory."""
    payload = memoryview(payload_of(generation))
    manifest = Manifest(
        job=JOB,
        rank=0,
        world_size=1,
        generation=generation,
        layout_id=layout_id(LAYOUT),
        payload_bytes=NBYTES,
        extras_offset=0,
        extras_bytes=NBYTES,
        piece_bytes=PIECE,
        digests=piece_digests(payload, PIECE),
    )
    sets = SetStore(str(directory), JOB)
    file = sets.write_rank(
        generation,
        0,
        layout=LAYOUT,
        manifest=encode_manifest(manifest),
        read=lambda first, end: [payload[first:end]],
    )
    sets.commit(generation, [file])
    (made,) = directory.glob(f"{JOB}/{generation.epoch:08d}.{generation.step:012d}")
    return made


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


class Bench:
    """A node's storage, and a loader into it."""

    def __init__(self, root: Path, tier: Path) -> None:
        self.node = NodeStorage(root, 1 << 24)
        self.storage = JobStorage(self.node, JOB)
        self.storage.adopt()
        self.loader = Loader(self.storage, JOB, TierSets, stride_bytes=2 * PIECE)
        self.tier = Tier(uri=str(tier))

    def load(self, generation: Generation = GENERATION) -> bytes:
        """Through all three effects; the payload that is sealed then."""
        scope = EpochScope(membership=None)
        opened = self.loader.open(
            OpenStored(tier=self.tier, rank=0, world_rank=0, generation=generation), scope
        )
        self.storage.allocate(0, opened.layout)
        from_file = TierSets(self.tier.uri, JOB).open_rank(generation, 0).content
        effect = LoadStored(
            tier=self.tier, rank=0, slot=1, manifest=from_file, encoded=opened.manifest
        )
        self.loader.load(effect, scope)
        payload = bytearray(NBYTES)
        self.storage.held(0, generation).read_into(0, memoryview(payload))
        return bytes(payload)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "node", tmp_path / "tier")


def test_a_copy_is_found_and_loaded_byte_for_byte(bench: Bench, tmp_path: Path) -> None:
    store(tmp_path / "tier")
    found = bench.loader.find(FindStored(epoch=4, tier=bench.tier)).found
    assert found is not None
    assert found.copies == (StoredCopy(generation=GENERATION, world_size=1),)
    assert bench.load() == payload_of(GENERATION)
    assert bench.loader.read_bytes(0) == NBYTES


def test_a_copy_is_loaded_whole_into_an_arena_that_was_cut(bench: Bench, tmp_path: Path) -> None:
    store(tmp_path / "tier")
    arena = bench.storage.allocate(0, LAYOUT)
    os.truncate(arena.path, PIECE)
    assert bench.load() == payload_of(GENERATION)


def test_a_flipped_bit_seals_nothing(bench: Bench, tmp_path: Path) -> None:
    flip(store(tmp_path / "tier") / "rank-00000.safetensors")
    with pytest.raises(CorruptError):
        bench.load()
    with pytest.raises(StorageError):
        bench.storage.held(0, GENERATION)


@pytest.mark.parametrize("harm", ["cut", "gone", "manifest gone"])
def test_a_set_that_is_not_whole_any_more_is_corrupt_and_not_out_of_reach(
    bench: Bench, tmp_path: Path, harm: str
) -> None:
    made = store(tmp_path / "tier")
    path = made / ("manifest.json" if harm == "manifest gone" else "rank-00000.safetensors")
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        path.unlink()
    with pytest.raises(CorruptError):
        bench.load()


def test_a_damaged_manifest_is_not_taken_for_no_set(bench: Bench, tmp_path: Path) -> None:
    flip(store(tmp_path / "tier") / "manifest.json")
    found = bench.loader.find(FindStored(epoch=4, tier=bench.tier)).found
    assert found is not None
    assert found.copies == ()
    assert [str(copy.generation) for copy in found.unreadable] == ["3.1200"]


def test_storage_that_cannot_be_listed_is_an_error_and_not_empty(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / JOB).write_text("not a directory")
    with pytest.raises(StorageError):
        bench.loader.find(FindStored(epoch=4, tier=bench.tier))
