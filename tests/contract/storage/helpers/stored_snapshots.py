"""Snapshots to store, and the checks that they came back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast_core.durable.sets import StoredSet
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    PIECE_BYTES,
    Entry,
    Layout,
    TensorRole,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.stored import RankFile
from holdfast_storage.sets import SetStore

JOB = "job"
TOPOLOGY = "dp2·ep1·tp1·pp1"
EXTRAS_BYTES = 77


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One rank's, with a whole tensor, a range of one, holes, and extras."""

    rank: int
    generation: Generation
    layout: bytes
    manifest: bytes
    payload: bytes

    def read(self, start: int, end: int) -> Iterator[memoryview]:
        """In parts that do not lie on the grid of pieces."""
        view, step = memoryview(self.payload), PIECE_BYTES * 3 // 2 + 13
        for at in range(start, end, step):
            yield view[at : min(at + step, end)]

    def store(self, store: SetStore) -> RankFile:
        return store.write_rank(
            self.generation, self.rank, layout=self.layout, manifest=self.manifest, read=self.read
        )


@functools.lru_cache(maxsize=32)
def snapshot(
    rank: int, generation: Generation, *, world_size: int = 2, nbytes: int = 600_000, job: str = JOB
) -> Snapshot:
    """Of about `nbytes`, which differ by rank and generation."""
    rows = nbytes // 2 // 4 // 8
    entries = (
        _entry("w", "float32", (rows, 8), 0, rows * 32, 0),
        _entry("v", "bfloat16", (nbytes,), 6, nbytes // 2 & ~1, rows * 32 + 64),
    )
    extras = entries[-1].offset + entries[-1].nbytes + 30
    layout = encode_layout(
        Layout(
            rank=rank,
            world_size=world_size,
            topology=TOPOLOGY,
            entries=entries,
            extras_offset=extras,
            extras_capacity=4096,
        )
    )
    random = np.random.default_rng([rank, generation.epoch, generation.step])
    payload = random.integers(0, 256, extras + EXTRAS_BYTES, dtype=np.uint8).tobytes()
    manifest = Manifest(
        job=job,
        rank=rank,
        world_size=world_size,
        generation=generation,
        layout_id=layout_id(layout),
        payload_bytes=len(payload),
        extras_offset=extras,
        extras_bytes=EXTRAS_BYTES,
        piece_bytes=PIECE_BYTES,
        digests=piece_digests(payload, PIECE_BYTES),
    )
    return Snapshot(
        rank=rank,
        generation=generation,
        layout=layout,
        manifest=encode_manifest(manifest),
        payload=payload,
    )


def store_set(store: SetStore, generation: Generation, *, world_size: int = 2) -> list[RankFile]:
    """Write all ranks and commit."""
    files = [
        snapshot(rank, generation, world_size=world_size).store(store) for rank in range(world_size)
    ]
    store.commit(generation, files)
    return files


def generations(store: SetStore) -> list[Generation]:
    return [stored.generation for stored in store.complete()]


def check_set(store: SetStore, stored: StoredSet, *, nbytes: int = 600_000) -> None:
    """Every rank has the bytes that were captured."""
    for rank in range(stored.world_size):
        expected = snapshot(rank, stored.generation, world_size=stored.world_size, nbytes=nbytes)
        opened = store.open_rank(stored, rank)
        assert (opened.layout, opened.manifest) == (expected.layout, expected.manifest)
        found = bytearray(len(expected.payload))
        opened.read_into(0, opened.pieces, memoryview(found))
        assert found == expected.payload


def _entry(
    tensor: str, dtype: str, shape: tuple[int, ...], start: int, nbytes: int, offset: int
) -> Entry:
    return Entry(
        unit="layer0/dense",
        tensor=tensor,
        role=TensorRole.COMPUTE,
        dtype=dtype,
        shape=shape,
        start=start,
        nbytes=nbytes,
        offset=offset,
    )
