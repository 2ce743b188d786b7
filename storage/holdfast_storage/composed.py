"""A rank's snapshot spread over several files and memory, read as one, piece by piece.

An expert that a set does not hold is in the file of an older set. The composed snapshot has a
manifest and digests of its own, taken from those of its sources, and is read, verified and sealed
like any other snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast_core.durable.sparse_files import Composition
from holdfast_core.snapshots.layouts import encode_manifest, piece_count
from holdfast_core.snapshots.manifests import Manifest


class PieceSource(Protocol):
    """One source of pieces."""

    @property
    def content(self) -> Manifest: ...

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Fill `buffer` with pieces [first_piece, end), verified. Raises HoldfastError."""


class RankSnapshot(PieceSource, Protocol):
    """One rank's snapshot in storage, wherever its pieces lie."""

    @property
    def layout(self) -> bytes:
        """Layout, encoded; `decode_layout` reads it."""

    @property
    def manifest(self) -> bytes:
        """Manifest, encoded; `decode_manifest` reads it."""

    @property
    def topology(self) -> str: ...

    @property
    def pieces(self) -> int:
        """Number of pieces of the payload."""

    @property
    def mixture(self) -> str:
        """Text for logs about where the experts come from; empty when the set's own file holds all
        of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedRank:
    """A snapshot composed of several sources."""

    layout: bytes
    topology: str
    manifest: bytes
    """Manifest of the composed snapshot, encoded."""
    composition: Composition
    sources: Sequence[PieceSource]
    """Sources of pieces, the set's own file first."""

    @classmethod
    def of(
        cls, layout: bytes, topology: str, composition: Composition, sources: Sequence[PieceSource]
    ) -> ComposedRank:
        """Compose `sources` as `composition` lays down."""
        return cls(
            layout=layout,
            topology=topology,
            manifest=encode_manifest(composition.manifest),
            composition=composition,
            sources=sources,
        )

    @property
    def content(self) -> Manifest:
        return self.composition.manifest

    @property
    def pieces(self) -> int:
        return piece_count(self.content.payload_bytes, self.content.piece_bytes)

    @property
    def mixture(self) -> str:
        composition = self.composition
        return (
            f"{composition.from_memory} experts from memory, "
            f"{composition.from_storage} from storage, "
            f"{composition.older} of them older than the snapshot"
        )

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Fill `buffer` as `StoredRank.read_into` does."""
        size = self.content.piece_bytes
        start = first_piece * size
        for source, low, high in self._runs(first_piece, end):
            stop = min(high * size, self.content.payload_bytes)
            source.read_into(low, high, buffer[low * size - start : stop - start])

    def _runs(self, first: int, end: int) -> Iterator[tuple[PieceSource, int, int]]:
        source_of = self.composition.source_of
        low = first
        while low < end:
            index, high = source_of.get(low, 0), low + 1
            while high < end and source_of.get(high, 0) == index:
                high += 1
            yield self.sources[index], low, high
            low = high
