"""Changes: the difference between a snapshot and an older snapshot of its rank. Parity normally
needs nothing else.

A parity block is the XOR of the chunks that went into it. So the block for a newer generation is
the old block XOR, for each piece that changed, its old bytes XOR its new bytes. Unchanged pieces
need not travel: a snapshot of some experts costs the network only its new pieces. The digests in
both manifests show which pieces changed.

The sender verifies both versions of a piece before it combines them, because the receiver has
nothing to verify the result against; the result carries a digest of its own (see
`transport.protocol.Kind`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import first_bad_piece
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.pieces import DIGEST_BYTES
from holdfast_daemon.memory.job_bytes import Held, JobBytes
from holdfast_daemon.parity.combining import Stream
from holdfast_daemon.parity.multiplying import fill_zeros, xor_into
from holdfast_daemon.transport.protocol import Request


def change_of(storage: JobBytes, request: Request) -> Iterator[bytes]:
    """The reply to a request for a change, a piece and its digest at a time.

    Raises:
        StorageError: one of the two generations is not held, or not on this grid.
        CorruptError: a piece of one of them does not match its manifest; raised while iterating.
    """
    rank, size = request.index, request.piece_bytes
    held = [storage.held(rank, one) for one in (request.base, request.generation)]
    grids = {one.manifest.piece_bytes for one in held}
    if grids != {size}:
        raise StorageError(f"rank {rank} is held in pieces of {sorted(grids)}, not {size}")
    longest = max(one.manifest.payload_bytes for one in held)
    if request.offset + request.nbytes > longest:
        raise StorageError(
            f"{request.nbytes} bytes at {request.offset} asked for, but only {longest} are there"
        )
    return _changes(held, request.offset, request.nbytes, size)


def _changes(held: list[Held], start: int, nbytes: int, piece_bytes: int) -> Iterator[bytes]:
    one, other = held
    made = memoryview(bytearray(piece_bytes + DIGEST_BYTES))
    beside = memoryview(bytearray(piece_bytes))
    for at in range(start, start + nbytes, piece_bytes):
        there = _read_piece(one, at, made)
        fill_zeros(made[there:piece_bytes])
        there = _read_piece(other, at, beside)
        xor_into(made[:there], beside[:there])
        end = min(piece_bytes, start + nbytes - at)
        digest = xxh3_64_intdigest(made[:end]).to_bytes(DIGEST_BYTES, "little")
        made[end : end + DIGEST_BYTES] = digest
        yield bytes(made[: end + DIGEST_BYTES])


def _read_piece(held: Held, at: int, buffer: memoryview) -> int:
    """Put the piece at `at` at the start of `buffer`; return its length, 0 beyond the payload's
    end.

    The copy is verified, not the arena, whose bytes may change at any time.
    """
    manifest = held.manifest
    nbytes = max(min(manifest.payload_bytes - at, manifest.piece_bytes), 0)
    piece = buffer[:nbytes]
    if nbytes:
        held.read_into(at, piece)
    first = at // manifest.piece_bytes
    bad = first_bad_piece(piece, manifest.digests, manifest.piece_bytes, first_piece=first)
    if bad is not None:
        raise CorruptError(
            f"piece {bad} of world rank {manifest.rank} generation {manifest.generation} does not "
            f"match its manifest"
        )
    return nbytes


def changed_pieces(before: Manifest, after: Manifest, start: int, nbytes: int) -> Iterator[int]:
    """The pieces of [start, start + nbytes) that differ between the two snapshots."""
    size = after.piece_bytes
    first, end = start // size, -(-(start + nbytes) // size)
    pieces, of_digests = np.arange(first, end), slice(DIGEST_BYTES * first, DIGEST_BYTES * end)
    lengths = [(m.payload_bytes - pieces * size).clip(0, size) for m in (before, after)]
    digests = [
        np.frombuffer(m.digests[of_digests].ljust(DIGEST_BYTES * len(pieces), b"\0"), np.uint64)
        for m in (before, after)
    ]
    differ = (lengths[0] != lengths[1]) | (digests[0] != digests[1])
    yield from pieces[differ].tolist()


class ChangeFetch(Protocol):
    """Source of the changes of the group's members."""

    def open_change(
        self, position: int, base: Generation, offset: int, nbytes: int, piece_bytes: int
    ) -> Stream:
        """The reply to a request for a change. Raises HoldfastError."""


class ChangeStream:
    """Reads a reply to a request for a change, and verifies each piece."""

    def __init__(self, stream: Stream, piece_bytes: int) -> None:
        self._stream = stream
        self._piece_bytes = piece_bytes

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with whole pieces; the last one of the reply may be shorter.

        Raises:
            CorruptError: a piece did not arrive as it was sent.
        """
        digest = bytearray(DIGEST_BYTES)
        for at in range(0, len(view), self._piece_bytes):
            part = view[at : at + self._piece_bytes]
            self._stream.read_into(part)
            self._stream.read_into(memoryview(digest))
            if xxh3_64_intdigest(part) != int.from_bytes(digest, "little"):
                raise CorruptError("a change did not arrive as it was sent")

    def close(self) -> None:
        self._stream.close()
