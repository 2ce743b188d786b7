"""A job of two ranks with small payloads, stored below a directory of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest, ParityEntry
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon.memory.arenas import SealedSlot
from holdfast_daemon.memory.files import RealFiles
from holdfast_daemon.memory.job_storage import AdoptedJob, JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.memory.parity_blocks import ParityRecord

MIB = 1024 * 1024
BUDGET = 64 * MIB
PIECE = 4096
JOB = "team/job"


def layout_of(rank: int, capacity: int = 3 * PIECE) -> bytes:
    layout = Layout(
        rank=rank,
        world_size=2,
        topology="dp2",
        entries=(),
        extras_offset=0,
        extras_capacity=capacity,
        piece_bytes=PIECE,
    )
    return encode_layout(layout)


LAYOUT = layout_of(0)
LAYOUT_ID = layout_id(LAYOUT)


def manifest_of(payload: bytes, step: int, rank: int = 0) -> Manifest:
    return Manifest(
        job=JOB,
        rank=rank,
        world_size=2,
        generation=Generation(1, step),
        layout_id=layout_id(layout_of(rank)),
        payload_bytes=len(payload),
        extras_offset=0,
        extras_bytes=len(payload),
        piece_bytes=PIECE,
        digests=piece_digests(payload, PIECE),
    )


def seal(job: JobStorage, slot: int, step: int) -> None:
    manifest = manifest_of(bytes([step]) * 5000, step)
    job.seal(0, LAYOUT_ID, slot, SealedSlot(manifest=manifest, encoded=encode_manifest(manifest)))


def record_of(step: int, nbytes: int = 5000) -> ParityRecord:
    entry = ParityEntry(
        lane=0, generation=Generation(1, step), group=(0, 1), sources=((1, 0xFFFF_FFFF_FFFF_FFFF),)
    )
    return ParityRecord(
        entry=entry,
        nbytes=nbytes,
        piece_bytes=PIECE,
        digests=piece_digests(bytes(nbytes), PIECE),
        payload_bytes=((1, nbytes),),
    )


def membership_of(epoch: int) -> Membership:
    places = tuple(
        Member(index=i, node=f"n{i}", memory_id=f"m{i}", peer_address="h:1", bulk_address="h:2")
        for i in range(2)
    )
    return Membership(job=JOB, epoch=epoch, members=places, nproc_per_node=1, groups=((0, 1),))


@contextmanager
def opened(
    root: Path, budget: int = BUDGET, files: RealFiles | None = None
) -> Iterator[tuple[JobStorage, AdoptedJob, NodeStorage]]:
    """The job's storage, adopted anew."""
    node = NodeStorage(root, budget, files)
    job = JobStorage(node, JOB)
    try:
        yield job, job.adopt(), node
    finally:
        node.close()


def held_bytes(directory: Path) -> int:
    big = ("arena", ".block")
    return sum(p.stat().st_size for p in directory.rglob("*") if p.name.endswith(big))
