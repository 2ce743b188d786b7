"""Combines ranges of several members' bytes into one destination while they are in cache.

Each thread works stride by stride, in buffers of one stride: every input's bytes are received (the
first input's where the sum is made, the others' into a scratch), verified (invariant 1), XORed into
the sum and hashed, all while they are in cache. Then the sum is copied to its destination. Nothing
is read a second time. Where inputs are multiplied first, all go through the scratch.

Sums are computed and hashed in a private buffer because a destination cannot be trusted: a bit that
flips there meanwhile must not get into the digests, and a trainer may truncate its file at any
time.

What is verified depends on the result. New parity has no digests yet, so each input is verified
against its source's manifest before it is used. A rebuilt payload has digests: when it matches its
manifest, every input was right. Only when it does not are the inputs fetched again and verified one
by one, to find the wrong one; their manifests are asked for only then.

A piece that does not match is fetched once more: a byte that flipped on the wire costs one round
trip. A piece that does not match twice is the source's fault, and the error names its rank.

Each thread has one contiguous part of all that is to be made, whatever chunks that consists of, so
that none waits for another before the end, and keeps its buffers: memory that is new to a process
costs more than what is computed in it.

Memory: twice `threads * stride_bytes`. This module uses no network and no files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast_core.snapshots.layouts import first_bad_piece, round_up
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.engine.effects import ParityCorruptError, SourceCorruptError
from holdfast_daemon.parity.multiplying import fill_zeros, multiply_into, xor_into
from holdfast_daemon.transport.protocol import Kind

STRIDE_BYTES = 3 * 1024 * 1024
"""Bytes received, verified and combined at a time. Measured: 1 MiB takes 1.5 times as long, as does
8."""

THREADS = 2

_Result = TypeVar("_Result")


class Stream(Protocol):
    """Bytes of one range, in order."""

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes; raises HoldfastError."""

    def close(self) -> None:
        """Release the stream: no more bytes are wanted."""


class Fetch(Protocol):
    """Source of the bytes of the group's members. Called from several threads at once."""

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> Stream:
        """Bytes [offset, offset + nbytes) of the snapshot, or of the parity block of `row`, of the
        member at `position`. Raises HoldfastError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits on the resources that one build or rebuild may take."""

    threads: int = THREADS
    stride_bytes: int = STRIDE_BYTES
    """Bytes of each stride; rounded up to whole pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A range of one member that goes into the destination, at the destination's start."""

    position: int
    kind: Kind
    start: int
    """First byte in the member's payload or block; on the grid of pieces."""
    nbytes: int
    """Bytes to read: whole pieces unless the member has no more, so that all can be verified."""
    manifest: Callable[[], Manifest] | None
    """Function that returns the manifest that the bytes are verified against; None for parity,
    which is verified by the result. Called from several threads at once; raises HoldfastError."""
    row: int = 0
    """Row of the group's code, for a parity block."""
    factor: int = 1
    """Factor that the bytes are multiplied by; see `multiplying`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One destination and all its inputs."""

    nbytes: int
    """Bytes of the destination."""
    put: Callable[[int, memoryview], None]
    """Function that puts finished bytes at an offset of the destination. Called from several
    threads at once; raises HoldfastError."""
    inputs: tuple[Input, ...]
    """Inputs, the longest first: where it covers the whole destination and nothing is multiplied,
    its bytes are received where the sum is made."""
    piece_bytes: int
    fetch: Fetch
    finish: Callable[[int, memoryview], bool]
    """Function called with the offset and the bytes of each stride before it is put; False when
    they are wrong."""
    check: Callable[[], None]
    """Function that raises HoldfastError when the work is no longer wanted."""
    proves: bool = False
    """Whether `finish` verifies the result, so that inputs need not be verified first."""
    owners: tuple[int, ...] = ()
    """Group positions of the members whose parity is damaged when `finish` still returns False
    after a second try."""

    @property
    def in_place(self) -> bool:
        """Whether the first input can be received where the sum is made."""
        covered = self.inputs[0].nbytes if self.inputs else 0
        return covered == self.nbytes and all(item.factor == 1 for item in self.inputs)


def combine(works: Sequence[Work], effort: Effort) -> None:
    """Do the works, of one grid of pieces, divided evenly among threads; all stop when one
    fails."""
    stride_bytes = round_up(max(effort.stride_bytes, 1), works[0].piece_bytes)
    spans = [round_up(work.nbytes, stride_bytes) for work in works]
    failed = threading.Event()

    def run(start: int, end: int) -> None:
        try:
            buffers = _Buffers(works, stride_bytes)
            base = 0
            for work, span in zip(works, spans, strict=True):
                if failed.is_set():
                    return
                low, high = max(start - base, 0), min(end - base, work.nbytes)
                if low < high:
                    _Segment(work, buffers, failed).run(low, high)
                base += span
        except BaseException:
            failed.set()
            raise

    over_segments(sum(spans), stride_bytes, effort.threads, run)


class _Buffers:
    """Memory of one thread, for one segment after another."""

    def __init__(self, works: Sequence[Work], stride_bytes: int) -> None:
        alone = all(work.in_place and len(work.inputs) == 1 for work in works)
        piece_bytes = 0 if all(work.in_place for work in works) else works[0].piece_bytes
        self.stride_bytes = stride_bytes
        self.scratch = memoryview(bytearray(0 if alone else stride_bytes))
        self.sum = memoryview(bytearray(piece_bytes))
        """Buffer for the last piece, where the destination ends in the middle of it."""
        self.made = memoryview(bytearray(stride_bytes))
        """Buffer in which a stride is made."""


