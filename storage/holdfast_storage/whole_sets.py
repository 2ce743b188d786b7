"""A persisted set read by tensors instead of by ranks.

A load into another parallelism, or an export, needs boxes of the model's tensors. Their bytes lie
in the files of many ranks, in ranges that follow the parallelism of the run that wrote them. This
module finds the ranges and reads only the pieces that hold them: in order, in large reads, from
several ranks' files at once. Every piece is verified by its digest before a byte of it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast_core.durable.set_tensors import (
    Box,
    Reading,
    SetTensor,
    parts_of,
    runs_of,
    set_tensors,
)
from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.layouts import decode_layout, decode_manifest
from holdfast_core.snapshots.manifests import Manifest
from holdfast_storage.sets import SetStore

READ_BYTES = 16 * 1024 * 1024
"""Upper limit of one read: large enough for object storage. Each thread has one such buffer."""

GAP_BYTES = 1024 * 1024
"""Smaller gaps between two wanted ranges are read as well: cheaper than another request."""

MASTERS_BYTES = 256 * 1024 * 1024
"""Masters that are read at once, to be rounded; a larger tensor is read alone."""

THREADS = 8

_NAN_OF_BFLOAT16 = 0x7FC0

RUNS_MAX = 64
ROW_BYTES = 256 * 1024
"""More than `RUNS_MAX` runs, of rows up to this long, are read as whole rows and cut in memory."""


class RankBytes(Protocol):
    """The interface needed of a rank's file; `holdfast_storage.ranks.StoredRank` has it."""

    @property
    def layout(self) -> bytes: ...

    @property
    def manifest(self) -> bytes: ...

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        """Fill `buffer` with pieces [first_piece, end) of the payload, verified."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Want:
    """A box of a tensor to be read, in C order without gaps."""

    tensor: SetTensor
    box: Box
    """The box of `tensor` that contains it."""
    offsets: tuple[int, ...]
    """Offsets of its first element within `box`."""
    lengths: tuple[int, ...]
    into: memoryview
    """Writable bytes that receive it, of exactly its size."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, the rank and offset at which it begins: consecutive reads are joined."""
        first = next(iter(self.box.parts), None)
        return (first.rank, first.offset) if first is not None else (0, 0)


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of a payload, and the memory that receives them."""

    offset: int
    into: memoryview


class WholeSet:
    """The tensors of a persisted set. Thread-safe; keeps the files that it opened.

    Args:
        open_rank: opens a rank's file and verifies its header.
        ranks: number of ranks of the world that wrote the set.

    Raises:
        CorruptError, StorageError: a header cannot be read.
        LayoutMismatchError, InvalidJobError: the tensors cannot be put together; see `set_tensors`.
    """

    def __init__(
        self, open_rank: Callable[[int], RankBytes], ranks: int, reading: Reading | None = None
    ) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            self._ranks = dict(enumerate(pool.map(open_rank, range(ranks))))
        self._manifests = {r: decode_manifest(of.manifest) for r, of in self._ranks.items()}
        layouts = {rank: decode_layout(of.layout) for rank, of in self._ranks.items()}
        self.tensors: Mapping[str, SetTensor] = set_tensors(layouts, reading)

    @property
    def manifests(self) -> Mapping[int, Manifest]:
        """Manifests by rank."""
        return self._manifests

    def extras(self, rank: int) -> bytes:
        """Extras of a rank's snapshot, encoded."""
        manifest = self._manifests[rank]
        data = bytearray(manifest.extras_bytes)
        self._read_rank(rank, [*_cut(manifest, manifest.extras_offset, memoryview(data))])
        return bytes(data)

    def read(self, wants: Sequence[Want]) -> None:
        """Fill all of `wants`.

        Raises:
            CorruptError: a piece does not match its digest. Do not use what was filled.
            StorageError: the storage failed until the last retry.
        """
        thin = [(want, wide) for want in wants if (wide := _widened(want)) is not None]
        wide_ones = {id(want) for want, _ in thin}
        for batch in _batches([want for want in wants if id(want) not in wide_ones]):
            self._fill(batch)
        for want, wide in thin:
            data = np.empty(wide.lengths, f"V{want.tensor.item_bytes}")
            self._fill([replace(wide, into=data.reshape(-1).view(np.uint8).data)])
            lows = [o - w for o, w in zip(want.offsets, wide.offsets, strict=True)]
            part = data[tuple(slice(o, o + n) for o, n in zip(lows, want.lengths, strict=True))]
            np.frombuffer(want.into, data.dtype).reshape(want.lengths)[...] = part

    def _fill(self, wants: Sequence[Want]) -> None:
        runs: dict[int, list[_Run]] = {}
        masters: list[tuple[bytearray, memoryview, str]] = []
        for want in wants:
            at = 0
            for start, nbytes in runs_of(
                want.box, want.offsets, want.lengths, want.tensor.item_bytes
            ):
                for part in parts_of(want.box, start, nbytes):
                    into = want.into[at : at + part.nbytes]
                    if part.widened > 1:
                        wide = bytearray(part.nbytes * part.widened)
                        masters.append((wide, into, want.tensor.dtype))
                        into = memoryview(wide)
                    cuts = _cut(self._manifests[part.rank], part.offset, into)
                    runs.setdefault(part.rank, []).extend(cuts)
                    at += part.nbytes
        if not runs:
            return
        with ThreadPoolExecutor(min(THREADS, len(runs))) as pool:
            for _ in pool.map(self._read_rank, runs.keys(), runs.values()):
                pass
        for wide, into, dtype in masters:
            into[:] = rounded(np.frombuffer(wide, np.float32), dtype).tobytes()

    def array(
        self, tensor: SetTensor, offsets: Sequence[int], lengths: Sequence[int]
    ) -> npt.NDArray[np.void]:
        """A box of a tensor, which may span several of the tensor's boxes.

        Returns:
            An array of shape `lengths` whose elements are the tensor's, as bytes (`V2`, `V4`, …).
        """
        out = np.empty(lengths, f"V{tensor.item_bytes}")
        wants, copies = [], []
        for box in tensor.boxes:
            lows = tuple(max(o, b) for o, b in zip(offsets, box.offsets, strict=True))
            ends = tuple(
                min(o + n, b + m)
                for o, n, b, m in zip(offsets, lengths, box.offsets, box.shape, strict=True)
            )
            if any(low >= end for low, end in zip(lows, ends, strict=True)):
                continue
            shape = tuple(end - low for low, end in zip(lows, ends, strict=True))
            inner = tuple(low - b for low, b in zip(lows, box.offsets, strict=True))
            # With the ellipsis it is a view even where there is no dimension.
            place: tuple[Any, ...] = (..., *map(slice, *_within(lows, ends, offsets)))
            target = out[place]
            part = target if target.flags.c_contiguous else np.empty(shape, out.dtype)
            into = part.reshape(-1).view(np.uint8).data
            wants.append(Want(tensor=tensor, box=box, offsets=inner, lengths=shape, into=into))
            if part is not target:
                copies.append((target, part))
        self.read(wants)
        for target, part in copies:
            target[...] = part
        return out

    def _read_rank(self, rank: int, runs: list[_Run]) -> None:
        manifest, source = self._manifests[rank], self._ranks[rank]
        size = manifest.piece_bytes
        buffer = memoryview(bytearray())
        for first, end, group in _reads(sorted(runs, key=lambda run: run.offset), size):
            low, high = first * size, min(end * size, manifest.payload_bytes)
            if high - low > len(buffer):
                buffer = memoryview(bytearray(high - low))
            source.read_into(first, end, buffer[: high - low])
            for run in group:
                run.into[:] = buffer[run.offset - low : run.offset - low + len(run.into)]


