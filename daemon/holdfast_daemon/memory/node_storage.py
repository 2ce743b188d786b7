"""The daemon's directory: its identity, its lock, and the budget of its memory.

`NodeStorage` owns `<root>` (docs/data-path.md): it keeps a second daemon out, gives the memory its
identity, counts the starts, and holds the one budget of bytes that all jobs draw from (invariant
5). Everything below `<root>/jobs/<job>` belongs to `memory.job_storage`.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from holdfast_core.errors import InvalidJobError, MemoryBudgetError, StorageError
from holdfast_core.job.names import job_file_name, job_of_file_name
from holdfast_daemon.memory.arenas import granted_below
from holdfast_daemon.memory.files import Files, RealFiles, replace, storage_errors
from holdfast_daemon.memory.grants import Grants
from holdfast_daemon.memory.reserve import Reserve, ReservedFiles

JOB_NAME_BYTES_MAX = 255
"""Longest file name on Linux; a job's directory is named after it."""


class Budget:
    """The budget of bytes that arenas and parity blocks draw from. Thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._reserved_bytes = 0
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        with self._lock:
            return self._reserved_bytes

    def reserve(self, nbytes: int, what: str) -> None:
        """Take `nbytes` for `what`.

        Raises:
            MemoryBudgetError: fewer are left; nothing is taken then.
        """
        with self._lock:
            available = max(self.total_bytes - self._reserved_bytes, 0)
            if nbytes > available:
                raise MemoryBudgetError(
                    f"{what} needs {nbytes} bytes, but of this node's budget of {self.total_bytes} "
                    f"bytes only {available} are left: raise spec.snapshot.memoryPerNode or the "
                    f"daemon's budget, give spec.snapshot.slots: 2, or shard the state over "
                    f"more ranks",
                    needed_bytes=nbytes,
                    available_bytes=available,
                )
            self._reserved_bytes += nbytes

    def adopt(self, nbytes: int) -> None:
        """Account for memory that an earlier daemon has already taken, even beyond the budget."""
        with self._lock:
            self._reserved_bytes += nbytes

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= nbytes
            assert self._reserved_bytes >= 0, "more bytes released than reserved"


class NodeStorage:
    """One daemon's directory, held exclusively from construction to `close`.

    Raises (on construction):
        StorageError: the directory cannot be made or written, belongs to a living daemon, or its
            file system is too small for the budget.
    """

    def __init__(self, root: Path, budget_bytes: int, files: Files | None = None) -> None:
        self.root = root
        plain = files if files is not None else RealFiles()
        self.grants = Grants(root / "left", plain)
        self.files = ReservedFiles(plain, self.grants, Reserve(root / "reserve", budget_bytes))
        self.budget = Budget(budget_bytes)
        with storage_errors(f"creating the directory {root}"):
            self.files.mkdir(root / "jobs")
        self._lock_descriptor = _lock_directory(root)
        try:
            # First cut back what trainers took beyond their arenas: before that, nothing may fit.
            with storage_errors(f"cleaning {root}"):
                for path, nbytes, job in granted_below(root / "jobs"):
                    self.grants.grant(path, nbytes, job)
                self.grants.adopt()
            self._check_room(budget_bytes)
            with storage_errors(f"writing to {root}"):
                self.memory_id = self._identify()
                self.incarnation = self._count_start()
            self.tidy()
        except BaseException:
            self.close()
            raise
        self.is_tmpfs = file_system_of(root) in ("tmpfs", "ramfs")
        """Whether the directory is in memory. False deserves a warning: snapshots on a disk are
        slow, and the budget does not account for its pages."""

    @property
    def reserved_bytes(self) -> int:
        return self.budget.reserved_bytes

    @property
    def essential(self) -> Files:
        """`Files` for files that must be written even when there is no memory left."""
        return dataclasses.replace(self.files, always=True)

    def tidy(self) -> None:
        """Take back memory beyond trainers' arenas, and refill the reserve, as far as possible."""
        with suppress(OSError):
            self.grants.tidy()
        self.files.reserve.fill(self.files.files)

    def job_directory(self, job: str) -> Path:
        """Directory of the files of `job`; the name is quoted, so that it stays one path component.

        Raises:
            InvalidJobError: the name is empty or too long for a file name.
        """
        name = job_file_name(job)
        if not name or len(name) > JOB_NAME_BYTES_MAX:
            raise InvalidJobError(
                f"job name {job[:80]!r} has {len(name)} bytes as a file name; it must have 1 to "
                f"{JOB_NAME_BYTES_MAX}"
            )
        return self.root / "jobs" / name

    def jobs(self) -> list[str]:
        """Names of the jobs that have files here, sorted."""
        with storage_errors(f"listing {self.root}/jobs"):
            return sorted(job_of_file_name(path.name) for path in (self.root / "jobs").iterdir())

    def free_bytes(self) -> int:
        """Bytes that are free in the file system."""
        with storage_errors(f"asking for the free space of {self.root}"):
            return shutil.disk_usage(self.root).free

    def close(self) -> None:
        """Release the directory for another daemon. Harmless when repeated."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _check_room(self, budget_bytes: int) -> None:
        free, held = self.free_bytes(), _held_bytes(self.root)
        if budget_bytes > free + held:
            raise StorageError(
                f"{self.root} cannot hold the memory budget of {budget_bytes} bytes: "
                f"{free} bytes are free and {held} are already held here; mount a larger tmpfs "
                f"or lower the budget"
            )
        self.files.reserve.limit(free + held - budget_bytes)

    def _identify(self) -> str:
        path = self.root / "memory-id"
        if not path.exists():
            replace(self.files, path, uuid.uuid4().hex.encode())
        return path.read_text()

    def _count_start(self) -> int:
        path = self.root / "incarnation"
        text = path.read_text() if path.exists() else "0"
        if not text.isdecimal():
            raise StorageError(
                f"{path} holds {text[:40]!r} instead of a number; peers could take this daemon's "
                f"reports for old ones. Remove {self.root} to start on fresh memory"
            )
        incarnation = int(text) + 1
        new = str(incarnation).encode()
        try:
            replace(self.essential, path, new)
        except OSError:
            if not path.exists():
                raise
            # A daemon must start even on full memory. The number fits one page, so it is never
            # torn.
            self.files.overwrite(path, new)
        return incarnation


def file_system_of(path: Path) -> str:
    """Type of the file system of `path`, as mount(8) names it; empty when unknown."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return ""


def _lock_directory(root: Path) -> int:
    with storage_errors(f"opening {root}"):
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"another daemon runs on {root}: stop it, or give this one its own directory"
        ) from error
    return descriptor


def _held_bytes(root: Path) -> int:
    nbytes = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                nbytes += Path(directory, name).lstat().st_blocks * 512
    return nbytes