class _Segment:
    """A contiguous part of one destination, made by one thread, stride by stride."""

    def __init__(self, work: Work, buffers: _Buffers, failed: threading.Event) -> None:
        self._work = work
        self._stride_bytes = buffers.stride_bytes
        self._failed = failed
        self._in_place = work.in_place
        self._scratch, self._sum, self._made = buffers.scratch, buffers.sum, buffers.made

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
                if not self._stride(at, stop, streams, verify=not work.proves):
                    self._stride_again(at, stop)

    def _open(self, item: Input, start: int, stop: int) -> Stream | None:
        nbytes = self._readable(item, start, stop)
        if nbytes <= 0:
            return None
        return self._work.fetch.open(item.position, item.kind, item.start + start, nbytes, item.row)

    def _readable(self, item: Input, start: int, stop: int) -> int:
        """Bytes to read of `item` for [start, stop) of the destination: whole pieces, so that the
        last one can be verified even when the destination ends in the middle of it."""
        return min(item.nbytes, round_up(stop, self._work.piece_bytes)) - start

    def _stride(
        self, at: int, stop: int, streams: Sequence[Stream | None], *, verify: bool
    ) -> bool:
        """Combine [at, stop) of the destination; put it there and return True if it is right."""
        made = self._made[: stop - at]
        self._make(made, at, stop, streams, verify=verify)
        right = self._work.finish(at, made)
        if right:
            self._work.put(at, made)
        return right

    def _make(
        self,
        destination: memoryview,
        at: int,
        stop: int,
        streams: Sequence[Stream | None],
        *,
        verify: bool,
    ) -> None:
        if not self._in_place:
            self._sum_up(destination, at, stop, streams, verify=verify)
            return
        for item, stream in zip(self._work.inputs, streams, strict=True):
            if stream is None or (nbytes := self._readable(item, at, stop)) <= 0:
                continue
            direct = item is self._work.inputs[0]
            view = destination if direct else self._scratch[:nbytes]
            self._receive(item, stream, at, view, verify=verify)
            if not direct:
                used = min(nbytes, len(destination))
                xor_into(destination[:used], view[:used])

    def _sum_up(
        self,
        destination: memoryview,
        at: int,
        stop: int,
        streams: Sequence[Stream | None],
        *,
        verify: bool,
    ) -> None:
        """Fill [at, stop) of the destination with the sum of all inputs times their factors."""
        size = self._work.piece_bytes
        whole = len(destination) - len(destination) % size
        fill_zeros(destination[:whole])
        fill_zeros(self._sum)
        for item, stream in zip(self._work.inputs, streams, strict=True):
            if stream is None or (nbytes := self._readable(item, at, stop)) <= 0:
                continue
            view = self._scratch[:nbytes]
            self._receive(item, stream, at, view, verify=verify)
            end = round_up(nbytes, size)
            fill_zeros(self._scratch[nbytes:end])
            for into, source in (
                (destination[: min(end, whole)], self._scratch[: min(end, whole)]),
                (self._sum[: max(end - whole, 0)], self._scratch[whole:end]),
            ):
                multiply_into(into, source, item.factor, size)
        destination[whole:] = self._sum[: len(destination) - whole]

    def _stride_again(self, at: int, stop: int) -> None:
        for item in self._work.inputs:
            if item.manifest is not None:
                item.manifest()  # also where its source is said to have no bytes of this stride
        with ExitStack() as open_streams:
            streams = [self._open(item, at, stop) for item in self._work.inputs]
            for stream in streams:
                if stream is not None:
                    open_streams.callback(stream.close)
            if not self._stride(at, stop, streams, verify=True):
                owners = self._work.owners
                raise ParityCorruptError(
                    f"the parity block of position {' or '.join(map(str, owners))} of the group is "
                    f"damaged: bytes {at} to {stop} rebuilt from it are wrong",
                    owners=owners,
                )

    def _receive(
        self, item: Input, stream: Stream, at: int, view: memoryview, *, verify: bool
    ) -> None:
        """Fill `view` with the next bytes of the input, which begin at `at` of it."""
        stream.read_into(view)
        if verify and item.manifest is not None:
            self._ensure(item, item.manifest(), at, view)

    def _ensure(self, item: Input, manifest: Manifest, at: int, view: memoryview) -> None:
        """Make `view`, at `at` of the input, match the manifest by fetching bad pieces once
        more."""
        piece_bytes = self._work.piece_bytes
        first = (item.start + at) // piece_bytes
        tried = -1
        while True:
            bad = first_bad_piece(view, manifest.digests, piece_bytes, first_piece=first)
            if bad is None:
                return
            if bad == tried:
                raise SourceCorruptError(
                    f"piece {bad} of world rank {manifest.rank} generation {manifest.generation} "
                    f"does not match its manifest, even when fetched again",
                    position=item.position,
                )
            tried = bad
            offset = (bad - first) * piece_bytes
            part = view[offset : offset + piece_bytes]
            again = self._work.fetch.open(
                item.position, item.kind, item.start + at + offset, len(part), item.row
            )
            try:
                again.read_into(part)
            finally:
                again.close()


def over_segments(
    nbytes: int, grid_bytes: int, threads: int, run: Callable[[int, int], _Result]
) -> list[_Result]:
    """Call `run(start, end)` over [0, nbytes), in up to `threads` concurrent segments on the
    grid."""
    strides = -(-nbytes // grid_bytes)
    count = min(threads, strides)
    if count <= 1:
        return [run(0, nbytes)]
    bounds = [min(strides * i // count * grid_bytes, nbytes) for i in range(count + 1)]
    with ThreadPoolExecutor(count - 1, thread_name_prefix="parity") as pool:
        others = [pool.submit(run, bounds[i], bounds[i + 1]) for i in range(1, count)]
        return [run(bounds[0], bounds[1]), *(other.result() for other in others)]
