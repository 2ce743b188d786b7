"""Persist the snapshots of fake daemons as real daemons do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast._copying.placed import Placed
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout, encode_manifest
from holdfast_core.snapshots.stored import RankFile
from holdfast_storage.sets import SetStore

JOB = "fake"
"""Name of the job in the manifests of fake daemons."""


def persist(directory: Path, uri: Path, ranks: int, generation: Generation) -> SetStore:
    """Write the set of `generation` from the daemons' arenas in `directory` to the tier `uri`."""
    store = SetStore(str(uri), JOB)
    files = [_persist_rank(store, directory, rank, generation) for rank in range(ranks)]
    store.commit(generation, files)
    return store


def _persist_rank(store: SetStore, directory: Path, rank: int, generation: Generation) -> RankFile:
    held = FakeDaemon(directory, rank=rank).sealed()[generation]
    layout = (held.home / "layout.json").read_bytes()
    arena = memoryview((held.home / "arena").read_bytes())
    placed = Placed(
        arena=arena,
        address=0,
        layout=decode_layout(layout),
        slot=held.piece_map.slot,
        places=held.piece_map.places,
    )

    def read(first: int, end: int) -> Iterator[memoryview]:
        yield memoryview(placed.read(first, end - first))

    manifest = encode_manifest(held.manifest)
    return store.write_rank(generation, rank, layout=layout, manifest=manifest, read=read)
