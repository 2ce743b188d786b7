"""Takes pieces of other ranks from mirrors on this node, and fetches the rest
(`holdfast_core.protection.mirrors`).

A mirror is memory that a trainer writes at any time, and that no manifest covers. So a piece of it
is copied, and counts only if the copy has the digest that the owner's manifest states for the piece
that would be fetched: same rank, same number, same length. What does not match is fetched, and then
verified as fetched pieces are. So a mirror of another generation, one that is overwritten during a
build and one with a flipped bit all cost bytes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast_core.errors import HoldfastError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.protection.mirrors import mirror_places
from holdfast_core.snapshots.layouts import first_bad_piece, piece_count
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.memory.job_bytes import Mirror
from holdfast_daemon.parity.build import common_piece_bytes
from holdfast_daemon.parity.changes import ChangeFetch, changed_pieces
from holdfast_daemon.parity.combining import Fetch, Stream
from holdfast_daemon.transport.protocol import Kind

DENSE_SHARE = 15 / 16
"""Share of changed pieces from which on whole chunks are fetched: changes would spare the network
at most a sixteenth, and take twice the CPU time (decision 0148)."""


class PeersFetch(Fetch, ChangeFetch, Protocol):
    """Source of chunks and changes over the network."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece in a mirror."""

    mirror: Mirror
    start: int


class MirroredFetch:
    """`combining.Fetch` of whole chunks. Called from several threads at once.

    Args:
        peers: source of what mirrors do not have.
        manifests: manifests of the sources, by position.
        mirrors: mirrors on this node.
        count: called with the bytes of each piece that a mirror had.
    """

    def __init__(
        self,
        peers: PeersFetch,
        manifests: Mapping[int, Manifest],
        mirrors: Sequence[Mirror],
        count: Callable[[int], None],
    ) -> None:
        self.peers = peers
        self._manifests, self._count = manifests, count
        self._places: dict[int, dict[int, _Place]] = {}
        for position, manifest in manifests.items():
            size = manifest.piece_bytes
            places = {
                piece: _Place(mirror, before * size)
                for mirror in mirrors
                if mirror.piece_bytes == size
                for piece, before in mirror_places(mirror.runs, manifest.rank).items()
                if (piece + 1) * size <= manifest.payload_bytes
            }
            if places:
                self._places[position] = places

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> Stream:
        """Open a range, which begins on the grid of pieces. Raises HoldfastError."""
        if kind is not Kind.SNAPSHOT or position not in self._places:
            return self.peers.open(position, kind, offset, nbytes, row)
        return _MirroredStream(self, position, offset, nbytes)

    def chunks_are_better(self, code: Code, which: BlockId, before: Mapping[int, Manifest]) -> bool:
        """Whether the block is better made from whole chunks than from the changes since `before`:
        nearly all has changed, or peers would send fewer bytes, because mirrors have the rest."""
        # Count the pieces of whole chunks, and those of them that have changed.
        sizes = {position: one.payload_bytes for position, one in self._manifests.items()}
        size = common_piece_bytes(self._manifests)
        parts = [part for part in code.contributions(which, sizes, size) if part.range.nbytes]
        chunks = [
            (
                part.position,
                range(
                    part.range.start // size,
                    piece_count(part.range.start + part.range.nbytes, size),
                ),
            )
            for part in parts
        ]
        changed = sum(
            1
            for part in parts
            for _ in changed_pieces(
                before[part.position],
                self._manifests[part.position],
                part.range.start,
                part.range.nbytes,
            )
        )
        if changed and changed >= DENSE_SHARE * sum(len(pieces) for _, pieces in chunks):
            return True
        if not self._places:
            return False
        looked_at = memoryview(bytearray(size))
        missing = sum(
            not self.take(position, piece, looked_at)
            for position, pieces in chunks
            for piece in pieces
        )
        return missing < changed

    def has(self, position: int, piece: int) -> bool:
        """Whether some mirror has a place for the piece."""
        return piece in self._places[position]

    def take(self, position: int, piece: int, view: memoryview) -> bool:
        """Fill `view` with a whole piece from a mirror; False where none has its bytes now."""
        place = self._places.get(position, {}).get(piece)
        manifest = self._manifests[position]
        if place is None or len(view) != manifest.piece_bytes:
            return False
        try:
            place.mirror.read_into(place.start, view)
        except HoldfastError:  # the trainer cut its arena, or the arena is gone
            return False
        size = manifest.piece_bytes
        return first_bad_piece(view, manifest.digests, size, first_piece=piece) is None

    def piece_bytes(self, position: int) -> int:
        return self._manifests[position].piece_bytes

    def count(self, nbytes: int) -> None:
        self._count(nbytes)


class _MirroredStream:
    """A range of a payload, in order: pieces from mirrors, and runs of the others from peers.

    Where a mirror lacks a piece, it probably lacks those after it: training needed its tensors, or
    has gone on. So each run that is fetched in spite of a mirror is twice as long as the last one,
    until the mirror has a piece again.
    """

    def __init__(self, fetch: MirroredFetch, position: int, offset: int, nbytes: int) -> None:
        self._fetch, self._position = fetch, position
        self._at, self._end = offset, offset + nbytes
        self._size = fetch.piece_bytes(position)
        self._stream: Stream | None = None
        self._until = 0
        """End of the run that the open stream has."""
        self._next_run = 1
        """Pieces of the next run that is fetched in spite of a mirror."""

    def read_into(self, view: memoryview) -> None:
        start = self._at
        while (done := self._at - start) < len(view):
            part = view[done : done + self._size - self._at % self._size]
            if self._stream is None:
                if self._fetch.take(self._position, self._at // self._size, part):
                    self._fetch.count(len(part))
                    self._next_run = 1
                    self._at += len(part)
                    continue
                self._stream = self._open_run()
            part = view[done : done + self._until - self._at]
            self._stream.read_into(part)
            self._at += len(part)
            if self._at == self._until:
                self.close()

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open_run(self) -> Stream:
        """Open a stream of the run that begins with the present piece."""
        end = self._at // self._size + 1
        if self._fetch.has(self._position, end - 1):
            end += self._next_run - 1
            self._next_run *= 2
        while end * self._size < self._end and not self._fetch.has(self._position, end):
            end += 1
        self._until = min(end * self._size, self._end)
        return self._fetch.peers.open(
            self._position, Kind.SNAPSHOT, self._at, self._until - self._at
        )
