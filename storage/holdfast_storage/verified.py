"""Comparison of bytes with the arena's digests on their way to storage: no wrong byte is stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from holdfast_core.durable.rank_files import PieceRange, bytes_of_runs
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import first_bad_piece
from holdfast_core.snapshots.manifests import Manifest


def verified(
    parts: Iterable[memoryview], manifest: Manifest, file: str, run: PieceRange | None = None
) -> Iterator[memoryview]:
    """Yield the payload in `parts` (of any size); a byte follows only once its piece is verified.

    Args:
        run: the pieces in `parts`; None for all of the payload.

    Raises:
        CorruptError: a piece does not match, or there are fewer or more bytes than in the manifest.
    """
    views: list[memoryview] = []
    index, held_bytes = run[0] if run else 0, 0
    missing = bytes_of_runs([run], manifest) if run else manifest.payload_bytes
    for part in parts:
        left = part.cast("B") if part.format != "B" or part.ndim != 1 else part
        if len(left) > missing:
            raise _length(manifest, file, "more")
        missing -= len(left)
        while len(left):
            room = manifest.piece_bytes - held_bytes
            views.append(left[:room])
            held_bytes += len(views[-1])
            left = left[room:]
            if held_bytes == manifest.piece_bytes or not (missing or len(left)):
                _check(views, index, manifest, file)
                yield from views
                index, views, held_bytes = index + 1, [], 0
    if missing:
        raise _length(manifest, file, "fewer")


def check_pieces(buffer: memoryview, first_piece: int, manifest: Manifest, file: str) -> None:
    """Raise CorruptError if a piece in `buffer`, which begins at `first_piece`, does not match."""
    bad = first_bad_piece(buffer, manifest.digests, manifest.piece_bytes, first_piece=first_piece)
    if bad is not None:
        raise _wrong(bad, manifest, file)


def _check(held: list[memoryview], index: int, manifest: Manifest, file: str) -> None:
    if len(held) == 1:
        digest = xxhash.xxh3_64_intdigest(held[0])
    else:
        state = xxhash.xxh3_64()
        for view in held:
            state.update(view)
        digest = state.intdigest()
    if digest.to_bytes(8, "little") != manifest.digests[8 * index : 8 * index + 8]:
        raise _wrong(index, manifest, file)


def _wrong(index: int, manifest: Manifest, file: str) -> CorruptError:
    return CorruptError(
        f"piece {index} of {file} (rank {manifest.rank} of generation {manifest.generation} of "
        f"{manifest.job}) does not match its digest: use another copy of this generation"
    )


def _length(manifest: Manifest, file: str, than: str) -> CorruptError:
    return CorruptError(
        f"{file}: there are {than} bytes than the {manifest.payload_bytes} of the manifest of rank "
        f"{manifest.rank} of generation {manifest.generation} of {manifest.job}"
    )
