"""A device, and a kernel for `DeviceHasher`, where no device is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from xxhash import xxh3_64_intdigest

from holdfast._copying.device_hashes import STRIPE_BYTES, SegmentTable
from holdfast._copying.devices import CpuDevice, DeviceMove, Fence, Uploader, UploadRange

HERE = torch.device("cpu")


class HostDevice(CpuDevice):
    """Plays a device on host memory, which copies and hashes at once."""

    def members(self) -> Sequence[torch.device]:
        return [HERE]

    def fetch(self, moves: Sequence[DeviceMove], slot: memoryview, fence: Fence) -> None:
        target = torch.frombuffer(slot, dtype=torch.uint8)
        for move in moves:
            target[move.start : move.start + move.nbytes] = move.flat

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        for move in moves:
            move.flat.copy_(buffer[move.start - start : move.start - start + move.nbytes])

    @contextmanager
    def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
        del fence
        yield partial(copy_at_once, address)


def copy_at_once(address: int, of_arena: UploadRange) -> bool:
    """Make the copies out of a range of an arena at `address`."""
    end = of_arena.start + of_arena.nbytes
    for move in of_arena.moves:
        assert of_arena.start <= move.start <= move.start + move.nbytes <= end
        ctypes.memmove(move.flat.data_ptr(), address + move.start, move.nbytes)
    return True


class HostKernel:
    """Reads the bytes that a table names in host memory, and hashes them with the library."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        del device
        self._piece_bytes = piece_bytes

    def __call__(self, table: SegmentTable, rows: torch.Tensor) -> torch.Tensor:
        digests = [self._digest(table, row) for row in rows.tolist()]
        return torch.tensor(digests, dtype=torch.int64)

    def _digest(self, table: SegmentTable, row: int) -> int:
        first, end = table.firsts[row : row + 2].tolist()
        begins = [STRIPE_BYTES * stripe for stripe in table.begins[first:end].tolist()]
        ends = [*begins[1:], self._piece_bytes]
        bases = table.bases[first:end].tolist()
        content = b"".join(
            ctypes.string_at(base + begin, stop - begin)
            for base, begin, stop in zip(bases, begins, ends, strict=True)
        )
        digest = xxh3_64_intdigest(content)
        return digest - (1 << 64) if digest >> 63 else digest
