"""Snapshots of ranks with experts on pieces of their own, for tests of copies that leave some out.

One piece holds the non-expert part; each expert has pieces of its own; the extras come last.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Entry,
    Layout,
    TensorRole,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest

PIECE = 64
PIECES_EACH = 2
EXTRAS_BYTES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One rank's snapshot."""

    layout: bytes
    manifest: bytes
    content: Manifest
    payload: bytes


def expert_bytes(unit: str, version: Generation, piece: int = PIECE) -> bytes:
    """The bytes of a version of an expert."""
    return random.Random(f"{unit} {version}").randbytes(PIECES_EACH * piece)


def rank_layout(rank: int, ranks: int, experts: Sequence[str], piece: int = PIECE) -> Layout:
    """The layout of a rank that holds these experts."""
    entries = [_entry("layer0/dense", f"dense{rank}", 0, piece - 5)]
    for index, unit in enumerate(experts):
        at = piece * (1 + PIECES_EACH * index)
        entries.append(_entry(unit, f"{unit}.weight", at, PIECES_EACH * piece))
    return Layout(
        rank=rank,
        world_size=ranks,
        topology=f"dp{ranks}·ep{ranks}·tp1·pp1",
        entries=tuple(entries),
        extras_offset=piece * (1 + PIECES_EACH * len(experts)),
        extras_capacity=4 * EXTRAS_BYTES,
        piece_bytes=piece,
    )


def made(
    rank: int,
    homes: Sequence[Sequence[str]],
    generation: Generation,
    versions: Mapping[str, Generation],
    *,
    job: str = "job",
    piece: int = PIECE,
) -> Made:
    """A rank's snapshot of `generation`, when rank r holds the experts `homes[r]` and `versions`
    are the newest versions of all experts."""
    layout = rank_layout(rank, len(homes), homes[rank], piece)
    encoded = encode_layout(layout)
    dense = random.Random(f"{rank} {generation}").randbytes(piece + EXTRAS_BYTES)
    own = b"".join(expert_bytes(unit, versions[unit], piece) for unit in homes[rank])
    payload = dense[:piece] + own + dense[piece:]
    content = Manifest(
        job=job,
        rank=rank,
        world_size=len(homes),
        generation=generation,
        layout_id=layout_id(encoded),
        payload_bytes=len(payload),
        extras_offset=layout.extras_offset,
        extras_bytes=EXTRAS_BYTES,
        piece_bytes=piece,
        digests=piece_digests(payload, piece),
        experts=tuple(
            ExpertVersion(
                unit=unit, generation=version, number=version.step, tokens=100 * version.step + rank
            )
            for unit, version in sorted(versions.items())
        ),
    )
    return Made(layout=encoded, manifest=encode_manifest(content), content=content, payload=payload)


def expected(rank: int, homes: Sequence[Sequence[str]], content: Manifest) -> bytes:
    """The payload that a manifest describes, with its versions of experts."""
    at = {version.unit: version.generation for version in content.experts}
    made_again = made(
        rank, homes, content.generation, at, job=content.job, piece=content.piece_bytes
    )
    return made_again.payload


def _entry(unit: str, tensor: str, offset: int, nbytes: int) -> Entry:
    return Entry(
        unit=unit,
        tensor=tensor,
        role=TensorRole.COMPUTE,
        dtype="uint8",
        shape=(nbytes,),
        start=0,
        nbytes=nbytes,
        offset=offset,
    )
