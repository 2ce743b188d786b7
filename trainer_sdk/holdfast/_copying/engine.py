"""The copy engine: it copies each byte once, and hashes or verifies it while it is in cache.

A capture copies each piece from the live tensors into a slot and hashes it. A restore copies each
piece out of a slot and verifies it. The threads live as long as the engine and take blocks of
pieces in turn; memmove and xxh3 both run without the interpreter's lock. Measured: two threads take
as long as a plain memcpy, and one thread takes 1.2 times as long.

A device that copies by itself is several times as fast as a thread that hashes, but its copies slow
down its computations. So the copies stay only a little ahead of the hashes, until training needs
the tensors. Then the device copies the rest at once, the capture reports that everything is copied,
and it continues to hash the slot while training changes the tensors. Pieces whose bytes are all on
one device are hashed there, before they are copied, if the engine has a hasher that can.

The `CopyPlan` contains everything that can be computed beforehand. This module must not depend on
units, ranks or daemons.
"""

from __future__ import annotations

import ctypes
import logging
import math
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from holdfast._copying.bubbles import Bubbles, PieceBlock
from holdfast._copying.collector import without_collector
from holdfast._copying.cores import apart
from holdfast._copying.device_hashes import DeviceHasher, DevicePieces, HashesOnDevice
from holdfast._copying.devices import Device, DeviceMove, Download, Fence, GroupCopy, parts_of
from holdfast._copying.gathering import GAP_BYTES_MAX, GATHERED_BYTES_MAX, Gather, gather
from holdfast._copying.placed import Flags, Placed
from holdfast._copying.strided import copy_of_span
from holdfast._copying.uploading import Uploads
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import piece_count

BLOCK_PIECES = 16
"""Number of pieces that a thread takes at a time: 4 MiB, a fraction of a millisecond of work."""

GROUP_BLOCKS, GROUP_BLOCKS_MAX = 4, 64
"""Number of blocks that a device copies at a time before its rate is known, 16 MiB, and at most."""

GROUP_S = 300e-6
"""Time that a device copies at a time. In a shorter one the 5 µs that it takes to begin and signal
a group would count; in a longer one training would wait longer for copies of its own, behind those
that have begun."""

_PIN = -1
"""Work of a restore that pins the arena; its other work has the number of a block's first piece."""

_memmove = ctypes.memmove
_log = logging.getLogger("holdfast")

Digests = npt.NDArray[np.uint64]

_Range = tuple[int, torch.Tensor]
"""Pair of the first byte in the payload and a uint8 tensor within one tensor of the snapshot."""

HostMove = tuple[int, int, int]
"""Triple of the first byte in the slot, the address of the tensor's bytes and the number of bytes;
all within one piece."""


class DeviceGroups:
    """The moves of a plan from devices, in groups of several blocks.

    Args:
        moves: in the order of the slot.
    """

    def __init__(self, moves: Sequence[DeviceMove] = (), block_bytes: int = 1) -> None:
        self._moves, self._block_bytes = moves, block_bytes
        self._blocks = 0
        self._groups: tuple[tuple[DeviceMove, ...], ...] = ()

    def of(self, blocks: int) -> tuple[tuple[DeviceMove, ...], ...]:
        """Return the groups of `blocks` blocks each, and keep them until another size is asked
        for."""
        if blocks != self._blocks:
            self._groups = _by_block(self._moves, self._block_bytes * blocks)
            self._blocks = blocks
        return self._groups


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlan:
    """The ranges to copy between a slot and live tensors."""

    piece_bytes: int
    host_moves: tuple[tuple[HostMove, ...], ...]
    """Ranges of tensors in host memory, by piece."""
    device_moves: tuple[tuple[DeviceMove, ...], ...] = ()
    """Ranges of tensors on a device, by block of pieces; empty if there are none."""
    device_groups: DeviceGroups = field(default_factory=DeviceGroups, compare=False)
    """The same ranges by group of blocks."""
    staged: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """Pairs of a contiguous staging tensor and a live tensor that is not contiguous."""
    gather: Gather = field(default=Gather())
    """Small tensors on a device, which `device_moves` copies together in runs."""
    on_device: DevicePieces = field(default_factory=DevicePieces, compare=False)
    """The pieces whose bytes are all on one device."""


def _nothing() -> None:
    """Do nothing."""


