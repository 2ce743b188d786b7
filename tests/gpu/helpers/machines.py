"""Kinds of device on which every test here runs: CUDA and, so that the tests' own logic is tried
everywhere, host memory.

Work on CUDA is queued, and done later. On host memory `LateDevice` plays that: a test queues work
with `later`, which is done when something waits for it, and not before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from host_kernel import HostKernel, copy_at_once

from holdfast._copying.device_hashes import DeviceHasher, hasher_of_process
from holdfast._copying.devices import (
    CpuDevice,
    Device,
    DeviceMove,
    Download,
    Fence,
    Uploader,
    device_of,
)
from holdfast._copying.engine import CopyPlan, plan_copy, with_device_moves
from holdfast._copying.placed import Placed
from holdfast_core.snapshots.layouts import PIECE_BYTES, Layout

_SLEEP_CYCLES = 1_000_000_000
"""Half a second on an H200: longer than all that a test does meanwhile."""

Part = tuple[int, int, torch.Tensor]
"""Triple (first byte in the slot, 0, uint8 tensor), as `plan_copy` takes it."""


class _Arriving:
    """Copies that are made when the first of their groups is waited for."""

    def __init__(
        self,
        device: LateDevice,
        groups: Sequence[Sequence[DeviceMove]],
        slot: memoryview,
        fence: Fence,
    ) -> None:
        self._device, self._fence = device, fence
        self._groups, self._slot = groups, slot
        self._over, self._lock = False, threading.Lock()

    def wait(self, group: int) -> None:
        del group
        self._device.reach(self._fence)
        target = torch.frombuffer(self._slot, dtype=torch.uint8)
        with self._lock:
            for move in () if self._over else chain(*self._groups):
                target[move.start : move.start + move.nbytes] = move.flat
            self._over = True

    def hurry(self) -> None: ...

    def is_over(self) -> bool:
        return self._over


class LateDevice(CpuDevice):
    """A device in host memory whose work is done only when something waits for it."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []
        self._done = 0
        self._reaching = threading.Lock()  # threads of the engine wait until the work is done

    def members(self) -> Sequence[torch.device]:
        return [torch.device("cpu")]

    def later(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def reach(self, fence: Fence) -> None:
        """Do the work before the fence."""
        assert fence is None or isinstance(fence, int)
        with self._reaching:
            while self._done < (fence or 0):
                self._queue[self._done]()
                self._done += 1

    def fence(self) -> Fence:
        return len(self._queue)

    def after(self, fence: Fence) -> AbstractContextManager[None]:
        self.reach(fence)
        return nullcontext()

    def download(
        self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Download:
        return _Arriving(self, groups, slot, fence)

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        self.reach(fence)
        for move in moves:
            move.flat.copy_(buffer[move.start - start : move.start - start + move.nbytes])

    @contextmanager
    def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
        self.reach(fence)
        yield partial(copy_at_once, address)


@dataclass(frozen=True)
class Machine:
    """One kind of device."""

    kind: str
    late: LateDevice = field(default_factory=LateDevice)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def backend(self) -> str:
        """Backend of `torch.distributed` for its tensors."""
        return "nccl" if self.is_cuda else "gloo"

    @property
    def small(self) -> int:
        """Number of small tensors that a large model has."""
        return 20_000 if self.is_cuda else 2_000

    @property
    def large_bytes(self) -> int:
        """Size of a large tensor."""
        return 4 << 30 if self.is_cuda else 64 << 20

    def copier(self) -> Device:
        """The device for an engine: CUDA's, or one that plays it."""
        return device_of([torch.empty(0, device=self.kind)]) if self.is_cuda else self.late

    def hasher(self) -> DeviceHasher:
        """The hasher for an engine: that of the process, or one that needs no device."""
        return hasher_of_process() if self.is_cuda else DeviceHasher(HostKernel)

    def plan(
        self, parts: Sequence[Part], staged: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    ) -> CopyPlan:
        """Plan the copies of `parts`, all of them on the device."""
        if self.is_cuda:
            return plan_copy(parts, staged, PIECE_BYTES)
        moves = [DeviceMove(start, flat.numel(), flat) for start, _, flat in parts]
        return with_device_moves(plan_copy((), staged, PIECE_BYTES), moves, 0)

    def later(self, work: Callable[[], object]) -> None:
        """Queue `work` on the current stream, behind work that takes half a second."""
        if self.is_cuda:
            torch.cuda._sleep(_SLEEP_CYCLES)
            work()
        else:
            self.late.later(work)

    def finish(self) -> None:
        """Return when all queued work is done."""
        if self.is_cuda:
            torch.cuda.synchronize()
        else:
            self.late.reach(self.late.fence())

    def beside(self) -> AbstractContextManager[object]:
        """Make another stream than the usual one the current one."""
        return torch.cuda.stream(torch.cuda.Stream()) if self.is_cuda else nullcontext()


def random_bytes(machine: Machine, nbytes: int, seed: int = 1) -> torch.Tensor:
    """uint8 [nbytes] on the device."""
    generator = torch.Generator(machine.kind).manual_seed(seed)
    return torch.randint(
        256, (nbytes,), dtype=torch.uint8, device=machine.kind, generator=generator
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes in the order of its elements, in host memory."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().clone()


def room_for(payload_bytes: int, extras_bytes: int = 0, slot: int = 1) -> Placed:
    """A slot in memory of this process for a payload without places; untouched pages cost
    nothing."""
    layout = Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=payload_bytes,
        extras_capacity=extras_bytes + 1,
    )
    raw = (ctypes.c_ubyte * layout.arena_bytes(3))()
    arena = memoryview(raw).cast("B")
    return Placed(arena=arena, address=ctypes.addressof(raw), layout=layout, slot=slot)


def slot_range(placed: Placed) -> tuple[int, int]:
    """(address, bytes) of the slot, in whole pages."""
    page = 4096
    first = placed.address + placed.slot * placed.layout.slot_bytes
    low = first - first % page
    return low, -(-(first + placed.layout.slot_bytes - low) // page) * page
