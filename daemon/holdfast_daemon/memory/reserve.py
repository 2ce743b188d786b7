"""Room on the tmpfs that is the daemon's own: small files, made beforehand, that become what must
be written when there is no memory left.

A file that was made has its memory, whatever others take meanwhile; room that is merely left free
would be anybody's. Decides nothing about what may use it: `ReservedFiles` does.
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
"""A spare has this part of the budget: far more than the manifest of a snapshot that fits it."""

FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""What the file system says when there is no memory left."""


class Reserve:
    """The spare files, below `directory`."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory = directory
        self._count = SPARES
        size = min(max(budget_bytes // SPARES_IN_BUDGET, SPARE_BYTES_MIN), SPARE_BYTES_MAX)
        self.spare_bytes = size - size % PAGE_BYTES

    def limit(self, room_bytes: int) -> None:
        """Make no more spares than fit there: none takes what the budget has promised."""
        self._count = min(SPARES, max(room_bytes, 0) // self.spare_bytes)

    def fill(self, files: Files) -> None:
        """Make the spares that are missing, as far as there is memory."""
        with suppress(OSError):
            files.mkdir(self._directory)
            for path in self._spares()[: self._count]:
                if not path.exists() or path.stat().st_size < self.spare_bytes:
                    files.allocate(path, 0, self.spare_bytes)

    def write(self, files: Files, path: Path, data: bytes) -> bool:
        """Let a spare become `path` with `data`; False when there is none. Raises OSError."""
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
    """`Files` that cut back what trainers took before they say that there is no memory; what must
    be written then, or all the same (`always`), is written into the reserve."""

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

    def rmdir(self, path: Path) -> None:
        self.files.rmdir(path)

    def remove_tree(self, path: Path) -> None:
        self.files.remove_tree(path)

    def truncate(self, path: Path, nbytes: int) -> None:
        self.files.truncate(path, nbytes)

    def overwrite(self, path: Path, data: bytes) -> None:
        self.files.overwrite(path, data)