def _always() -> bool:
    """Return True."""
    return True


class BadPieceError(Exception):
    """A piece does not match its checksum. The caller can name the tensors in it."""

    def __init__(self, piece: int) -> None:
        super().__init__(f"piece {piece} does not match its checksum")
        self.piece = piece


class CopyEngine:
    """Engine that copies with `threads` threads, including the calling one.

    Args:
        hasher: hashes the pieces that are on a device; None leaves all pieces to the threads.
    """

    def __init__(self, threads: int, device: Device, hasher: DeviceHasher | None = None) -> None:
        self._device, self._hasher = device, hasher
        self.hashed_on_device_bytes = 0
        """Bytes of the newest capture that were hashed on the devices that hold them."""
        self.verified_on_device_bytes = 0
        """Bytes of the newest restore that were verified on the devices that hold them."""
        self._busy = False
        """Whether the threads have work."""
        self._helpers = [_Helper(index) for index in range(threads - 1)]

    def prepare(self, piece_bytes: int) -> None:
        """Find out which devices can hash pieces of this size, so that the first capture need not
        be hashed by threads. Takes seconds where there are devices."""
        if self._hasher is not None:
            self._hasher.prepare(self._device.members(), piece_bytes)

    def begin_test(self, piece_bytes: int) -> None:
        """Begin to find that out, and return at once."""
        if self._hasher is not None:
            for device in self._device.members():
                self._hasher.trusts(device, piece_bytes)

    def settle(self) -> None:
        """Wait until no device is being tested, at most half a minute. Any thread may call it."""
        if self._hasher is not None:
            self._hasher.settle()

    @property
    def hashing(self) -> str:
        """Which devices hash their pieces, and why others do not; empty without devices."""
        return "" if self._hasher is None else self._hasher.state

    def capture(
        self,
        plan: CopyPlan,
        target: Placed,
        fence: Fence,
        skip: Flags | None = None,
        bubbles: Bubbles | None = None,
        copied: Callable[[], None] = _nothing,
        hurry: Callable[[], bool] = _always,
        *,
        hashed: bool = True,
    ) -> Digests:
        """Copy all tensors into the target, and hash the pieces that they fill. `finish` writes the
        rest.

        Args:
            fence: point in the device's queue after which the copies may begin.
            skip: pieces to leave unchanged, bool [at most the number of pieces with tensors]; no
                piece with extras may be among them. None skips no piece.
            bubbles: idle times that schedule the copies; None copies everything immediately.
            copied: called once, on the calling thread, when everything is copied, so that tensors
                may change. If it raises, the capture ends with that error.
            hurry: returns whether training needs the tensors now.
            hashed: whether the caller needs digests.

        Returns:
            uint64 [pieces with tensors]: the xxh3-64 of each piece; 0 for skipped pieces, for the
            last piece if extras begin in it, and for all without `hashed`.
        """
        if plan.staged:
            with self._device.after(fence), torch.no_grad():
                for staging, live in plan.staged:
                    here = staging.device == live.device
                    staging.copy_(live if here else copy_of_span(live, staging.device))
        hashes = None
        with torch.no_grad(), self._device.after(fence):
            plan.gather.collect()
            if self._hasher is not None and hashed:
                count = target.layout.extras_offset // plan.piece_bytes
                hashes = self._hasher.begin(plan.on_device, count, skip)
        capture = _Capture(self._device, plan, target, fence, skip, copied, hurry, hashes, hashed)
        feed = None
        if bubbles is None:
            capture.begin()
        else:
            size = plan.piece_bytes
            sizes = [PieceBlock(at, size * len(pieces)) for at, pieces in capture.blocks.items()]
            feed = bubbles.feed(sizes)
        self._run(capture.block, capture.blocks, feed, capture.look)
        capture.end()
        if hashed:
            self.hashed_on_device_bytes = 0
        if hashes is not None:
            hashes.write(capture.digests)
            self.hashed_on_device_bytes = int(hashes.on_device.sum()) * plan.piece_bytes
        return capture.digests

    def hash_rest(self, target: Placed, digests: Digests, written: Flags) -> None:
        """Put the digests of the pieces that no save of a window has filled into `digests`. They
        hold zeros afterwards: what a longer window has left there would differ from one snapshot
        to the next, and would be protected.

        Args:
            digests: uint64 [pieces in front of the extras].
            written: pieces whose digest is there already, bool [the same].
        """
        size = target.layout.piece_bytes
        zeros = bytes(size)
        empty = xxh3_64_intdigest(zeros)
        for piece in np.flatnonzero(~written).tolist():
            if xxh3_64_intdigest(target.view(piece * size, size)) != empty:
                target.write(piece * size, zeros)
            digests[piece] = empty

    def finish(self, target: Placed, extras: bytes, digests: Digests) -> bytes:
        """Write the extras behind the tensors, and hash the pieces that `capture` could not.

        Returns:
            xxh3-64 of each piece of the payload, which ends after the extras; 8 bytes
            little-endian each, 0 for those that `capture` skipped.
        """
        size, offset = target.layout.piece_bytes, target.layout.extras_offset
        end = offset + len(extras)
        target.write(offset, extras)
        whole = offset // size
        rest = [
            xxh3_64_intdigest(target.view(at, min(size, end - at)))
            for at in range(whole * size, end, size)
        ]
        return digests[:whole].tobytes() + np.array(rest, dtype="<u8").tobytes()

    def restore(self, plan: CopyPlan, source: Placed, payload_bytes: int, digests: bytes) -> None:
        """Copy the payload into the live tensors, and verify it.

        What is hashed is what was read: the tensor itself, where a piece lies within one, and
        otherwise a buffer that the tensors are filled from. So when this raises, tensors may hold
        bytes that do not match; the caller must not use any of them then. With a hasher, the device
        itself copies out of the arena and verifies what has arrived, where it can.

        The device finishes the work that is queued on the calling thread's stream before it writes
        the tensors. Otherwise kernels that initialise a model could overwrite the restored bytes.

        Args:
            source: the snapshot; it must not be written meanwhile.

        Raises:
            BadPieceError: for a piece that does not match; tensors are then partly written.
            CorruptError: a device does not hold the bytes that were copied to it.
        """
        pieces = _Pieces(plan, source, payload_bytes, digests)
        left: Sequence[int] = pieces.firsts
        has_lost = False
        self.verified_on_device_bytes = 0
        if self._hasher is not None and plan.device_moves:
            left, has_lost = self._upload(pieces, self._hasher)
        if left:
            self._restore_blocks(pieces, left)
        if has_lost:
            again = [part for first in left for part in pieces.on_device_in_block(first)]
            if differing := self.differing(again, source):
                raise CorruptError(
                    f"{again[differing[0]][1].device} holds other bytes than were copied to it, "
                    f"again; look for errors of its memory, and restore on another device"
                )
        with torch.no_grad():  # on the calling thread's stream: before what it does next
            plan.gather.distribute()

    def _restore_blocks(self, pieces: _Pieces, firsts: Sequence[int]) -> None:
        """Restore the blocks that begin with the pieces `firsts`: threads copy each of them into a
        buffer, and to the device once it is verified. Raises BadPieceError as `restore`."""
        size, device_moves = pieces.size, pieces.plan.device_moves
        buffers, fence = threading.local(), self._device.fence()

        def own_buffer() -> torch.Tensor:
            if not hasattr(buffers, "tensor"):
                buffers.tensor = self._device.buffer(BLOCK_PIECES * size)
            found: torch.Tensor = buffers.tensor
            return found

        def block(first: int) -> None:
            low, index = first * size, first // BLOCK_PIECES
            uploads = device_moves[index] if index < len(device_moves) else ()
            buffer = own_buffer() if uploads else None
            for piece in range(first, min(first + BLOCK_PIECES, pieces.count)):
                pieces.restore(
                    piece, None if buffer is None else buffer.data_ptr() + piece * size - low
                )
            if buffer is not None:
                self._device.upload(uploads, buffer, low, fence)

        self._run(block, firsts)

    def _upload(self, pieces: _Pieces, hasher: DeviceHasher) -> tuple[Sequence[int], bool]:
        """Let the device copy out of the arena by itself, and verify what it holds then. Threads
        copy and verify everything that is not the device's meanwhile, and verify the arena as long
        as the device is not trusted to.

        Returns:
            First pieces of the blocks that threads have to restore, and whether a device has lost
            bytes. Then all that the device has not verified is among these blocks, which have to be
            compared with the snapshot afterwards.

        Raises:
            BadPieceError: for a piece of the arena that does not match; tensors are then partly
                written, with the bytes of that piece as well.
        """
        plan, source, firsts = pieces.plan, pieces.source, pieces.firsts
        count, size = pieces.count, pieces.size
        if max(move.start + move.nbytes for move in chain(*plan.device_moves)) > pieces.end:
            return firsts, False
        uploads = Uploads(plan.device_moves, source, count, size * BLOCK_PIECES)
        fence, by_device = self._device.fence(), plan.on_device.by_device()
        owner = np.zeros(count, dtype=int)
        """Number of the device that can verify a piece; 0 for none."""
        for number, of_device in enumerate(by_device, 1):
            owner[of_device.pieces] = number
            hasher.trusts(of_device.device, size)  # begins its test
        verified: Flags = np.zeros(count, dtype=bool)

        def block(first: int) -> None:
            trusted = [False, *(hasher.trusts(one.device, size) for one in by_device)]
            last = min(first + BLOCK_PIECES, count)
            for piece in range(first, last):
                if trusted[owner[piece]]:
                    pieces.copy_to_host(piece)
                else:
                    pieces.restore(piece)
                    verified[piece] = True

        with self._device.uploading(source.address, fence) as upload:
            ranges = uploads.ranges()
            if not all(upload(first) for first in islice(ranges, 1)):
                return firsts, False

            def work(first: int) -> None:
                if first >= 0:
                    block(first)
                    return
                for number, of_arena in enumerate(ranges, 1):
                    if not upload(of_arena):
                        uploads.leave(number)
                        return

            # One thread pins; the others verify, and so does it afterwards.
            self._run(work, [_PIN, *firsts])
            with torch.no_grad(), self._device.after(fence):
                hashes = hasher.begin(plan.on_device, count, verified | uploads.left)
                arrival = self._device.arrival()
            rest = np.flatnonzero(~(verified | uploads.left | hashes.on_device)).tolist()
            self._run(pieces.verify, rest)
            try:
                arrival.wait()
            except Exception as error:
                hashes.fail(error)
                raise
            self.verified_on_device_bytes = int(hashes.on_device.sum()) * size
        lost = self._judge(pieces, hashes)
        left = ~hashes.on_device if lost else uploads.left.copy()
        left[lost] = True
        return [at for at in firsts if left[at : at + BLOCK_PIECES].any()], bool(lost)

    def _judge(self, pieces: _Pieces, hashes: HashesOnDevice) -> list[int]:
        """Compare the digests that devices have computed, and find out why some differ. If a device
        holds the right bytes, its kernel is wrong, and threads hash from then on.

        Returns:
            Pieces of which a device holds other bytes than the arena.

        Raises:
            BadPieceError: the bytes in the arena do not match.
        """
        found: Digests = np.zeros(pieces.count, dtype="<u8")
        hashes.write(found)
        wrong = hashes.on_device & (found != np.array(pieces.expected, dtype="<u8"))
        bad = np.flatnonzero(wrong).tolist()
        self._run(pieces.verify, bad)
        ranges = [(piece, *part) for piece in bad for part in pieces.on_device(piece)]
        parts = [(at, flat) for _, at, flat in ranges]
        lost = {ranges[index][0] for index in self.differing(parts, pieces.source)}
        for device in dict.fromkeys(flat.device for _, flat in parts):
            theirs = dict.fromkeys(piece for piece, _, flat in ranges if flat.device == device)
            if right := [piece for piece in theirs if piece not in lost]:
                error = RuntimeError(f"its digest of piece {right[0]} is not that of the bytes")
                hashes.fail(error, device)
            if count := len(lost & theirs.keys()):
                _log.warning(
                    "%s holds other bytes than were copied to it, in %d pieces; all that it has "
                    "not verified is copied again",
                    device,
                    count,
                )
        return sorted(lost)

    def differing(self, ranges: Sequence[_Range], source: Placed) -> list[int]:
        """Compare tensors with the bytes of a snapshot.

        Args:
            ranges: (first byte in the payload, uint8 tensor), each within one tensor of the
                snapshot.
            source: the snapshot; it must not be written meanwhile.

        Returns:
            Indices of the ranges that differ, in their order.
        """
        step = source.layout.piece_bytes * BLOCK_PIECES
        parts = [
            (index, at + low, flat[low : low + step])
            for index, (at, flat) in enumerate(ranges)
            for low in range(0, flat.numel(), step)
        ]
        differing: list[int] = []

        def compare(number: int) -> None:
            index, at, part = parts[number]
            held = np.frombuffer(source.view(at, part.numel()), dtype=np.uint8)
            if not np.array_equal(held, part.cpu().numpy()):
                differing.append(index)

        self.each(compare, len(parts), self._device.fence())
        return sorted(set(differing))

    def each(self, work: Callable[[int], None], count: int, fence: Fence = None) -> None:
        """Call `work` for 0 … count - 1 on all threads, after `fence` on the device; raise the
        first error of a call."""

        def after(index: int) -> None:
            with self._device.after(fence):
                work(index)

        self._run(after, range(count))

    def close(self) -> None:
        """End the threads."""
        for helper in self._helpers:
            helper.end()

    def _run(
        self,
        block: Callable[[int], None],
        firsts: Collection[int],
        feed: Callable[[], int | None] | None = None,
        look: Callable[[], None] = _nothing,
    ) -> None:
        """Call `block` for each of `firsts`, on all threads, in the order of `feed`; raise the
        first error of a call. The calling thread calls `look` after each of its own, in which it
        may call this again: it then has no other threads."""
        take = feed or _in_turn(firsts)
        failures: list[BaseException] = []

        def drain(look: Callable[[], None] = _nothing) -> None:
            try:
                while not failures and (first := take()) is not None:
                    block(first)
                    look()
            except BaseException as error:
                failures.append(error)

        helpers = self._helpers if len(firsts) > 1 and not self._busy else []
        sides, busy = len(helpers) + 1, self._busy
        finished = [helper.start(apart(drain, i, sides)) for i, helper in enumerate(helpers, 1)]
        self._busy = True
        try:
            apart(partial(drain, look), 0, sides)()
        finally:
            for event in finished:
                event.wait()
            self._busy = busy
        if failures:
            raise failures[0]