def _batches(wants: Sequence[Want]) -> Iterator[list[Want]]:
    """Cut `wants` into batches that are read at once: one of all wants that need no temporary
    memory, and groups of the others that need little."""
    direct = [want for want in wants if all(part.widened == 1 for part in want.box.parts)]
    if direct:
        yield direct
    batch, nbytes = [], 0
    for want in wants:
        wide = sum(p.nbytes * p.widened for p in want.box.parts if p.widened > 1)
        if not wide:
            continue
        batch.append(want)
        nbytes += wide
        if nbytes >= MASTERS_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def rounded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint16]:
    """The bits of `values`, rounded to nearest with ties to even.

    Args:
        dtype: `bfloat16` or `float16`.

    Raises:
        CorruptError: for another dtype.
    """
    if dtype == "float16":
        with np.errstate(over="ignore"):  # a value beyond float16 is infinite, as in torch
            return values.astype(np.float16).view(np.uint16)
    if dtype != "bfloat16":
        raise CorruptError(f"a layout derives {dtype} from float32 masters, which is not possible")
    bits = values.view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)  # infinities stay
    halves = (bits >> 16).astype(np.uint16)
    halves[np.isnan(values)] = _NAN_OF_BFLOAT16
    return halves


def _widened(want: Want) -> Want | None:
    """A box of whole rows around `want` that is faster to read, if `want` is many short runs with
    small gaps in the same pieces. None if `want` itself is fastest."""
    shape, lengths = want.box.shape, want.lengths
    cut = [dim for dim, (n, m) in enumerate(zip(lengths, shape, strict=True)) if n != m]
    inner = cut[-1] if cut else 0
    row = math.prod(shape[inner:]) * want.tensor.item_bytes
    if math.prod(lengths[:inner]) < RUNS_MAX or row > ROW_BYTES:
        return None
    return replace(
        want,
        offsets=(*want.offsets[:inner], *([0] * (len(shape) - inner))),
        lengths=(*lengths[:inner], *shape[inner:]),
    )


