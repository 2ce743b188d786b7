"""The floor of everything that copies within a node: a warm memcpy of the same bytes.

The destination is a shared mapping of a tmpfs file whose pages are all present, because that is
where any snapshot in shared memory must end. The source is the live state itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

Region = tuple[int, int]
"""(address, number of bytes) in this process."""


class SharedBuffer:
    """An unlinked tmpfs file of `nbytes`, mapped, every page present and written."""

    def __init__(self, nbytes: int) -> None:
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self.mapping = mmap.mmap(file.fileno(), nbytes)
        self._anchor = (ctypes.c_ubyte * nbytes).from_buffer(self.mapping)
        self.address = ctypes.addressof(self._anchor)
        self.nbytes = nbytes
        ctypes.memset(self.address, 1, nbytes)


class Memcpy:
    """Copies `regions` one after another into a warm shared buffer."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self.nbytes = sum(nbytes for _, nbytes in regions)
        self._buffer = SharedBuffer(self.nbytes)

    def __call__(self) -> float:
        """Seconds of one copy of everything."""
        at = self._buffer.address
        begin = time.perf_counter()
        for address, nbytes in self._regions:
            ctypes.memmove(at, address, nbytes)
            at += nbytes
        return time.perf_counter() - begin
