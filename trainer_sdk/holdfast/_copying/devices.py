"""Devices that hold live tensors: host memory, or a CUDA device behind a side stream.

A device copies between its tensors and a slot without ever waiting for the whole device: the copies
come after a fence that `save` left on the training stream, they run on a stream of their own, and
events signal when a block has arrived. The arena is registered as pinned memory, so that the copies
are direct (REFT §4.1).

This module only moves bytes; the plan lists which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast_core.errors import StorageError

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
        """Pin an arena's mapping. Raises StorageError when that is refused."""

    def unregister(self, address: int) -> None:
        """Unpin it, before it is unmapped."""

    def fence(self) -> Fence:
        """Make a fence behind the work queued so far. Called by the training thread."""

    def reach(self, fence: Fence) -> None:
        """Return when all work before the fence is done. Called by any thread."""

    def after(self, fence: Fence) -> AbstractContextManager[None]:
        """Run this thread's tensor operations after the fence, beside training."""

    def download(
        self, blocks: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Sequence[Callable[[], None]]:
        """Queue the copies of all blocks into the slot. Return callables that wait for a block
        each."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory to read into: uint8 [nbytes]."""

    def upload(self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int) -> None:
        """Copy from `buffer`, which holds the slot's bytes from `start` on, to the device. Returns
        when they have arrived. Called by any thread."""


class CpuDevice:
    """Stand-in for a device: all tensors are in host memory."""

    def register(self, address: int, nbytes: int) -> None:
        del address, nbytes

    def unregister(self, address: int) -> None:
        del address

    def fence(self) -> Fence:
        return None

    def reach(self, fence: Fence) -> None:
        del fence

    def after(self, fence: Fence) -> AbstractContextManager[None]:
        del fence
        return nullcontext()

    def download(
        self, blocks: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Sequence[Callable[[], None]]:
        del slot, fence
        assert not blocks
        return ()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int) -> None:
        del buffer, start
        assert not moves


_REGISTER_DEFAULT = 0
_CUDA_SUCCESS = 0


class CudaDevice:
    """CUDA device that is current in the constructing thread."""

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._index)

    def register(self, address: int, nbytes: int) -> None:
        result: Any = torch.cuda.cudart().cudaHostRegister(address, nbytes, _REGISTER_DEFAULT)
        if int(result) != _CUDA_SUCCESS:
            raise StorageError(f"CUDA cannot pin {nbytes} bytes of the arena: error {int(result)}")

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def fence(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return event

    def reach(self, fence: Fence) -> None:
        assert isinstance(fence, torch.cuda.Event)
        fence.synchronize()

    @contextmanager
    def after(self, fence: Fence) -> Iterator[None]:
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            if isinstance(fence, torch.cuda.Event):
                self._stream.wait_event(fence)
            yield

    def download(
        self, blocks: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Sequence[Callable[[], None]]:
        if not blocks:
            return ()
        waits: list[Callable[[], None]] = []
        target = torch.frombuffer(slot, dtype=torch.uint8)
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            if isinstance(fence, torch.cuda.Event):
                self._stream.wait_event(fence)
            for moves in blocks:
                for move in moves:
                    end = move.start + move.nbytes
                    target[move.start : end].copy_(move.flat, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
                waits.append(event.synchronize)
        return waits

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int) -> None:
        if not moves:
            return
        with torch.cuda.device(self._index), torch.cuda.stream(torch.cuda.Stream(self._index)):
            for move in moves:
                at = move.start - start
                move.flat.copy_(buffer[at : at + move.nbytes], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        event.synchronize()


def device_of(tensors: Sequence[torch.Tensor]) -> Device:
    """Choose the device for `tensors`: CUDA when any of them is on it."""
    return CudaDevice() if any(tensor.is_cuda for tensor in tensors) else CpuDevice()