def _within(
    lows: Sequence[int], ends: Sequence[int], offsets: Sequence[int]
) -> tuple[list[int], list[int]]:
    """First and end indices, counted from `offsets`."""
    return (
        [low - offset for low, offset in zip(lows, offsets, strict=True)],
        [end - offset for end, offset in zip(ends, offsets, strict=True)],
    )


def _cut(manifest: Manifest, offset: int, into: memoryview) -> Iterator[_Run]:
    """The run at `offset`, cut at the boundaries of reads."""
    grid = max(READ_BYTES // manifest.piece_bytes, 1) * manifest.piece_bytes
    at = 0
    while at < len(into):
        end = min((offset + at) // grid * grid + grid - offset, len(into))
        yield _Run(offset + at, into[at:end])
        at = end


def _reads(runs: Sequence[_Run], size: int) -> Iterator[tuple[int, int, list[_Run]]]:
    """(first piece, end piece, runs) of each read, for runs in order."""
    group: list[_Run] = []
    first = end = 0
    for run in runs:
        low = run.offset // size
        high = -(-(run.offset + len(run.into)) // size)
        near = low * size - end * size <= GAP_BYTES
        if group and near and (max(high, end) - first) * size <= max(READ_BYTES, size):
            end = max(high, end)
        else:
            if group:
                yield first, end, group
            group, first, end = [], low, high
        group.append(run)
    if group:
        yield first, end, group


def open_set(
    uri: str,
    job: str,
    generation: str = "",
    *,
    reading: Reading | None = None,
    options: Mapping[str, Any] | None = None,
) -> WholeSet:
    """A job's set in storage: of `generation` (`epoch.step`), or the newest complete one.

    Raises:
        StorageError: there is no such set, or the storage cannot be read.
        CorruptError, LayoutMismatchError, InvalidJobError: as for `WholeSet`.
    """
    store = SetStore(uri, job, options=options)
    complete = store.complete()
    for stored in complete:
        if generation in ("", str(stored.generation)):
            return WholeSet(partial(store.open_rank, stored), stored.world_size, reading)
    existing = ", ".join(str(stored.generation) for stored in complete[:8]) or "none"
    raise StorageError(
        f"{uri} has no complete set {generation or 'at all'} of job {job!r}; it has: {existing}"
    )
