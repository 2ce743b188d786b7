"""How large each file may be that a trainer has a descriptor of, and cutting back what is larger.

A trainer can extend its arena's file, also without changing its size, and so take the memory of all
jobs of the node. Nothing takes a descriptor away from a process; so files are looked at, and cut.
An arena that is removed while somebody has it open is kept by name, cut to nothing, until nobody
has: the memory of a file without a name could not be taken back. Thread-safe.
"""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast_daemon.memory.files import Files, is_open

LEFT_MAX = 64
"""Removed arenas that processes of one job still have open; then it gets no new one."""

HUGE_PAGE_BYTES = 2 << 20
"""The last page of a file may be as large as this, and reach beyond its end."""


@dataclass(frozen=True, slots=True)
class _Grant:
    nbytes: int
    job: str


class Grants:
    """What was granted, of all jobs of a daemon."""

    def __init__(self, left: Path, files: Files) -> None:
        """`left`: a directory for what is removed while it is open."""
        self._left, self._files = left, files
        self._granted: dict[Path, _Grant] = {}
        self._overgrown: dict[str, dict[Path, int]] = {}
        self._lock = threading.Lock()

    def adopt(self) -> None:
        """Cut what an earlier daemon left behind. Raises OSError."""
        if self._left.is_dir():
            for path in self._left.iterdir():
                self.grant(path, 0, "")
        self.tidy()

    def grant(self, path: Path, nbytes: int, job: str) -> None:
        """From here on the file may take so many bytes."""
        with self._lock:
            self._granted[path] = _Grant(nbytes, job)

    def remove(self, path: Path) -> None:
        """Delete the file, or keep it by another name, empty, while somebody has it open. Harmless
        when it is missing. Raises OSError."""
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
        """Cut what is larger than granted, of one job or of all; how many bytes that were. Raises
        OSError."""
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
        """By file, how many bytes were cut off since the last call."""
        with self._lock:
            return self._overgrown.pop(job, {})

    def tidy(self) -> None:
        """Delete what nobody has open any more, and cut the rest. Raises OSError."""
        with self._lock:
            left = [path for path in self._granted if path.parent == self._left]
        for path in left:
            if not is_open(path):
                self._files.unlink(path)
                with self._lock:
                    del self._granted[path]
        self.cut_back()


def _excess_bytes(path: Path, granted: int) -> int:
    """What a file takes beyond `granted`; 0 when it is missing."""
    with suppress(FileNotFoundError):
        found = path.stat()
        if found.st_size > granted:
            return found.st_size - granted
        # Memory can be reserved beyond a file's end, which does not move then.
        held = found.st_blocks * 512 - granted
        return held if held > (HUGE_PAGE_BYTES if granted else 0) else 0
    return 0
