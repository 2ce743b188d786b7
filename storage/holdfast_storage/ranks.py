"""A rank's file in storage, read in pieces, each of which is verified before use."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from holdfast_core.durable.rank_files import PieceRange, bytes_of_runs, decode_header
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import piece_count
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.snapshots.stored import RankFile
from holdfast_storage.roots import TierRoot
from holdfast_storage.verified import check_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRank:
    """A rank's file, opened and checked to be the file that its set's manifest names."""

    file: RankFile
    layout: bytes
    """Layout, encoded; `decode_layout` reads it."""
    manifest: bytes
    """Manifest, encoded; `decode_manifest` reads it."""
    content: Manifest
    """`manifest`, decoded."""
    topology: str
    path: str
    root: TierRoot
    runs: tuple[PieceRange, ...]
    """Runs of pieces that the file holds."""
    older: tuple[ExpertVersion, ...]
    """Versions of experts held elsewhere; see `sparse_files.RankPlan`."""

    @classmethod
    def open(cls, root: TierRoot, path: str, file: RankFile) -> StoredRank:
        """Read the header of the file at `path`.

        Raises:
            CorruptError: it does not match `file`.
            StorageError: the storage failed.
        """
        header = bytearray(file.header_bytes)
        root.read(path, 0, memoryview(header))
        if xxhash.xxh3_64_intdigest(header) != file.header_xxh3:
            raise CorruptError(f"the header of {path} does not match the manifest of its set")
        content = decode_header(bytes(header))
        if (content.decoded.rank, content.decoded.payload_bytes) != (
            file.rank,
            file.payload_bytes,
        ):
            raise CorruptError(
                f"{path} holds {content.decoded.payload_bytes} bytes of rank "
                f"{content.decoded.rank}, and the manifest of its set names {file.payload_bytes} "
                f"of rank {file.rank}"
            )
        if file.bytes != file.header_bytes + bytes_of_runs(content.pieces, content.decoded):
            raise CorruptError(f"{path} has {file.bytes} bytes, which does not match its header")
        return cls(
            file=file,
            layout=content.layout,
            manifest=content.manifest,
            content=content.decoded,
            topology=content.topology,
            path=path,
            root=root,
            runs=content.pieces,
            older=content.older,
        )

    @property
    def pieces(self) -> int:
        """Number of pieces of the payload; a file may hold only some of them."""
        return piece_count(self.content.payload_bytes, self.content.piece_bytes)

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Fill `buffer`, which must have exactly their size, with the pieces [first_piece, end);
        the payload's last piece may be short. Only those bytes are fetched.

        Raises:
            CorruptError: a piece does not match its digest, or is not in the file; `buffer` must
                not be used.
            StorageError: the storage failed.
            ValueError: there are no such pieces, or `buffer` has another size.
        """
        size = self.content.piece_bytes
        start, stop = first_piece * size, min(end * size, self.content.payload_bytes)
        if not 0 <= first_piece <= end <= self.pieces or len(buffer) != max(stop - start, 0):
            raise ValueError(
                f"{len(buffer)} bytes for pieces {first_piece} to {end} of {self.pieces} of "
                f"{self.path}, which have {stop - start}"
            )
        if first_piece < end:
            self.root.read(self.path, self._offset(first_piece, end), buffer)
            check_pieces(buffer, first_piece, self.content, self.path)

    @property
    def mixture(self) -> str:
        """Empty: one file holds the whole snapshot."""
        return ""

    def _offset(self, first_piece: int, end: int) -> int:
        """Offset of the pieces in the file."""
        before = self.file.header_bytes
        for run in self.runs:
            if run[0] <= first_piece and end <= run[1]:
                return before + (first_piece - run[0]) * self.content.piece_bytes
            before += bytes_of_runs([run], self.content)
        raise CorruptError(
            f"{self.path} does not hold pieces {first_piece} to {end} of rank {self.content.rank}, "
            f"generation {self.content.generation}: they are in another set's file"
        )