class _Pieces:
    """The pieces of a snapshot on their way to live tensors; see `CopyEngine.restore`."""

    def __init__(self, plan: CopyPlan, source: Placed, payload_bytes: int, digests: bytes) -> None:
        self.plan, self.source = plan, source
        self.size, self.end = plan.piece_bytes, payload_bytes
        self.count = piece_count(payload_bytes, self.size)
        self.firsts = range(0, self.count, BLOCK_PIECES)
        """First piece of each block."""
        self.expected: list[int] = np.frombuffer(digests, dtype="<u8").tolist()
        slot_bytes = source.layout.slot_bytes
        self._bases = [slot * slot_bytes for slot in source.slots(self.count)]
        """Bytes to add to a payload offset in each piece."""
        self._own = threading.local()

    def restore(self, piece: int, target: int | None = None) -> None:
        """Read a piece, verify what was read, and give tensors in host memory their parts of it.

        Args:
            target: address of memory that is to hold the piece; None for nowhere in particular.

        Raises:
            BadPieceError: it does not match its digest. If it lies within one tensor, the tensor
                has been overwritten.
        """
        at, moves = piece * self.size, self._host_moves(piece)
        nbytes = min(self.size, self.end - at)
        within_one = target is None and len(moves) == 1 and moves[0][2] == nbytes
        if target is None:
            target = moves[0][1] if within_one else self._buffer()
        self.source.read_into(target, at, nbytes)
        read = (ctypes.c_ubyte * nbytes).from_address(target)
        if xxh3_64_intdigest(read) != self.expected[piece]:
            raise BadPieceError(piece)
        if not within_one:
            for start, tensor, count in moves:
                _memmove(tensor, target + start - at, count)

    def copy_to_host(self, piece: int) -> None:
        """Copy the bytes of a piece that belong to tensors in host memory."""
        address = self.source.address + self._bases[piece]
        for start, target, nbytes in self._host_moves(piece):
            _memmove(target, address + start, nbytes)

    def _host_moves(self, piece: int) -> Sequence[HostMove]:
        moves = self.plan.host_moves
        return moves[piece] if piece < len(moves) else ()

    def _buffer(self) -> int:
        """Address of a buffer of this thread, as long as a piece."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = (ctypes.c_ubyte * self.size)()
        return ctypes.addressof(self._own.buffer)

    def verify(self, piece: int) -> None:
        """Raise BadPieceError unless the bytes of a piece in the arena match its digest."""
        base, at = self._bases[piece], piece * self.size
        view = self.source.arena[base + at : base + min(at + self.size, self.end)]
        if xxh3_64_intdigest(view) != self.expected[piece]:
            raise BadPieceError(piece)

    def on_device(self, piece: int) -> Iterator[_Range]:
        """Yield the ranges of a piece that belong to tensors on a device."""
        low, high = piece * self.size, (piece + 1) * self.size
        block = piece // BLOCK_PIECES
        for move in chain(*self.plan.device_moves[block : block + 1]):
            begin, end = max(move.start, low), min(move.start + move.nbytes, high)
            if begin < end:
                yield begin, move.flat[begin - move.start : end - move.start]

    def on_device_in_block(self, first: int) -> Iterator[_Range]:
        """Yield such ranges of the block with this first piece."""
        pieces = range(first, min(first + BLOCK_PIECES, self.count))
        return chain.from_iterable(self.on_device(piece) for piece in pieces)


class _Capture:
    """Tensors on their way into a slot.

    Args:
        copied: called once, when everything is copied.
        hurry: whether there is no time to lose.
        hashes: digests that devices compute, in front of the copies; None for none.
        hashed: whether threads hash the other pieces.
    """

    def __init__(
        self,
        device: Device,
        plan: CopyPlan,
        target: Placed,
        fence: Fence,
        skip: Flags | None,
        copied: Callable[[], None],
        hurry: Callable[[], bool],
        hashes: HashesOnDevice | None,
        hashed: bool,
    ) -> None:
        self._device, self._fence, self._target = device, fence, target
        self._hurry, self._hashes, self._by_threads = hurry, hashes, hashed
        self._size, self._end = plan.piece_bytes, target.layout.extras_offset
        count = piece_count(self._end, self._size)
        self.digests: Digests = np.zeros(count, dtype="<u8")
        self._on_device: Flags = np.zeros(count, dtype=bool)
        """Marks the pieces that devices hash."""
        self._hashed: GroupCopy | None = None
        """Their hashes, until which tensors may not change; None for none."""
        if hashes is not None and hashes.on_device.any():
            self._on_device[: len(hashes.on_device)] = hashes.on_device
            self._hashed = device.arrival()
        self.blocks = _blocks(count, skip)
        slots, slot_bytes = target.slots(count), target.layout.slot_bytes
        self._bases = [slot * slot_bytes for slot in slots]
        """Bytes to add to a payload offset in each piece."""
        self._host_moves, self._moves = plan.host_moves, plan.device_moves
        self._memory = target.view_of_slot
        self._as_planned = not target.places and skip is None
        """Whether the moves are those of the plan."""
        if not self._as_planned:
            self._moves, self._memory = _in_arena(self._moves, target, self.blocks), target.arena
        self._device_groups = plan.device_groups
        self._group_of: dict[int, int] = {}
        """Number of the group of each block with device moves, by the block's first piece."""
        self._download: Download | None = None
        self._from_host = _Once()
        self._copied: Callable[[], None] | None = copied

    def begin(self) -> None:
        """Begin the copies that the device makes by itself."""
        self._download = self._device.download(self._groups(), self._memory, self._fence)
        if self._download is not None and self._hurry():
            self._download.hurry()

    def _groups(self) -> Sequence[Sequence[DeviceMove]]:
        """Divide the device moves into groups, and note the group of each block."""
        at_once = blocks_at_once(self._device.bytes_s, BLOCK_PIECES * self._size)
        firsts = [at for at in self.blocks if at // BLOCK_PIECES < len(self._moves)]
        self._group_of = {first: number // at_once for number, first in enumerate(firsts)}
        if self._as_planned:
            return self._device_groups.of(at_once)
        of_groups = (firsts[i : i + at_once] for i in range(0, len(firsts), at_once))
        return [
            tuple(chain.from_iterable(self._moves[at // BLOCK_PIECES] for at in of_group))
            for of_group in of_groups
        ]

    def block(self, first: int) -> None:
        """Copy the block with this first piece, and hash it. Any thread."""
        index, download = first // BLOCK_PIECES, self._download
        if download is not None:
            # Once everything has arrived, training may record a CUDA graph: then nobody may wait.
            if first in self._group_of and self._copied is not None:
                download.wait(self._group_of[first])
            self._from_host.do(first, self._copy_from_host)
        elif index < len(self._moves) and self._moves[index]:
            self._device.fetch(self._moves[index], self._memory, self._fence)
        size = self._size
        for piece in self.blocks[first]:
            if download is None:
                self._copy_piece(piece)
            base, at = self._bases[piece], piece * size
            if self._by_threads and at + size <= self._end and not self._on_device[piece]:
                view = self._target.arena[base + at : base + at + size]
                self.digests[piece] = xxh3_64_intdigest(view)

    def look(self) -> None:
        """State that everything is copied, if the device is done. For the thread that captures."""
        download = self._download
        if self._copied is None or download is None:
            return
        if self._hurry():
            download.hurry()
        if download.is_over() and (self._hashed is None or self._of_hashes(self._hashed.is_over)):
            for first in self.blocks if self._host_moves else ():
                self._from_host.do(first, self._copy_from_host)
            self.end()

    def end(self) -> None:
        """State that everything is copied, unless it was stated."""
        copied, self._copied = self._copied, None
        if copied is not None:
            if self._hashed is not None:
                self._of_hashes(self._hashed.wait)
            copied()

    def _of_hashes(self, ask: Callable[[], object]) -> object:
        """Ask about the hashes on devices. If they have failed, threads hash from then on."""
        try:
            return ask()
        except Exception as error:
            assert self._hashes is not None
            self._hashes.fail(error)
            raise

    def _copy_from_host(self, first: int) -> None:
        """Copy the host memory of a block, after runs of the device, which overwrite it."""
        for piece in self.blocks[first]:
            self._copy_piece(piece)

    def _copy_piece(self, piece: int) -> None:
        if piece < len(self._host_moves):
            address = self._target.address + self._bases[piece]
            for start, source, nbytes in self._host_moves[piece]:
                _memmove(address + start, source, nbytes)


class _Once:
    """Work that is done once for each number, by the first thread that asks; others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._done: set[int] = set()

    def do(self, number: int, work: Callable[[int], None]) -> None:
        """Do the work of `number`, unless it is done."""
        with self._lock:
            lock = self._locks.setdefault(number, threading.Lock())
        with lock:
            if number not in self._done:
                work(number)
                self._done.add(number)


class _Helper:
    """A thread that runs one callable after another."""

    def __init__(self, index: int) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(
            target=self._loop, name=f"holdfast-copy-{index}", daemon=True
        )
        self._thread.start()

    def start(self, work: Callable[[], None]) -> threading.Event:
        finished = threading.Event()
        self._work.put((work, finished))
        return finished

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            work, finished = item
            work()
            finished.set()


def plan_copy(
    ranges: Sequence[tuple[int, int, torch.Tensor]],
    staged: Sequence[tuple[torch.Tensor, torch.Tensor]],
    piece_bytes: int,
    gathered_bytes_max: int = GATHERED_BYTES_MAX,
    gap_bytes_max: int = GAP_BYTES_MAX,
) -> CopyPlan:
    """Plan the copies of `ranges`: (first byte in the slot, first byte in the tensor, uint8
    tensor).

    Each uint8 tensor holds exactly the bytes to move, flat and contiguous; the first byte in the
    tensor is not used here. Ranges that are neighbours in the slot and in memory become one, and so
    do those of small tensors on a device, of at most `gathered_bytes_max`, with gaps of at most
    `gap_bytes_max` between them, which copies from the device overwrite.
    """
    host: list[tuple[int, int, int]] = []
    device: list[DeviceMove] = []
    for slot_start, _, flat in sorted(ranges, key=lambda item: item[0]):
        nbytes = flat.numel()
        if not nbytes:
            continue
        if flat.device.type != "cpu":
            device.append(DeviceMove(slot_start, nbytes, flat))
            continue
        address = flat.data_ptr()
        if host and host[-1][0] + host[-1][2] == slot_start and sum(host[-1][1:]) == address:
            start, first, length = host[-1]
            host[-1] = (start, first, length + nbytes)
        else:
            host.append((slot_start, address, nbytes))
    with without_collector():
        moves = _by_piece(host, piece_bytes)
        plan = CopyPlan(piece_bytes=piece_bytes, host_moves=moves, staged=tuple(staged))
        return with_device_moves(plan, device, gathered_bytes_max, gap_bytes_max)


def with_device_moves(
    plan: CopyPlan,
    moves: Sequence[DeviceMove],
    gathered_bytes_max: int,
    gap_bytes_max: int = GAP_BYTES_MAX,
) -> CopyPlan:
    """Complete `plan` with the `moves` from and to a device, which are in the order of the slot."""
    cut, gathered = gather(moves, gathered_bytes_max, gap_bytes_max)
    block_bytes = plan.piece_bytes * BLOCK_PIECES
    from_host = [bool(of_piece) for of_piece in plan.host_moves]
    return replace(
        plan,
        on_device=DevicePieces(cut, from_host, plan.piece_bytes),
        device_moves=_by_block(cut, block_bytes),
        device_groups=DeviceGroups(cut, block_bytes),
        gather=gathered,
    )


def blocks_at_once(bytes_s: float, block_bytes: int) -> int:
    """Choose the number of blocks that a device copies at a time: a power of two, so that another
    measurement of the same link does not change it.

    Args:
        bytes_s: rate of the device; 0 if it is not known yet.
    """
    if not bytes_s:
        return GROUP_BLOCKS
    blocks = min(max(GROUP_S * bytes_s / block_bytes, 1), GROUP_BLOCKS_MAX)
    return int(2 ** round(math.log2(blocks)))


def _in_turn(firsts: Iterable[int]) -> Callable[[], int | None]:
    """Make a function that returns `firsts` one after the other, to any thread that calls it."""
    todo, lock = iter(firsts), threading.Lock()

    def take() -> int | None:
        with lock:
            return next(todo, None)

    return take


def _blocks(count: int, skip: Flags | None) -> dict[int, Sequence[int]]:
    """Map the first piece of each block of `count` pieces to its pieces that are copied; blocks
    without any are left out."""
    if skip is None:
        firsts = range(0, count, BLOCK_PIECES)
        return {first: range(first, min(first + BLOCK_PIECES, count)) for first in firsts}
    copied = np.ones(count, dtype=bool)
    copied[: len(skip)] = ~skip
    pieces = np.flatnonzero(copied)
    block_of = pieces // BLOCK_PIECES
    begins = np.flatnonzero(np.diff(block_of, prepend=-1)).tolist()
    listed = pieces.tolist()
    return {
        listed[begin] // BLOCK_PIECES * BLOCK_PIECES: listed[begin:end]
        for begin, end in pairwise([*begins, len(listed)])
    }


def _in_arena(
    moves: Sequence[Sequence[DeviceMove]], target: Placed, blocks: Mapping[int, Sequence[int]]
) -> tuple[tuple[DeviceMove, ...], ...]:
    """Shift the moves of each block to the arena's offsets, and leave out their parts in skipped
    pieces."""
    pieces = (blocks.get(index * BLOCK_PIECES, ()) for index in range(len(moves)))
    return tuple(
        tuple(parts_of(of_block, target.together(of_it))) if of_it else ()
        for of_block, of_it in zip(moves, pieces, strict=True)
    )


def _by_piece(moves: Sequence[HostMove], piece_bytes: int) -> tuple[tuple[HostMove, ...], ...]:
    if not moves:
        return ()
    last = max((start + nbytes - 1) // piece_bytes for start, _, nbytes in moves)
    pieces: list[list[HostMove]] = [[] for _ in range(last + 1)]
    for start, address, nbytes in moves:
        at, end = start, start + nbytes
        while at < end:
            stop = min(end, (at // piece_bytes + 1) * piece_bytes)
            pieces[at // piece_bytes].append((at, address + at - start, stop - at))
            at = stop
    return tuple(tuple(piece) for piece in pieces)


def _by_block(moves: Sequence[DeviceMove], block_bytes: int) -> tuple[tuple[DeviceMove, ...], ...]:
    if not moves:
        return ()
    last = max((move.start + move.nbytes - 1) // block_bytes for move in moves)
    blocks: list[list[DeviceMove]] = [[] for _ in range(last + 1)]
    for move in moves:
        at, end = move.start, move.start + move.nbytes
        while at < end:
            stop = min(end, (at // block_bytes + 1) * block_bytes)
            part = move.flat[at - move.start : stop - move.start]
            blocks[at // block_bytes].append(DeviceMove(at, stop - at, part))
            at = stop
    return tuple(tuple(block) for block in blocks)
