"""A rank's file in the durable tier: a safetensors file whose data is the slot's payload as it is.

The header describes the data twice: as tensors, for readers that only understand safetensors, and
as the layout and manifest that the arena carried, so that the same piece digests verify the bytes
from the trainer to the storage and back. Nothing in it is code (no pickle).
docs/persisted-format.md shows an example. This module handles bytes only; `holdfast_storage`
handles files and places.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import xxhash

from holdfast_core.errors import CorruptError, LayoutMismatchError
from holdfast_core.snapshots.layouts import (
    PAGE_BYTES,
    Entry,
    Layout,
    decode_layout,
    decode_manifest,
    layout_id,
    manifest_digest,
    piece_count,
    round_up,
)
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.snapshots.stored import RankFile, StoredUnit

FORMAT = "holdfast/1"
SPARSE_FORMAT = "holdfast/2"
"""Format of a file that lacks pieces; the set's manifest names the files that hold them."""

PieceRange = tuple[int, int]
"""Pieces [first, end)."""

HEADER_BYTES_MAX = 100_000_000
"""Longest header that the safetensors package accepts; a rank of some terabytes stays below it."""

EXTRAS_NAME = "holdfast.extras"
PADDING_NAME = "holdfast.padding"
_LENGTH_BYTES = 8
_RAW = ("U8", 1)
_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": _RAW,
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
}
"""torch's name → safetensors' name and item size in bytes. Other dtypes (complex) are stored as
bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialFile:
    """Contents of a file that holds only a part of its snapshot."""

    pieces: tuple[PieceRange, ...]
    """Pieces in the file, ascending."""
    older: tuple[ExpertVersion, ...] = ()
    """Older versions of experts; see `durable.sparse_files.RankPlan`."""


_PARTIAL_FILE = msgspec.json.Decoder(PartialFile)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHeader:
    """Contents of a header: the layout and manifest, encoded and decoded."""

    layout: bytes
    manifest: bytes
    decoded: Manifest
    topology: str
    pieces: tuple[PieceRange, ...]
    """Pieces that follow the header."""
    older: tuple[ExpertVersion, ...] = ()


def safetensors_dtype(dtype: str) -> str | None:
    """The safetensors name of a dtype of torch; None when safetensors files cannot hold it."""
    return _DTYPES[dtype][0] if dtype in _DTYPES else None


def file_name(rank: int) -> str:
    """The name of a rank's file within its set."""
    return f"rank-{rank:05d}.safetensors"


def encode_header(layout: bytes, manifest: bytes, sparse: PartialFile | None = None) -> bytes:
    """The first bytes of a rank's file, up to the payload. They fill whole pages, so that in a
    mapping of the file every tensor is aligned as it was in the arena.

    Args:
        sparse: the part of the snapshot that the file holds; None for all of the payload.

    Raises:
        CorruptError: when `layout` or `manifest` cannot be read, or they do not belong together.
        LayoutMismatchError: when there are more tensors than a safetensors header can name.
    """
    decoded, text = _check(layout, manifest)
    metadata = {"format": FORMAT, "layout": layout.decode(), "manifest": manifest.decode()}
    tensors = _tensors(decoded, text)
    if sparse is not None:
        metadata["format"] = SPARSE_FORMAT
        metadata["sparse"] = msgspec.json.encode(sparse).decode()
        tensors = _present(tensors, sparse.pieces, decoded)
    table: dict[str, object] = {"__metadata__": metadata}
    for name, dtype, shape, start, end in tensors:
        # Names are unique in sound layouts; where they are not, only the plain name is lost.
        unique = name if name not in table else f"{name}~{start}"
        table[unique] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    body = msgspec.json.encode(table)
    size = round_up(_LENGTH_BYTES + len(body), PAGE_BYTES)
    if size > HEADER_BYTES_MAX:
        raise LayoutMismatchError(
            f"the header of rank {text.rank} would take {size} bytes, more than the "
            f"{HEADER_BYTES_MAX} that safetensors allows: capture fewer, larger tensors"
        )
    padded = body.ljust(size - _LENGTH_BYTES)
    return len(padded).to_bytes(_LENGTH_BYTES, "little") + padded


class _Metadata(msgspec.Struct):
    format: str
    layout: str
    manifest: str
    sparse: str = ""


