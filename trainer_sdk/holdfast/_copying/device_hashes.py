"""Checksums of pieces, computed on the device that holds them, before they are copied.

A thread hashes several gigabytes a second, so hashing takes longer than copying from a device. A
device reads its own memory much faster. So one kernel hashes all pieces whose bytes
are on that device, in the queue in front of their copies, and no thread touches them. The kernel
(`xxh3_kernel`) computes the very digests of the xxhash library. This module chooses the pieces, and
decides whether to trust the kernel: it must have hashed known bytes correctly on this device.

A thread hashes all other pieces, from the slot: those with bytes of several devices, of host memory
or of no tensor, those of very many tensors, and those whose bytes are not aligned to words. It
hashes everything where there is no Triton, while the kernel is compiled, and after any failure.

A digest made here is that of the tensors, not of the slot. So the tensors must not change between
the hash and the copy.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from holdfast._copying.devices import DeviceMove
from holdfast._copying.placed import Flags

BLOCK_BYTES = 1024
"""The kernel hashes whole blocks of this size."""
STRIPE_BYTES = 64
"""A segment begins at a multiple of this in its piece, as every tensor does in a slot."""
WORD_BYTES = 8

SEGMENTS_MAX = 16
"""Largest number of tensors in a piece that a device hashes. Its kernel looks for each stripe among
them; small tensors are gathered, and count as one."""

TESTED_PIECES, TESTED_ROWS = 5, 200
"""Number of different pieces in the test of a device, and of pieces that its kernel hashes."""

PREPARE_S = 30.0
"""Longest time to wait for the test of a device."""

_Numbers = npt.NDArray[np.int64]

_log = logging.getLogger("holdfast")


class SegmentTable(NamedTuple):
    """Where the bytes of pieces are in a device's memory. A segment is a part of a piece in one
    tensor."""

    firsts: torch.Tensor
    """Number of the first segment of each piece, and of all segments: int64 [pieces + 1]."""
    begins: torch.Tensor
    """First stripe of each segment in its piece: int64 [segments]."""
    bases: torch.Tensor
    """Address of stripe 0, if the piece were wholly in the tensor of the segment: int64
    [segments]."""


class Kernel(Protocol):
    """A function that hashes pieces of one size on one device."""

    def __call__(self, table: SegmentTable, rows: torch.Tensor, /) -> torch.Tensor:
        """Queue the xxh3-64 of the pieces in `rows` of `table`, int64 [pieces], on the current
        stream. Returns int64 [pieces], on the device."""


@dataclass(frozen=True, slots=True, eq=False)
class PiecesOnDevice:
    """The pieces of a payload whose bytes are all on one device."""

    device: torch.device
    pieces: _Numbers
    """Their numbers, each once."""
    table: SegmentTable
    """In host memory; a row for each of `pieces`."""
    tensors: Sequence[torch.Tensor]
    """The tensors that hold them."""
    addresses: Sequence[int]
    """Address of each of `tensors` in the table."""


class DevicePieces:
    """The pieces of a plan that devices can hash, found when they are first needed.

    Args:
        moves: moves from devices, in the order of the slot.
        from_host: whether a piece contains bytes of host memory, by piece, as far as any does.
    """

    def __init__(
        self,
        moves: Sequence[DeviceMove] = (),
        from_host: Sequence[bool] = (),
        piece_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._moves, self.piece_bytes = moves, piece_bytes
        end = max((move.start + move.nbytes for move in moves), default=0)
        self._from_host: Flags = np.zeros(-(-end // piece_bytes), dtype=bool)
        known = list(from_host[: len(self._from_host)])
        self._from_host[: len(known)] = known
        self._by_device: tuple[PiecesOnDevice, ...] | None = None
        self._there: dict[torch.device, tuple[SegmentTable, torch.Tensor]] = {}
        self._arrived: dict[torch.device, torch.Tensor] = {}

    def by_device(self) -> tuple[PiecesOnDevice, ...]:
        """Return the pieces of each device; none if pieces do not consist of whole blocks, and none
        if they cannot be found, which is logged."""
        if self._by_device is None:
            self._by_device = ()
            try:
                if self.piece_bytes % BLOCK_BYTES == 0:
                    self._by_device = tuple(self._find())
            except Exception as error:
                _log.warning("threads compute the checksums of all pieces: %r", error)
        return self._by_device

    def arrived(self, device: torch.device, digests: torch.Tensor) -> torch.Tensor:
        """Queue a copy of `digests`, int64 [pieces], to host memory, which the next call for this
        device overwrites. Pinned memory that lives as long as the plan: to read it, or to let go
        of it, is no work of the device."""
        if device not in self._arrived:
            self._arrived[device] = torch.empty(
                len(self._from_host),
                dtype=torch.int64,
                device="cpu",
                pin_memory=device.type == "cuda",
            )
        room = self._arrived[device][: len(digests)]
        return room.copy_(digests, non_blocking=True)

    def on_device(self, found: PiecesOnDevice, rows: _Numbers) -> tuple[SegmentTable, torch.Tensor]:
        """Return the table of `found` and the numbers of `rows` of it, int64 [rows], on its device.
        The table, and the numbers of all rows, are copied there once, on the current stream."""
        device = found.device
        if device not in self._there:
            table = SegmentTable(*(one.to(device) for one in found.table))
            self._there[device] = table, torch.arange(len(found.pieces), device=device)
        table, every_row = self._there[device]
        if len(rows) == len(every_row):
            return table, every_row
        numbers = torch.from_numpy(rows)
        if device.type == "cuda":  # From memory that is not pinned, the copy waits for the fence.
            numbers = numbers.pin_memory()
        return table, numbers.to(device, non_blocking=True)

    def _find(self) -> Iterator[PiecesOnDevice]:
        # Cut the moves: into runs of whole pieces, which need no look at each piece, and parts of
        # pieces at their ends.
        size = self.piece_bytes
        builders: dict[torch.device, _Builder] = {}
        parts: dict[int, list[_Part]] = {}
        for move in self._moves:
            start, end = move.start, move.start + move.nbytes
            low, high = -(-start // size), end // size
            base = move.flat.data_ptr() - start
            if low < high and (base + low * size) % WORD_BYTES == 0:
                pieces = np.arange(low, high)
                pieces = pieces[~self._from_host[pieces]]
                builders.setdefault(move.flat.device, _Builder(size)).add_whole(pieces, base, move)
            edges = [(start, end)] if low > high else [(start, low * size), (high * size, end)]
            for begin, stop in edges:
                if begin < stop:
                    parts.setdefault(begin // size, []).append(_Part(begin, stop, base, move))
        # Add the pieces of several parts that the kernel can hash.
        for piece, of_piece in parts.items():
            if not self._from_host[piece] and _is_hashable(piece, of_piece, size):
                device = of_piece[0].move.flat.device
                builders.setdefault(device, _Builder(size)).add_parted(piece, of_piece)
        for device, builder in builders.items():
            yield builder.build(device)


class _Part(NamedTuple):
    """A part of a piece in one tensor."""

    begin: int
    """First byte in the slot."""
    end: int
    base: int
    """Address of byte 0 of the slot, if the slot were wholly in the tensor."""
    move: DeviceMove


class _Builder:
    """The table of one device, while its pieces are being found."""

    def __init__(self, piece_bytes: int) -> None:
        self._size = piece_bytes
        self._pieces: list[_Numbers] = []
        self._counts: list[_Numbers] = []
        self._begins: list[_Numbers] = []
        self._bases: list[_Numbers] = []
        self._moves: dict[int, DeviceMove] = {}

    def add_whole(self, pieces: _Numbers, base: int, move: DeviceMove) -> None:
        """Add pieces that are wholly in one tensor."""
        self._pieces.append(pieces)
        self._counts.append(np.ones_like(pieces))
        self._begins.append(np.zeros_like(pieces))
        self._bases.append(base + pieces * self._size)
        self._moves[id(move)] = move

    def add_parted(self, piece: int, parts: Sequence[_Part]) -> None:
        """Add a piece that consists of several parts."""
        low = piece * self._size
        self._pieces.append(np.array([piece]))
        self._counts.append(np.array([len(parts)]))
        self._begins.append(np.array([(part.begin - low) // STRIPE_BYTES for part in parts]))
        self._bases.append(np.array([part.base + low for part in parts]))
        self._moves |= {id(part.move): part.move for part in parts}

    def build(self, device: torch.device) -> PiecesOnDevice:
        firsts = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *self._counts]))
        table = (firsts, np.concatenate(self._begins), np.concatenate(self._bases))
        flats = [move.flat for move in self._moves.values()]
        return PiecesOnDevice(
            device,
            np.concatenate(self._pieces),
            SegmentTable(*map(torch.from_numpy, table)),
            flats,
            [flat.data_ptr() for flat in flats],
        )


def _is_hashable(piece: int, parts: Sequence[_Part], piece_bytes: int) -> bool:
    """Whether these parts fill a piece, from one device, where the kernel can read them."""
    if len(parts) > SEGMENTS_MAX:
        return False
    at, device = piece * piece_bytes, parts[0].move.flat.device
    for begin, end, base, move in parts:
        aligned = begin % STRIPE_BYTES == 0 and (base + begin) % WORD_BYTES == 0
        if begin != at or not aligned or move.flat.device != device:
            return False
        at = end
    return at == (piece + 1) * piece_bytes


class HashesOnDevice:
    """Digests of a capture's pieces that devices compute.

    Args:
        count: number of pieces of the capture.
    """

    def __init__(self, count: int) -> None:
        self.on_device: Flags = np.zeros(count, dtype=bool)
        """Marks these pieces."""
        self._queued: list[tuple[_Test, _Numbers, torch.Tensor]] = []

    def add(self, test: _Test, pieces: _Numbers, digests: torch.Tensor) -> None:
        """Add the digests of `pieces`, int64 [pieces] in host memory, where a device will have
        copied them when all work is over that is queued now."""
        self.on_device[pieces] = True
        self._queued.append((test, pieces, digests))

    def write(self, digests: npt.NDArray[np.uint64]) -> None:
        """Write the digests of these pieces into those of all pieces. Call it when they have been
        copied; training may use the device for anything by then, so this does not."""
        for _, pieces, arrived in self._queued:
            digests[pieces] = arrived.numpy().view(np.uint64)

    def fail(self, error: BaseException, device: torch.device | None = None) -> None:
        """Leave later captures to threads: the queued work of `device` has failed, or all of it."""
        for test, _, _ in self._queued:
            if device in (None, test.device):
                test.fail(error)


class DeviceHasher:
    """Computes digests on the devices where a test has shown that the kernel is right.

    Each device is tested on a thread, because to compile the kernel takes seconds.

    Args:
        make_kernel: makes the kernel for a device and a size of pieces. May raise any error, which
            leaves the pieces to the host's threads.
    """

    def __init__(self, make_kernel: Callable[[torch.device, int], Kernel]) -> None:
        self._make_kernel = make_kernel
        self._tests: dict[tuple[torch.device, int], _Test] = {}

    def prepare(self, devices: Iterable[torch.device], piece_bytes: int) -> None:
        """Test the devices that are not tested yet, and wait for the results as `settle` does.

        Without it the first captures are hashed by threads. Not within a capture.
        """
        for device in devices:
            self._test(device, piece_bytes)
        self.settle()

    def trusts(self, device: torch.device, piece_bytes: int) -> bool:
        """Whether a device may hash pieces of this size now. The first call begins its test."""
        return self._test(device, piece_bytes).kernel is not None

    def begin(self, found: DevicePieces, count: int, skip: Flags | None) -> HashesOnDevice:
        """Queue the hashes of the first `count` pieces on the current streams: in front of the
        copies of a capture, behind those of a restore. Never raises.

        Args:
            skip: pieces that are not to be hashed, bool [at most `count`]; None skips no piece.
        """
        wanted = np.ones(count, dtype=bool)
        if skip is not None:
            wanted[: len(skip)] = ~skip
        hashes = HashesOnDevice(count)
        for of_device in found.by_device():
            test = self._test(of_device.device, found.piece_bytes)
            try:
                self._queue(test, found, of_device, wanted, hashes)
            except Exception as error:
                test.fail(error)
        return hashes

    def _queue(
        self,
        test: _Test,
        found: DevicePieces,
        of_device: PiecesOnDevice,
        wanted: Flags,
        hashes: HashesOnDevice,
    ) -> None:
        """Queue the hashes of the `wanted` pieces of one device, if it may hash them."""
        kernel, pieces, device = test.kernel, of_device.pieces, of_device.device
        rows = np.flatnonzero(pieces < len(wanted))
        rows = rows[wanted[pieces[rows]]]
        if kernel is None or not len(rows):
            return
        # A tensor that has moved is copied from its new memory, so the table is out of date.
        now = [tensor.data_ptr() for tensor in of_device.tensors]
        if now != of_device.addresses:
            return
        with _current(device):
            digests = found.arrived(device, kernel(*found.on_device(of_device, rows)))
        hashes.add(test, pieces[rows], digests)

    @property
    def state(self) -> str:
        """Which devices compute checksums, and why others do not; empty before the first test."""
        return "; ".join(test.state for test in [*self._tests.values()])

    def settle(self) -> None:
        """Wait until no device is being tested, at most `PREPARE_S` in all."""
        deadline = time.monotonic() + PREPARE_S
        for test in [*self._tests.values()]:
            test.wait(deadline - time.monotonic())

    def _test(self, device: torch.device, piece_bytes: int) -> _Test:
        key = (device, piece_bytes)
        if key not in self._tests:
            self._tests[key] = _Test(self._make_kernel, device, piece_bytes)
        return self._tests[key]


class _Test:
    """The test of the kernel on one device, from construction on a thread of its own."""

    def __init__(
        self,
        make_kernel: Callable[[torch.device, int], Kernel],
        device: torch.device,
        piece_bytes: int,
    ) -> None:
        self._make_kernel, self.device, self._piece_bytes = make_kernel, device, piece_bytes
        self.kernel: Kernel | None = None
        """The kernel; None until it has proved to be right, and after a failure."""
        self.state = f"{device} is being tested"
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._run, name="holdfast-hash-test", daemon=True).start()
        except RuntimeError as error:  # The process may have no more threads.
            self.fail(error)
            self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the test, at most this long."""
        self._ended.wait(max(seconds, 0.0))

    def fail(self, error: BaseException) -> None:
        """Leave all pieces to threads from now on."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.kernel, self.state = None, f"threads for {self.device} ({reason})"
        _log.warning(
            "%s does not compute the checksums of its tensors; threads do, which takes longer: %s",
            self.device,
            reason,
        )

    def _run(self) -> None:
        try:
            with _current(self.device), _stream_on(self.device), torch.no_grad():
                kernel = self._make_kernel(self.device, self._piece_bytes)
                _compare(kernel, self.device, self._piece_bytes)
        except BaseException as error:
            self.fail(error)
        else:
            self.kernel, self.state = kernel, f"{self.device}"
            _log.info("%s computes the checksums of its tensors", self.device)
        finally:
            self._ended.set()


def _compare(kernel: Kernel, device: torch.device, piece_bytes: int) -> None:
    """Hash known bytes on the device, and raise RuntimeError unless the digests are right.

    The last piece consists of as many tensors as one may, of which every second one begins eight
    bytes behind what an allocation is aligned to. The pieces are hashed in any order, many of them
    repeatedly, as many as a device has to hash at once.
    """
    size, count = piece_bytes, TESTED_PIECES
    if size % BLOCK_BYTES:
        raise RuntimeError(f"pieces of {size} bytes do not consist of blocks of {BLOCK_BYTES}")
    generator = np.random.default_rng(0)
    known = generator.integers(0, 256, count * size, dtype=np.uint8)
    known[:size] = 0
    known[size : 2 * size] = 255
    # Each tensor is smaller than what torch allocates by itself, of which memory would stay behind.
    inner = [
        size * i // SEGMENTS_MAX // STRIPE_BYTES * STRIPE_BYTES for i in range(1, SEGMENTS_MAX)
    ]
    cuts = [0, 2 * size, *((count - 1) * size + cut for cut in inner), count * size]
    moves = [
        DeviceMove(begin, end - begin, _placed(known[begin:end], device, i % 2 * WORD_BYTES))
        for i, (begin, end) in enumerate(pairwise(cuts))
    ]
    pieces = DevicePieces(moves, piece_bytes=size)
    found = pieces.by_device()
    if [len(one.pieces) for one in found] != [count]:
        raise RuntimeError(f"its memory is not aligned to {WORD_BYTES} bytes")
    rows = np.concatenate([np.arange(count), generator.integers(0, count, TESTED_ROWS - count)])
    generator.shuffle(rows)
    table, _ = pieces.on_device(found[0], found[0].pieces)
    digests = kernel(table, torch.from_numpy(rows).to(device)).cpu().numpy().view(np.uint64)
    view, tested = known.data, found[0].pieces[rows]
    expected = [xxh3_64_intdigest(view[at : at + size]) for at in range(0, count * size, size)]
    wrong = np.unique(tested[digests != np.array(expected, dtype=np.uint64)[tested]])
    if len(wrong):
        raise RuntimeError(f"it computed wrong checksums for {len(wrong)} of {count} known pieces")


def _placed(content: npt.NDArray[np.uint8], device: torch.device, shift: int) -> torch.Tensor:
    """Copy bytes to a device, to `shift` bytes behind the begin of an allocation."""
    flat = torch.empty(shift + len(content), dtype=torch.uint8, device=device)[shift:]
    return flat.copy_(torch.from_numpy(content))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _stream_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a new stream of `device` the current one, so that nothing waits for training."""
    on_cuda = device.type == "cuda"
    return torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext()


@cache
def hasher_of_process() -> DeviceHasher:
    """The hasher of this process, whose later sessions need no test of their devices."""
    hasher = DeviceHasher(triton_kernel)
    atexit.register(hasher.settle)  # A process must not end while a kernel is compiled.
    return hasher


def triton_kernel(device: torch.device, piece_bytes: int) -> Kernel:
    """Make the Triton kernel. Raises ImportError where Triton is not installed."""
    from holdfast._copying.xxh3_kernel import PieceKernel  # noqa: PLC0415

    return PieceKernel(device, piece_bytes)
