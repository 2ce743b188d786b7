"""A reserve of memory on the tmpfs for the daemon alone: small spare files, made beforehand, each
of which can become a file that must be written when no memory is left.

An existing file keeps its memory, whatever other processes take meanwhile; any of them could take
space that is merely free. `ReservedFiles` decides which writes may use the reserve.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast_daemon.memory.files import PAGE_BYTES, Files
from holdfast_daemon.memory.grants import Grants

SPARES = 8
SPARE_BYTES_MIN = 64 << 10
SPARE_BYTES_MAX = 8 << 20
SPARES_IN_BUDGET = 2048
"""Spares in a budget: one spare is far larger than the manifest of any snapshot that fits the
budget."""

FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""Errors of the file system when there is no memory left."""


class Reserve:
    """The spare files, below `directory`."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory = directory
        self._count = SPARES
        size = min(max(budget_bytes // SPARES_IN_BUDGET, SPARE_BYTES_MIN), SPARE_BYTES_MAX)
        self.spare_bytes = size - size % PAGE_BYTES

    def limit(self, room_bytes: int) -> None:
        """Make no more spares than fit into `room_bytes`, so that they take nothing from the
        budget."""
        self._count = min(SPARES, max(room_bytes, 0) // self.spare_bytes)

    def fill(self, files: Files) -> None:
        """Make the missing spares, as far as there is memory."""
        with suppress(OSError):
            files.mkdir(self._directory)
            for path in self._spares()[: self._count]:
                if not path.exists() or path.stat().st_size < self.spare_bytes:
                    files.allocate(path, 0, self.spare_bytes)

    def write(self, files: Files, path: Path, data: bytes) -> bool:
        """Turn a spare into `path` with `data`; False when there is none. Raises OSError."""
        for spare in self._spares():
            if spare.exists() and len(data) <= spare.stat().st_size:
                files.overwrite(spare, data)
                files.truncate(spare, len(data))
                files.rename(spare, path)
                return True
        return False

    def _spares(self) -> list[Path]:
        return [self._directory / f"spare-{index}" for index in range(SPARES)]


@dataclass(frozen=True, slots=True)
class ReservedFiles:
    """`Files` that, when memory is full, take back memory beyond trainers' arenas and try again. A
    write that still fails goes into the reserve if anything was taken back, or, with `always`, in
    any case."""

    files: Files
    grants: Grants
    reserve: Reserve
    always: bool = False

    def write(self, path: Path, data: bytes) -> None:
        try:
            self.files.write(path, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            was_taken = self.grants.cut_back() > 0
            if was_taken:
                with suppress(OSError):
                    self.files.write(path, data)
                    self.reserve.fill(self.files)
                    return
            if not (was_taken or self.always) or not self.reserve.write(self.files, path, data):
                raise

    def allocate(self, path: Path, start: int, nbytes: int) -> None:
        try:
            self.files.allocate(path, start, nbytes)
        except OSError as error:
            if error.errno not in FULL or not self.grants.cut_back():
                raise
            self.files.allocate(path, start, nbytes)

    def mkdir(self, path: Path) -> None:
        self.files.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        self.files.rename(source, target)

    def unlink(self, path: Path) -> None:
        self.files.unlink(path)

    def remove_tree(self, path: Path) -> None:
        self.files.remove_tree(path)

    def truncate(self, path: Path, nbytes: int) -> None:
        self.files.truncate(path, nbytes)

    def overwrite(self, path: Path, data: bytes) -> None:
        self.files.overwrite(path, data)
