"""Limits the size of each file that a trainer has a descriptor of, and cuts back larger ones.

A trainer can extend its arena's file, even without changing its size, and so take the memory of all
jobs of the node. A descriptor cannot be taken away from a process, so files are checked and cut. An
arena that is removed while a process has it open is kept under another name, cut to nothing, until
no process has it open: the memory of a file without a name could not be taken back. Thread-safe.
"""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast_daemon.memory.files import Files, is_open

LEFT_MAX = 64
"""Maximum number of removed arenas that one job's processes still have open; a job that reaches it
gets no new arena."""

HUGE_PAGE_BYTES = 2 << 20
"""Size of a huge page: the last page of a file may be one, and reach beyond its end."""


@dataclass(frozen=True, slots=True)
class _Grant:
    nbytes: int
    job: str


class Grants:
    """Bytes granted to files, of all jobs of a daemon."""

    def __init__(self, left: Path, files: Files) -> None:
        """`left`: directory for files that are removed while they are open."""
        self._left, self._files = left, files
        self._granted: dict[Path, _Grant] = {}
        self._overgrown: dict[str, dict[Path, int]] = {}
        self._lock = threading.Lock()

    def adopt(self) -> None:
        """Cut the removed files that an earlier daemon left behind. Raises OSError."""
        if self._left.is_dir():
            for path in self._left.iterdir():
                self.grant(path, 0, "")
        self.tidy()

    def grant(self, path: Path, nbytes: int, job: str) -> None:
        """Allow the file to have `nbytes` from now on."""
        with self._lock:
            self._granted[path] = _Grant(nbytes, job)

    def remove(self, path: Path) -> None:
        """Delete the file, or keep it under another name, empty, while a process has it open.
        Harmless when it is missing. Raises OSError."""
        with self._lock:
            grant = self._granted.pop(path, None)
        if not is_open(path):
            self._files.unlink(path)
            return
        self._files.mkdir(self._left)
        target = self._left / uuid.uuid4().hex
        self._files.rename(path, target)
        self.grant(target, 0, grant.job if grant else "")
        self._files.truncate(target, 0)

    def left_of(self, job: str) -> int:
        """Removed arenas that processes of the job still have open."""
        with self._lock:
            return sum(
                grant.job == job and path.parent == self._left
                for path, grant in self._granted.items()
            )

    def cut_back(self, job: str | None = None) -> int:
        """Cut files that are larger than granted, of `job` or of all jobs; return the number of
        bytes cut. Raises OSError."""
        with self._lock:
            granted = [(p, g) for p, g in self._granted.items() if job in (None, g.job)]
        freed = 0
        for path, grant in granted:
            excess = _excess_bytes(path, grant.nbytes)
            if excess:
                self._files.truncate(path, grant.nbytes)
                freed += excess
                with self._lock:
                    self._overgrown.setdefault(grant.job, {})[path] = excess
        return freed

    def take_overgrown(self, job: str) -> dict[Path, int]:
        """Bytes cut off since the last call, by file."""
        with self._lock:
            return self._overgrown.pop(job, {})

    def tidy(self) -> None:
        """Delete removed files that no process has open any more, and cut the rest. Raises
        OSError."""
        with self._lock:
            left = [path for path in self._granted if path.parent == self._left]
        for path in left:
            if not is_open(path):
                self._files.unlink(path)
                with self._lock:
                    del self._granted[path]
        self.cut_back()


def _excess_bytes(path: Path, granted: int) -> int:
    """Bytes that a file takes beyond `granted`; 0 when it is missing."""
    with suppress(FileNotFoundError):
        status = path.stat()
        if status.st_size > granted:
            return status.st_size - granted
        # Memory can be reserved beyond a file's end, which does not move then.
        excess_bytes = status.st_blocks * 512 - granted
        return excess_bytes if excess_bytes > (HUGE_PAGE_BYTES if granted else 0) else 0
    return 0
