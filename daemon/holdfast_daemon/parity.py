"""The bytes of RAIM5: combines chunks of several members while they are in cache.

`holdfast_core.raim5` says which ranges; this module moves and combines them, stride by stride. Of
each stride, every source's bytes are received (the first source's straight into the destination,
the others' into a scratch of one stride a thread), verified against the source's manifest before
they are used (invariant 1), XORed into the destination and hashed, all while they are in cache.
Nothing is read a second time.

A piece that does not match is fetched once more: a byte that flipped on the wire costs one round
trip. A piece that does not match twice is the source's fault, and the error names its rank.

Memory beside the destination: `threads * stride_bytes`. This module knows no network and no files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.layouts import first_bad_piece, piece_digests, round_up
from holdfast_core.raim5 import ChunkRecovery, contributions, parity_bytes, recovery
from holdfast_core.values import Manifest
from holdfast_daemon.bulk import Kind

STRIDE_BYTES = 3 * 1024 * 1024
"""Received, verified and combined at a time. Measured: 1 MiB takes 1.5 times as long, as does 8."""

THREADS = 2

_Result = TypeVar("_Result")


class SourceCorruptError(CorruptError):
    """A source's bytes do not match its manifest, also when they are fetched again."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """Whose snapshot is damaged."""


class Stream(Protocol):
    """Bytes of one range, in order."""

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes; raises HoldfastError."""

    def close(self) -> None:
        """No more bytes are wanted."""


class Fetch(Protocol):
    """Where the bytes of the group's members come from. Called from several threads at once."""

    def open(self, position: int, kind: Kind, offset: int, nbytes: int) -> Stream:
        """Bytes [offset, offset + nbytes) of the snapshot, or of the parity block, of the member at
        `position`. Raises HoldfastError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much of the machine one build or rebuild may take."""

    threads: int = THREADS
    stride_bytes: int = STRIDE_BYTES
    """Rounded up to whole pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Input:
    """A range of one member that goes into the destination, at the destination's start."""

    position: int
    kind: Kind
    start: int
    """First byte in the member's payload or block; on the grid of pieces."""
    nbytes: int
    """Bytes to read: whole pieces unless the member has no more, so that all can be verified."""
    manifest: Manifest | None
    """None for parity, which is verified by what comes out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """One destination and all that goes into it."""

    destination: memoryview
    inputs: tuple[_Input, ...]
    """The first covers the whole destination."""
    piece_bytes: int
    fetch: Fetch
    finish: Callable[[int, memoryview], bool]
    """Called with the offset and the bytes of each finished stride; False when they are wrong."""
    check: Callable[[], None]
    """Raises HoldfastError when the work is no longer wanted."""
    effort: Effort
    blame: str = ""
    """What is damaged when `finish` still says False after a second try."""


def xor_into(destination: memoryview, source: memoryview) -> None:
    """destination ^= source, for two views of equal length. Releases the GIL."""
    whole = len(destination) - len(destination) % 8
    for part, dtype in ((slice(0, whole), np.uint64), (slice(whole, None), np.uint8)):
        into = np.frombuffer(destination[part], dtype=dtype)
        np.bitwise_xor(into, np.frombuffer(source[part], dtype=dtype), out=into)


def build(
    block: memoryview,
    *,
    owner: int,
    n: int,
    sources: Mapping[int, Manifest],
    fetch: Fetch,
    check: Callable[[], None] = lambda: None,
    effort: Effort | None = None,
) -> tuple[int, bytes]:
    """Fill `block` with the parity that the member at `owner` keeps of the others (REFT §4.3).

    Args:
        n: Members in the group.
        sources: By position, the manifests of all other members.
        check: Called before each stride; raises HoldfastError to give up.

    Returns:
        The bytes of `block` that are in use, and their digests on the grid of pieces.

    Raises:
        SourceCorruptError: a source does not match its manifest.
        InvalidJobError: the block is too small, or the manifests do not belong together.
        HoldfastError: what `fetch` raised.
    """
    piece_bytes = common_piece_bytes(sources)
    payloads = _payloads(n, sources, absent=owner, absent_bytes=0)
    used_bytes = parity_bytes(owner, payloads, piece_bytes)
    if used_bytes > len(block):
        raise InvalidJobError(
            f"parity of {used_bytes} bytes does not fit the block of {len(block)} that was "
            f"reserved: the session must state the largest slot of all ranks"
        )
    inputs = [
        _Input(
            position=c.position,
            kind=Kind.SNAPSHOT,
            start=c.range.start,
            nbytes=c.range.nbytes,
            manifest=sources[c.position],
        )
        for c in contributions(owner, payloads, piece_bytes)
    ]
    digests = bytearray(8 * -(-used_bytes // piece_bytes))

    def note(at: int, done: memoryview) -> bool:
        first = 8 * (at // piece_bytes)
        found = piece_digests(done, piece_bytes)
        digests[first : first + len(found)] = found
        return True

    _combine(
        _Work(
            destination=block[:used_bytes],
            inputs=tuple(sorted(inputs, key=lambda item: (-item.nbytes, item.position))),
            piece_bytes=piece_bytes,
            fetch=fetch,
            finish=note,
            check=check,
            effort=effort or Effort(),
        )
    )
    return used_bytes, bytes(digests)


def rebuild(
    payload: memoryview,
    *,
    lost: int,
    manifest: Manifest,
    sources: Mapping[int, Manifest],
    fetch: Fetch,
    check: Callable[[], None] = lambda: None,
    effort: Effort | None = None,
) -> None:
    """Recover the payload of the member at `lost` from parity and the others (REFT §4.3).

    Args:
        payload: Where it goes, `manifest.payload_bytes` long.
        manifest: Of the lost snapshot; every piece is verified against it before this returns.
        sources: By position, the manifests of all other members of the group.
        check: Called before each stride; raises HoldfastError to give up.

    Raises:
        SourceCorruptError: a source does not match its manifest.
        CorruptError: what came out does not match `manifest`, so a parity block is damaged.
        InvalidJobError: the manifests do not belong together.
        HoldfastError: what `fetch` raised.
    """
    n = len(sources) + 1
    piece_bytes = common_piece_bytes({**sources, lost: manifest})
    payloads = _payloads(n, sources, absent=lost, absent_bytes=manifest.payload_bytes)
    for step in recovery(lost, payloads, piece_bytes):
        if step.range.nbytes == 0:
            continue
        first_piece = step.range.start // piece_bytes

        def is_right(at: int, done: memoryview, first_piece: int = first_piece) -> bool:
            first = first_piece + at // piece_bytes
            bad = first_bad_piece(done, manifest.digests, piece_bytes, first_piece=first)
            return bad is None

        _combine(
            _Work(
                destination=payload[step.range.start : step.range.start + step.range.nbytes],
                inputs=_recovery_inputs(step, sources, piece_bytes),
                piece_bytes=piece_bytes,
                fetch=fetch,
                finish=is_right,
                check=check,
                effort=effort or Effort(),
                blame=f"the parity block of position {step.owner} of the group is damaged",
            )
        )


def verify(
    payload: memoryview, digests: bytes, piece_bytes: int, *, threads: int = THREADS
) -> int | None:
    """Index of a piece of `payload` that does not match its digest, or None when all do."""

    def first_bad(start: int, end: int) -> int | None:
        return first_bad_piece(
            payload[start:end], digests, piece_bytes, first_piece=start // piece_bytes
        )

    found = _over_segments(len(payload), round_up(STRIDE_BYTES, piece_bytes), threads, first_bad)
    return next((bad for bad in found if bad is not None), None)


def common_piece_bytes(manifests: Mapping[int, Manifest]) -> int:
    """The grid that all manifests share; InvalidJobError when they do not share one."""
    sizes = {manifest.piece_bytes for manifest in manifests.values()}
    if len(sizes) != 1:
        raise InvalidJobError(
            f"snapshots of a parity group must be checksummed on one grid, not on {sorted(sizes)}"
        )
    return sizes.pop()


def _payloads(
    n: int, sources: Mapping[int, Manifest], *, absent: int, absent_bytes: int
) -> list[int]:
    if set(sources) != set(range(n)) - {absent}:
        raise InvalidJobError(f"positions {sorted(sources)} are not all of {n} but {absent}")
    return [absent_bytes if i == absent else sources[i].payload_bytes for i in range(n)]


def _recovery_inputs(
    step: ChunkRecovery, sources: Mapping[int, Manifest], piece_bytes: int
) -> tuple[_Input, ...]:
    parity = _Input(
        position=step.owner, kind=Kind.PARITY, start=0, nbytes=step.range.nbytes, manifest=None
    )
    needed = round_up(step.range.nbytes, piece_bytes)
    others = [
        _Input(
            position=c.position,
            kind=Kind.SNAPSHOT,
            start=c.range.start,
            nbytes=min(c.range.nbytes, needed),
            manifest=sources[c.position],
        )
        for c in step.others
    ]
    return (parity, *others)


def _combine(work: _Work) -> None:
    """Do the work, a segment of the destination for each thread; all stop when one fails."""
    assert work.inputs[0].nbytes == len(work.destination), "the first input covers everything"
    stride_bytes = round_up(max(work.effort.stride_bytes, 1), work.piece_bytes)
    failed = threading.Event()

    def run(start: int, end: int) -> None:
        try:
            _Segment(work, stride_bytes, failed).run(start, end)
        except BaseException:
            failed.set()
            raise

    _over_segments(len(work.destination), stride_bytes, work.effort.threads, run)


class _Segment:
    """What one thread does: a contiguous part of the destination, stride by stride."""

    def __init__(self, work: _Work, stride_bytes: int, failed: threading.Event) -> None:
        self._work = work
        self._stride_bytes = stride_bytes
        self._failed = failed
        self._scratch = memoryview(bytearray(stride_bytes if len(work.inputs) > 1 else 0))

    def run(self, start: int, end: int) -> None:
        work = self._work
        with ExitStack() as open_streams:
            streams: list[Stream | None] = []
            for item in work.inputs:
                stream = self._open(item, start, end)
                streams.append(stream)
                if stream is not None:
                    open_streams.callback(stream.close)
            for at in range(start, end, self._stride_bytes):
                if self._failed.is_set():
                    return
                work.check()
                stop = min(at + self._stride_bytes, end)
                if not self._stride(at, stop, streams):
                    self._stride_again(at, stop)

    def _open(self, item: _Input, start: int, stop: int) -> Stream | None:
        nbytes = self._readable(item, start, stop)
        if nbytes <= 0:
            return None
        return self._work.fetch.open(item.position, item.kind, item.start + start, nbytes)

    def _readable(self, item: _Input, start: int, stop: int) -> int:
        """Bytes to read of `item` for [start, stop) of the destination: whole pieces, so that the
        last one can be verified even when the destination ends in the middle of it."""
        return min(item.nbytes, round_up(stop, self._work.piece_bytes)) - start

    def _stride(self, at: int, stop: int, streams: Sequence[Stream | None]) -> bool:
        """Combine [at, stop) of the destination; whether what came out is right."""
        destination = self._work.destination[at:stop]
        for item, stream in zip(self._work.inputs, streams, strict=True):
            if stream is None or (nbytes := self._readable(item, at, stop)) <= 0:
                continue
            direct = item is self._work.inputs[0]
            view = destination if direct else self._scratch[:nbytes]
            stream.read_into(view)
            if item.manifest is not None:
                self._ensure(item, item.manifest, at, view)
            if not direct:
                used = min(nbytes, len(destination))
                xor_into(destination[:used], view[:used])
        return self._work.finish(at, destination)

    def _stride_again(self, at: int, stop: int) -> None:
        with ExitStack() as open_streams:
            streams = [self._open(item, at, stop) for item in self._work.inputs]
            for stream in streams:
                if stream is not None:
                    open_streams.callback(stream.close)
            if not self._stride(at, stop, streams):
                raise CorruptError(f"{self._work.blame}: bytes {at} to {stop} come out wrong")

    def _ensure(self, item: _Input, manifest: Manifest, at: int, view: memoryview) -> None:
        """Let `view`, at `at` of the input, match the manifest, fetching bad pieces once more."""
        piece_bytes = self._work.piece_bytes
        first = (item.start + at) // piece_bytes
        tried = -1
        while True:
            bad = first_bad_piece(view, manifest.digests, piece_bytes, first_piece=first)
            if bad is None:
                return
            if bad == tried:
                raise SourceCorruptError(
                    f"piece {bad} of rank {manifest.rank} generation {manifest.generation} does "
                    f"not match its manifest, also when fetched again",
                    rank=manifest.rank,
                )
            tried = bad
            offset = (bad - first) * piece_bytes
            part = view[offset : offset + piece_bytes]
            again = self._work.fetch.open(
                item.position, item.kind, item.start + at + offset, len(part)
            )
            try:
                again.read_into(part)
            finally:
                again.close()


def _over_segments(
    nbytes: int, grid_bytes: int, threads: int, run: Callable[[int, int], _Result]
) -> list[_Result]:
    """`run(start, end)` over [0, nbytes) at once in up to `threads` segments on the grid."""
    strides = -(-nbytes // grid_bytes)
    count = min(threads, strides)
    if count <= 1:
        return [run(0, nbytes)]
    bounds = [min(strides * i // count * grid_bytes, nbytes) for i in range(count + 1)]
    with ThreadPoolExecutor(count - 1, thread_name_prefix="parity") as pool:
        others = [pool.submit(run, bounds[i], bounds[i + 1]) for i in range(1, count)]
        return [run(bounds[0], bounds[1]), *(other.result() for other in others)]
