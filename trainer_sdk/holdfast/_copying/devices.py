"""Devices that hold live tensors: host memory, or CUDA devices behind side streams.

A device copies between its tensors and a slot without ever waiting for the whole device: the copies
come after a fence on the training stream, they run on a stream of their own, and events signal when
a group of them has arrived. Where the arena is pinned the copies go straight into it, otherwise
through a buffer of the copying thread.

Threads and streams know nothing of each other: a new thread's current device is the first one, and
its current stream the default one, which the side streams do not wait for. So every operation on a
tensor of a device is queued within `after`.

This module only moves bytes; the plan lists which.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from holdfast._copying.pinning import READ_ONLY_FLAGS, Buffers, PinnedMapping
from holdfast_core.errors import InvalidJobError

GROUPS_AHEAD = 2
"""Number of groups that a device copies ahead of the threads that hash, unless training waits."""

TIMED_GROUPS = 4
"""Number of groups whose copies are timed in each download of more groups: the rate of a link does
not change, and timing takes microseconds."""

Fence = object
"""A point in the training stream after which copies may begin. Only the device that made it can
interpret it."""


@dataclass(frozen=True, slots=True)
class DeviceMove:
    """A tensor on a device, and the range of its bytes in the slot."""

    start: int
    nbytes: int
    flat: torch.Tensor
    """Bytes of the tensor: uint8 [nbytes], on the device."""


def parts_of(
    moves: Iterable[DeviceMove], ranges: Sequence[tuple[int, int, int]]
) -> Iterator[DeviceMove]:
    """Yield the parts of `moves` that are in `ranges`, shifted.

    Args:
        ranges: (first byte, end, number to add) of each, ascending, apart from each other.
    """
    for move in moves:
        for low, high, shift in ranges:
            begin, end = max(move.start, low), min(move.start + move.nbytes, high)
            if begin < end:
                whole = end - begin == move.nbytes
                flat = move.flat if whole else move.flat[begin - move.start : end - move.start]
                yield DeviceMove(begin + shift, end - begin, flat)


@dataclass(frozen=True, slots=True)
class UploadRange:
    """A range of a mapped arena that is pinned as a whole, and the copies out of it."""

    start: int
    """First byte in the arena, at the begin of a page."""
    nbytes: int
    moves: Sequence[DeviceMove]
    """Their `start` is the first byte in the arena, too."""


Uploader = Callable[[UploadRange], bool]
"""A function that pins a range and queues its copies. It returns whether the range is pinned; if
not, nothing is copied."""


class GroupCopy(Protocol):
    """Work of a device that has begun, such as the copies of a group."""

    def wait(self) -> None: ...

    def is_over(self) -> bool: ...


class Download(Protocol):
    """Copies into a slot that a device makes by itself, a little ahead of the waiting threads."""

    def wait(self, group: int) -> None:
        """Wait until the bytes of a group are in the slot. Any thread may call it, repeatedly."""

    def hurry(self) -> None:
        """Begin all remaining copies. Any thread may call it, repeatedly."""

    def is_over(self) -> bool:
        """Whether the bytes of all groups are in the slot. Only one thread calls it."""


class Device(Protocol):
    """A device that copies between a slot and tensors outside of host memory."""

    @property
    def bytes_s(self) -> float:
        """The rate at which the device has copied its fastest group into a slot, in bytes per
        second; 0 before the first."""

    def members(self) -> Sequence[torch.device]:
        """Return the devices with tensors outside of host memory."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin an arena's mapping if possible, so that copies into it are direct."""

    def unregister(self) -> None:
        """Unpin the mapping. Called before it is unmapped. Returns when no copy into it is in
        progress."""

    def fence(self) -> Fence:
        """Make a fence behind the work that is queued on the current streams. The training thread
        calls it."""

    def has_passed(self, fence: Fence) -> bool:
        """Whether the device has done all work that was queued before the fence."""

    def after(self, fence: Fence) -> AbstractContextManager[None]:
        """Run this thread's tensor operations after the fence, concurrently with training."""

    def arrival(self) -> GroupCopy:
        """Mark the end of all work that was queued within `after`. Any thread may call it."""

    def download(
        self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Download | None:
        """Make a download of all groups into the slot. Return None if the slot is not pinned.

        Raises:
            InvalidJobError: a tensor is on a device that had no tensors when the session began.
        """

    def fetch(self, moves: Sequence[DeviceMove], slot: memoryview, fence: Fence) -> None:
        """Copy into the slot after the fence, whether it is pinned or not. Returns when the bytes
        have arrived. Any thread may call it. Raises as `download`."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory for `upload`: uint8 [nbytes]."""

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        """Copy to the device, after the fence. `buffer` has the bytes of the slot from `start` on.
        Returns when the bytes have arrived. Any thread may call it."""

    def uploading(self, address: int, fence: Fence) -> AbstractContextManager[Uploader]:
        """Copy to the device, after the fence, straight out of a mapping at `address` that this
        process may only read. Any thread may call the uploader, which raises as `download`. At the
        end of the context all copies have arrived, and nothing is pinned any more."""


class PacedDownload:
    """A download that begins its copies when they are needed.

    A device that copies everything at once slows down what it computes meanwhile.

    Args:
        groups: number of groups, at least 1.
        begin: begins to copy a group; called once for each, in order.
    """

    def __init__(self, groups: int, begin: Callable[[int], GroupCopy]) -> None:
        self._groups, self._begin = groups, begin
        self._begun: list[GroupCopy] = []
        self._arrived = 0
        """Number of groups known to have arrived."""
        self._lock = threading.Lock()

    def wait(self, group: int) -> None:
        self._begin_until(group + 1 + GROUPS_AHEAD)
        self._begun[group].wait()

    def hurry(self) -> None:
        self._begin_until(self._groups)

    def is_over(self) -> bool:
        while self._arrived < len(self._begun) and self._begun[self._arrived].is_over():
            self._arrived += 1
        return self._arrived == self._groups

    def _begin_until(self, end: int) -> None:
        end = min(end, self._groups)
        while len(self._begun) < end:
            with self._lock:  # Only for one group: other threads wait for groups that have begun.
                if len(self._begun) < end:
                    self._begun.append(self._begin(len(self._begun)))


class _Done:
    """Work that was done at once."""

    def wait(self) -> None: ...

    def is_over(self) -> bool:
        return True


class CpuDevice:
    """The device of a process whose tensors are all in host memory."""

    bytes_s = 0.0

    def members(self) -> Sequence[torch.device]:
        return ()

    def register(self, address: int, nbytes: int) -> None:
        del address, nbytes

    def unregister(self) -> None:
        pass

    def fence(self) -> Fence:
        return None

    def has_passed(self, fence: Fence) -> bool:
        del fence
        return True

    def after(self, fence: Fence) -> AbstractContextManager[None]:
        del fence
        return nullcontext()

    def arrival(self) -> GroupCopy:
        return _Done()

    def download(
        self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Download | None:
        del groups, slot, fence
        return None

    def fetch(self, moves: Sequence[DeviceMove], slot: memoryview, fence: Fence) -> None:
        del slot, fence
        for move in moves:
            raise _moved_device_error(move.flat.device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        del buffer, start, fence
        for move in moves:
            raise _moved_device_error(move.flat.device)

    def uploading(self, address: int, fence: Fence) -> AbstractContextManager[Uploader]:
        del address, fence
        return nullcontext(lambda of_arena: False)


class CudaDevice:
    """The CUDA devices of a process, usually one.

    Args:
        indices: numbers of the devices, at least one.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._streams = {index: torch.cuda.Stream(index) for index in indices}
        self._first = indices[0]
        self.bytes_s = 0.0
        self._pinning = PinnedMapping(torch.cuda.cudart(), self._consume_error)
        self._own = threading.local()
        """The buffer of each copying thread."""
        self._buffers = Buffers()

    def members(self) -> Sequence[torch.device]:
        return [torch.device("cuda", index) for index in self._streams]

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._first):  # Otherwise device 0 would get a context as well.
            self._pinning.pin(address, nbytes)

    def unregister(self) -> None:
        with suppress(RuntimeError):  # Earlier work has failed: then nothing is in progress.
            for stream in self._streams.values():
                stream.synchronize()
        with torch.cuda.device(self._first):
            self._pinning.release()

    def _consume_error(self) -> None:
        """Launch a kernel. After each launch torch reads CUDA's last error, which clears it."""
        with suppress(RuntimeError):
            torch.ones(1, device=torch.device("cuda", self._first))

    def fence(self) -> Fence:
        return {index: _mark(torch.cuda.current_stream(index)) for index in self._streams}

    def has_passed(self, fence: Fence) -> bool:
        return not isinstance(fence, dict) or all(event.query() for event in fence.values())

    @contextmanager
    def after(self, fence: Fence) -> Iterator[None]:
        with ExitStack() as entered:
            for index, stream in self._streams.items():
                entered.enter_context(torch.cuda.device(index))
                entered.enter_context(torch.cuda.stream(stream))
                if isinstance(fence, dict):
                    stream.wait_event(fence[index])
            yield

    def arrival(self) -> GroupCopy:
        return _Arrival([*self._streams.values()])

    def download(
        self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Download | None:
        if not (groups and self._pinning.address):
            return None
        streams = [self._streams_of(moves) for moves in groups]
        target = torch.frombuffer(slot, dtype=torch.uint8)

        def begin(group: int) -> GroupCopy:
            moves, on = groups[group], streams[group]
            timed = group < TIMED_GROUPS < len(groups) and len(on) == 1
            with self.after(fence):
                begun = _mark(on[0], timed=True) if timed else None
                for move in moves:
                    end = move.start + move.nbytes
                    target[move.start : end].copy_(move.flat, non_blocking=True)
                if begun is None:
                    return _Arrival(on)
                nbytes = sum(move.nbytes for move in moves)
                return _TimedArrival(on[0], begun, partial(self._note_rate, nbytes))

        return PacedDownload(len(groups), begin)

    def _note_rate(self, nbytes: int, seconds: float) -> None:
        # The fastest group had the link for itself.
        if seconds > 0:
            self.bytes_s = max(self.bytes_s, nbytes / seconds)

    def fetch(self, moves: Sequence[DeviceMove], slot: memoryview, fence: Fence) -> None:
        download = self.download([moves], slot, fence) if moves else None
        if download is not None:
            download.wait(0)
        elif moves:
            self._fetch(moves, torch.frombuffer(slot, dtype=torch.uint8), fence)

    def _fetch(self, moves: Sequence[DeviceMove], target: torch.Tensor, fence: Fence) -> None:
        """Copy through this thread's buffer."""
        streams, sizes = self._streams_of(moves), [move.nbytes for move in moves]
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = self._own.buffer = self.buffer(sum(sizes))
        parts = buffer[: sum(sizes)].split(sizes)
        with self.after(fence):
            for part, move in zip(parts, moves, strict=True):
                part.copy_(move.flat, non_blocking=True)
            arrival = _Arrival(streams)
        arrival.wait()
        for part, move in zip(parts, moves, strict=True):
            target[move.start : move.start + move.nbytes] = part

    def buffer(self, nbytes: int) -> torch.Tensor:
        return self._buffers.allocate(nbytes)

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        streams = self._streams_of(moves)
        with self.after(fence):
            for move in moves:
                at = move.start - start
                move.flat.copy_(buffer[at : at + move.nbytes], non_blocking=True)
            arrival = _Arrival(streams)
        arrival.wait()

    @contextmanager
    def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
        pinned: list[PinnedMapping] = []

        def upload(of_arena: UploadRange) -> bool:
            self._streams_of(of_arena.moves)
            low, nbytes = address + of_arena.start, of_arena.nbytes
            mapping = PinnedMapping(torch.cuda.cudart(), self._consume_error, READ_ONLY_FLAGS)
            with torch.cuda.device(self._first):
                mapping.pin(low, nbytes)
            if not mapping.address:
                return False
            pinned.append(mapping)
            memory = (ctypes.c_ubyte * nbytes).from_address(low)
            source = torch.frombuffer(memory, dtype=torch.uint8)
            with self.after(fence):
                for move in of_arena.moves:
                    at = move.start - of_arena.start
                    move.flat.copy_(source[at : at + move.nbytes], non_blocking=True)
            return True

        try:
            yield upload
        finally:
            with suppress(RuntimeError):  # Earlier work has failed: then nothing is in progress.
                self.arrival().wait()
            with torch.cuda.device(self._first):
                for mapping in pinned:
                    mapping.release()

    def _streams_of(self, moves: Sequence[DeviceMove]) -> list[torch.cuda.Stream]:
        """Return the streams on which the copies of `moves` run."""
        indices = {move.flat.get_device() for move in moves}
        if indices.issubset(self._streams):
            return [self._streams[index] for index in indices]
        raise _moved_device_error(
            next(m.flat for m in moves if m.flat.get_device() not in self._streams).device
        )


class _Arrival:
    """The end of the work that is queued on `streams`."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._events = [_mark(stream) for stream in streams]

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def is_over(self) -> bool:
        return all(event.query() for event in self._events)


class _TimedArrival(_Arrival):
    """The end of the copies on a stream behind `begun`, which also notes their seconds."""

    def __init__(
        self, stream: torch.cuda.Stream, begun: torch.cuda.Event, note: Callable[[float], None]
    ) -> None:
        self._begun, self._note = begun, note
        self._events = [_mark(stream, timed=True)]

    def wait(self) -> None:
        super().wait()
        with suppress(RuntimeError):  # The bytes have arrived, whatever becomes of their time.
            self._note(1e-3 * self._begun.elapsed_time(self._events[0]))


def _mark(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """Record an event behind the work of a stream. A thread that waits for it yields its core."""
    event = torch.cuda.Event(enable_timing=timed, blocking=True)
    event.record(stream)
    return event


def _moved_device_error(device: torch.device) -> InvalidJobError:
    return InvalidJobError(
        f"a tensor is on {device}, where no parameter was when the session began; call "
        f"holdfast.init after the model has moved to its devices"
    )


def device_of(tensors: Iterable[torch.Tensor]) -> Device:
    """Choose the device for `tensors`: CUDA if any of them is there."""
    indices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    return CudaDevice(indices) if indices else CpuDevice()
