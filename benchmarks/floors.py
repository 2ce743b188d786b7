"""The floor of everything that copies within a node: a warm memcpy of the same bytes.

The destination is a shared mapping of a tmpfs file whose pages are all present, because that is
where any snapshot in shared memory must end. The source is the live state itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path(os.environ.get("HOLDFAST_SHARED_MEMORY", "/dev/shm"))
"""A folder on a tmpfs."""

READ_BYTES = 4 << 20

Region = tuple[int, int]
"""(address, number of bytes) in this process."""


class SharedBuffer:
    """An unlinked tmpfs file of `nbytes`, mapped, every page present and written."""

    def __init__(self, nbytes: int) -> None:
        self._file = tempfile.TemporaryFile(dir=SHARED_MEMORY)  # noqa: SIM115  # lives as long
        self.descriptor = self._file.fileno()
        os.posix_fallocate(self.descriptor, 0, nbytes)
        self.mapping = mmap.mmap(self.descriptor, nbytes)
        self._anchor = (ctypes.c_ubyte * nbytes).from_buffer(self.mapping)
        self.address = ctypes.addressof(self._anchor)
        self.nbytes = nbytes
        ctypes.memset(self.address, 1, nbytes)


class Memcpy:
    """Copy of `regions`, one after another, into a warm shared buffer."""

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

    def read_back(self, threads: int = 2) -> float:
        """Seconds to read the buffer's file back into the regions with `pread`, unverified: the
        floor of a process that starts with nothing mapped. Mapping the file costs as much, because
        the kernel works page by page of 4 KiB either way."""
        todo = iter(self._pieces())
        lock = threading.Lock()

        def drain() -> None:
            while True:
                with lock:
                    piece = next(todo, None)
                if piece is None:
                    return
                offset, view = piece
                os.preadv(self._buffer.descriptor, [view], offset)

        begin = time.perf_counter()
        helpers = [threading.Thread(target=drain) for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        drain()
        for helper in helpers:
            helper.join()
        return time.perf_counter() - begin

    def _pieces(self) -> list[tuple[int, memoryview]]:
        """(offset in the file, destination) of blocks of 4 MiB."""
        pieces, at = [], 0
        for address, nbytes in self._regions:
            view = memoryview((ctypes.c_ubyte * nbytes).from_address(address))
            for start in range(0, nbytes, READ_BYTES):
                pieces.append((at + start, view[start : start + READ_BYTES]))
            at += nbytes
        return pieces
