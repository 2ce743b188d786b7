"""A rank's file in storage, read in pieces that are each verified before they are used."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from holdfast_core.errors import CorruptError
from holdfast_core.layouts import piece_count
from holdfast_core.persisted import RankFile, decode_header
from holdfast_core.values import Manifest
from holdfast_storage.places import Place
from holdfast_storage.verified import check_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRank:
    """A rank's file that was opened and found to be the one that its set's manifest names."""

    file: RankFile
    layout: bytes
    """Encoded (`decode_layout`)."""
    manifest: bytes
    """Encoded (`decode_manifest`)."""
    content: Manifest
    """`manifest`, decoded."""
    topology: str
    path: str
    place: Place

    @classmethod
    def open(cls, place: Place, path: str, file: RankFile) -> StoredRank:
        """Read the header of the file at `path`.

        Raises:
            CorruptError: it is not what `file` says.
            StorageError: the storage failed.
        """
        header = bytearray(file.header_bytes)
        place.read(path, 0, memoryview(header))
        if xxhash.xxh3_64_intdigest(header) != file.header_xxh3:
            raise CorruptError(f"the header of {path} does not match the manifest of its set")
        found = decode_header(bytes(header))
        if (found.decoded.rank, found.decoded.payload_bytes) != (file.rank, file.payload_bytes):
            raise CorruptError(
                f"{path} holds {found.decoded.payload_bytes} bytes of rank {found.decoded.rank}, "
                f"and the manifest of its set names {file.payload_bytes} of rank {file.rank}"
            )
        return cls(
            file=file,
            layout=found.layout,
            manifest=found.manifest,
            content=found.decoded,
            topology=found.topology,
            path=path,
            place=place,
        )

    @property
    def pieces(self) -> int:
        """How many pieces the payload has."""
        return piece_count(self.content.payload_bytes, self.content.piece_bytes)

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Fill `buffer` with the pieces [first_piece, end), whose bytes it must have room for
        exactly (the last piece of all may be short). Only those bytes are fetched.

        Raises:
            CorruptError: a piece does not match its digest; `buffer` must not be used.
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
            self.place.read(self.path, self.file.header_bytes + start, buffer)
            check_pieces(buffer, first_piece, self.content, self.path)
