"""Sets of a raw job in durable storage, as its daemons would have written them."""

from __future__ import annotations

from pathlib import Path

from harness import RawJob
from raw_trainer import EXTRAS_BYTES, PIECE_BYTES, content_of, raw_layout

from holdfast_core.durable.rank_files import file_name
from holdfast_core.durable.sets import set_name
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import encode_manifest, layout_id, piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_storage.sets import SetStore


def store_set(directory: Path, job: RawJob, generation: Generation, world_size: int = 0) -> None:
    """Write a whole set below `directory`, with the payloads that trainers capture in
    `generation`."""
    write_set(SetStore(f"file://{directory}", job.name), job, generation, world_size)


def write_set(store: SetStore, job: RawJob, generation: Generation, world_size: int = 0) -> None:
    """The same, by `store`."""
    size = world_size or job.size
    files = []
    for rank in range(size):
        nbytes = job.rank_bytes(rank)
        payload = memoryview(content_of(rank, generation, nbytes))
        layout = raw_layout(rank, size, nbytes)
        manifest = Manifest(
            job=job.name,
            rank=rank,
            world_size=size,
            generation=generation,
            layout_id=layout_id(layout),
            payload_bytes=len(payload),
            extras_offset=nbytes,
            extras_bytes=EXTRAS_BYTES,
            piece_bytes=PIECE_BYTES,
            digests=piece_digests(payload, PIECE_BYTES),
        )
        files.append(
            store.write_rank(
                generation,
                rank,
                layout=layout,
                manifest=encode_manifest(manifest),
                read=lambda first, end, payload=payload: [payload[first:end]],  # type: ignore[misc]
            )
        )
    store.commit(generation, files)


def flip(directory: Path, job: RawJob, generation: Generation, rank: int) -> None:
    """Change one bit of a rank's payload."""
    path = directory / job.name / set_name(generation) / file_name(rank)
    with path.open("r+b") as file:
        file.seek(-20_000, 2)
        byte = file.read(1)[0]
        file.seek(-20_000, 2)
        file.write(bytes([byte ^ 0x10]))
