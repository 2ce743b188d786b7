"""Devices that hold live tensors: host memory, or CUDA devices behind side streams.

A device copies between its tensors and a slot without ever waiting for the whole device: the copies
come after a fence on the training stream, they run on a stream of their own, and events signal when
a block has arrived. Where the arena is pinned the copies go straight into it, otherwise through a
buffer of the copying thread.

Threads and streams know nothing of each other: a new thread's current device is the first one, and
its current stream the default one, which the side streams do not wait for. So every operation on a
tensor of a device is queued within `after`.

This module only moves bytes; the plan lists which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from holdfast._copying.pinning import Buffers, Pinning
from holdfast_core.errors import InvalidJobError

Fence = object
"""Point in the training stream that copies must come after; only the device that made it can read
it."""


@dataclass(frozen=True, slots=True)
class DeviceMove:
    """Bytes of a tensor on a device, and their range in the slot."""

    start: int
    nbytes: int
    flat: torch.Tensor
    """Bytes of the tensor: uint8 [nbytes], on the device."""


class Device(Protocol):
    """Device that copies between a slot and tensors that are not in host memory."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin an arena's mapping, so that copies into it are direct, where that is possible."""

    def unregister(self) -> None:
        """Unpin it, before it is unmapped. Returns when no copy into it is under way."""

    def fence(self) -> Fence:
        """Make a fence behind the work queued so far on the current streams. Called by the training
        thread."""

    def after(self, fence: Fence) -> AbstractContextManager[None]:
        """Run this thread's tensor operations after the fence, beside training."""

    def download(
        self, blocks: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Sequence[Callable[[], None]]:
        """Begin to copy all blocks into the slot. Return callables that end the copy of a block
        each; each is called once, by any thread.

        Raises:
            InvalidJobError: when a tensor is on a device that had none when the session began.
        """

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory to read into: uint8 [nbytes]."""

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        """Copy from `buffer`, which holds the slot's bytes from `start` on, to the device, after
        the fence. Returns when they have arrived. Called by any thread."""


class CpuDevice:
    """Stand-in for a device: all tensors are in host memory."""

    def register(self, address: int, nbytes: int) -> None:
        del address, nbytes

    def unregister(self) -> None:
        pass

    def fence(self) -> Fence:
        return None

    def after(self, fence: Fence) -> AbstractContextManager[None]:
        del fence
        return nullcontext()

    def download(
        self, blocks: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Sequence[Callable[[], None]]:
        del slot, fence
        for move in (move for moves in blocks for move in moves):
            raise _moved(move.flat.device)
        return ()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        del buffer, start, fence
        for move in moves:
            raise _moved(move.flat.device)


class CudaDevice:
    """CUDA devices of a process: usually one.

    Args:
        indices: numbers of the devices, at least one.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._streams = {index: torch.cuda.Stream(index) for index in indices}
        self._first = indices[0]
        self._pinning = Pinning(torch.cuda.cudart(), self._consume_error)
        self._own = threading.local()
        """The buffer of each copying thread."""
        self._buffers = Buffers()

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._first):  # otherwise the first device gets a context, too
            self._pinning.pin(address, nbytes)

    def unregister(self) -> None:
        with suppress(RuntimeError):  # of work before: then nothing is under way any more
            for stream in self._streams.values():
                stream.synchronize()
        with torch.cuda.device(self._first):
            self._pinning.release()

    def _consume_error(self) -> None:
        """Launch a kernel: torch reads CUDA's last error after each launch, which clears it."""
        with suppress(RuntimeError):
            torch.ones(1, device=torch.device("cuda", self._first))

    def fence(self) -> Fence:
        return {index: _mark(torch.cuda.current_stream(index)) for index in self._streams}

    @contextmanager
    def after(self, fence: Fence) -> Iterator[None]:
        with ExitStack() as entered:
            for index, stream in self._streams.items():
                entered.enter_context(torch.cuda.device(index))
                entered.enter_context(torch.cuda.stream(stream))
                if isinstance(fence, dict):
                    stream.wait_event(fence[index])
            yield

    def download(
        self, blocks: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Sequence[Callable[[], None]]:
        if not blocks:
            return ()
        streams = [self._streams_of(moves) for moves in blocks]
        target = torch.frombuffer(slot, dtype=torch.uint8)
        if not self._pinning.address:
            return [partial(self._fetch, moves, target, fence) for moves in blocks]
        waits: list[Callable[[], None]] = []
        with self.after(fence):
            for moves, used in zip(blocks, streams, strict=True):
                for move in moves:
                    end = move.start + move.nbytes
                    target[move.start : end].copy_(move.flat, non_blocking=True)
                waits.append(_arrival(used))
        return waits

    def _fetch(self, moves: Sequence[DeviceMove], target: torch.Tensor, fence: Fence) -> None:
        """Copy a block through this thread's buffer."""
        sizes = [move.nbytes for move in moves]
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = self._own.buffer = self.buffer(sum(sizes))
        parts = buffer[: sum(sizes)].split(sizes)
        with self.after(fence):
            for part, move in zip(parts, moves, strict=True):
                part.copy_(move.flat, non_blocking=True)
            wait = _arrival(self._streams_of(moves))
        wait()
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
            wait = _arrival(streams)
        wait()

    def _streams_of(self, moves: Sequence[DeviceMove]) -> list[torch.cuda.Stream]:
        """Streams on which the copies of `moves` run."""
        indices = {move.flat.get_device() for move in moves}
        if indices.issubset(self._streams):
            return [self._streams[index] for index in indices]
        raise _moved(next(m.flat for m in moves if m.flat.get_device() not in self._streams).device)


def _arrival(streams: Sequence[torch.cuda.Stream]) -> Callable[[], None]:
    """Mark the end of what is queued on `streams`; return a callable that waits for it."""
    events = [_mark(stream) for stream in streams]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Event behind the work of a stream; a thread that waits for it leaves its core to others."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _moved(device: torch.device) -> InvalidJobError:
    return InvalidJobError(
        f"a tensor is on {device}, where no parameter was when the session began; call "
        f"holdfast.init after the model has moved to its devices"
    )


def device_of(tensors: Iterable[torch.Tensor]) -> Device:
    """Choose the device for `tensors`: CUDA when any of them is on it."""
    indices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    return CudaDevice(indices) if indices else CpuDevice()