class _Header(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")


_HEADER = msgspec.json.Decoder(_Header)


def decode_header(data: bytes) -> RankHeader:
    """The header that `encode_header` wrote.

    Raises:
        CorruptError: when `data` is not the first bytes of a rank's file, or its contents
            contradict each other.
    """
    declared = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or declared != len(data) - _LENGTH_BYTES:
        raise CorruptError(f"header declares {declared} bytes but has {len(data) - _LENGTH_BYTES}")
    try:
        metadata = _HEADER.decode(memoryview(data)[_LENGTH_BYTES:]).metadata
        layout, manifest = metadata.layout.encode(), metadata.manifest.encode()
        is_sparse = metadata.format == SPARSE_FORMAT
        sparse = _PARTIAL_FILE.decode(metadata.sparse) if is_sparse else None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptError(f"header cannot be read: {error}") from error
    if metadata.format not in (FORMAT, SPARSE_FORMAT):
        raise CorruptError(
            f"header has format {metadata.format!r}; this version reads {FORMAT} and "
            f"{SPARSE_FORMAT}"
        )
    decoded, text = _check(layout, manifest)
    total = piece_count(decoded.payload_bytes, decoded.piece_bytes)
    pieces = sparse.pieces if sparse is not None else ((0, total),)
    edges = [edge for run in pieces for edge in run]
    if sparse is not None and (edges != sorted(set(edges)) or edges[:1] < [0] or edges[-1] > total):
        raise CorruptError(
            f"header lists pieces {pieces} of {total}; they must be ascending, disjoint and "
            f"inside the payload"
        )
    return RankHeader(
        layout=layout,
        manifest=manifest,
        decoded=decoded,
        topology=text.topology,
        pieces=pieces,
        older=sparse.older if sparse is not None else (),
    )


def bytes_of_runs(pieces: Iterable[PieceRange], manifest: Manifest) -> int:
    """Bytes of these pieces of a payload, whose last piece may be short."""
    size = manifest.piece_bytes
    return sum(min(end * size, manifest.payload_bytes) - first * size for first, end in pieces)


def describe_file(
    header: bytes,
    manifest: bytes,
    units: tuple[StoredUnit, ...] = (),
    sparse: PartialFile | None = None,
) -> RankFile:
    """The entry in a set's manifest for the file that begins with `header`.

    Raises:
        CorruptError: when `manifest` cannot be read.
    """
    decoded = decode_manifest(manifest)
    return RankFile(
        rank=decoded.rank,
        file=file_name(decoded.rank),
        bytes=len(header)
        + (bytes_of_runs(sparse.pieces, decoded) if sparse else decoded.payload_bytes),
        header_bytes=len(header),
        header_xxh3=xxhash.xxh3_64_intdigest(header),
        payload_bytes=decoded.payload_bytes,
        layout_id=decoded.layout_id,
        manifest_digest=manifest_digest(manifest),
        units=units,
    )


def _check(layout: bytes, manifest: bytes) -> tuple[Manifest, Layout]:
    decoded = decode_manifest(manifest)
    try:
        text = decode_layout(layout)
    except LayoutMismatchError as error:
        raise CorruptError(str(error)) from error
    end = decoded.extras_offset + decoded.extras_bytes
    if layout_id(layout) != decoded.layout_id or text.rank != decoded.rank:
        raise CorruptError(
            f"the manifest of rank {decoded.rank} is of layout {decoded.layout_id}, but the "
            f"layout beside it is {layout_id(layout)} of rank {text.rank}"
        )
    if decoded.extras_offset != text.extras_offset or not 0 <= end <= decoded.payload_bytes:
        raise CorruptError(
            f"the manifest of rank {decoded.rank} has extras at {decoded.extras_offset} to {end} "
            f"of {decoded.payload_bytes} bytes, but its layout has them at {text.extras_offset}"
        )
    return decoded, text


_Tensor = tuple[str, str, tuple[int, ...], int, int]
"""Name, safetensors dtype, shape, first byte and end in the payload."""


def _tensors(manifest: Manifest, layout: Layout) -> Iterator[_Tensor]:
    """Tensors that cover the whole payload, in order and without a gap, as safetensors requires."""
    at = paddings = 0
    extras = (manifest.extras_offset, manifest.extras_offset + manifest.extras_bytes)
    parts = [_tensor(entry) for entry in layout.entries]
    parts.append((EXTRAS_NAME, _RAW[0], (extras[1] - extras[0],), *extras))
    for part in parts:
        if part[3] > at:
            yield _padding(paddings, at, part[3])
            paddings += 1
        yield part
        at = part[4]
    if manifest.payload_bytes > at:
        yield _padding(paddings, at, manifest.payload_bytes)


def _present(
    tensors: Iterable[_Tensor], pieces: Sequence[PieceRange], manifest: Manifest
) -> Iterator[_Tensor]:
    """The tensors, and their offsets, in a file that holds only `pieces`. A tensor that is only
    partly there becomes padding."""
    size, at, paddings = manifest.piece_bytes, 0, 0
    starts = [first for first, _ in pieces]
    before = [0, *accumulate(bytes_of_runs([run], manifest) for run in pieces)]
    for name, dtype, shape, start, end in tensors:
        index = bisect_right(starts, start // size) - 1
        if index < 0 or name.startswith(PADDING_NAME):
            continue
        first = pieces[index][0] * size
        if end > min(pieces[index][1] * size, manifest.payload_bytes):
            continue
        low = before[index] + start - first
        if low > at:
            yield _padding(paddings, at, low)
            paddings += 1
        at = low + end - start
        yield (name, dtype, shape, low, at)
    if before[-1] > at:
        yield _padding(paddings, at, before[-1])


def _padding(number: int, start: int, end: int) -> _Tensor:
    return (f"{PADDING_NAME}.{number}", _RAW[0], (end - start,), start, end)


def _tensor(entry: Entry) -> _Tensor:
    start, end = entry.offset, entry.offset + entry.nbytes
    dtype, width = _DTYPES.get(entry.dtype, _RAW)
    known = entry.dtype in _DTYPES and entry.start % width == 0 and entry.nbytes % width == 0
    if known and entry.start == 0 and entry.nbytes == width * math.prod(entry.shape):
        return (entry.tensor, dtype, entry.shape, start, end)
    if not known:
        dtype, width = _RAW
    return (f"{entry.tensor}@{entry.start}", dtype, (entry.nbytes // width,), start, end)
