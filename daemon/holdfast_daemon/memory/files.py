"""The few file operations that the daemon's storage is built from.

Everything that changes a file goes through `Files`, one system-level step a call, so that tests can
stop between any two steps and look at what a restarted daemon would adopt. This module handles
paths and bytes only; the modules beside it define what they mean.

There is no fsync: the files lie on tmpfs, which outlives a process and not a machine.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from holdfast_core.errors import CorruptError, StorageError

PAGE_BYTES = 4096
TEMPORARY = ".tmp"


class Files(Protocol):
    """Steps that change the file system. All raise OSError."""

    def mkdir(self, path: Path) -> None:
        """Make `path` and its parents; do nothing when it exists."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace `path` with `data`; not atomic."""

    def rename(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target`, atomically."""

    def unlink(self, path: Path) -> None:
        """Remove the file `path`; do nothing when it is missing."""

    def remove_tree(self, path: Path) -> None:
        """Remove `path` and everything below it; do nothing when it is missing."""

    def allocate(self, path: Path, start: int, nbytes: int) -> None:
        """Extend `path` (created when missing) by [start, start + nbytes) of zeros, backed by
        memory that is charged to this process."""

    def truncate(self, path: Path, nbytes: int) -> None:
        """Cut `path` to `nbytes`, and free memory beyond its end."""

    def overwrite(self, path: Path, data: bytes) -> None:
        """Put `data` at the start of the existing file `path`, in the memory that the file has."""


class RealFiles:
    """`Files` on the operating system."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def allocate(self, path: Path, start: int, nbytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # tmpfs allocates every page now, and clears each when it is first used.
            os.posix_fallocate(descriptor, start, nbytes)
        finally:
            os.close(descriptor)

    def truncate(self, path: Path, nbytes: int) -> None:
        os.truncate(path, nbytes)

    def overwrite(self, path: Path, data: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write_at(descriptor, memoryview(data), 0)
        finally:
            os.close(descriptor)


def is_open(path: Path) -> bool:
    """Whether any process, including this one, has the file open or mapped; False when it is
    missing.

    Such a process can change the file at will, even after the file has lost its name. A lease
    reveals it: the kernel grants a write lease only to the file's owner, and only while no other
    descriptor of the file is open. If the file system has no leases, the answer is False.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # If another process opens the file meanwhile, the kernel sends a signal: choose one that is
        # ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False


def replace(files: Files, path: Path, data: bytes) -> None:
    """Make `path` hold `data`; readers see the old content or the new, never a mixture."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        files.write(temporary, data)
        files.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            files.unlink(temporary)
        raise


def sign(body: bytes) -> bytes:
    """`body` with its own checksum: its xxh3-64 in 16 hex digits, a newline, then `body`."""
    return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body


def signed_body(data: bytes, what: str) -> bytes:
    """The body that was given to `sign`; raises CorruptError when the checksum does not match."""
    head, _, body = data.partition(b"\n")
    if xxhash.xxh3_64_hexdigest(body).encode() != head:
        raise CorruptError(f"{what} does not match its own checksum")
    return body


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Translate OSError to StorageError; `what` is the attempt, such as "sealing slot 1"."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what} failed: {error.strerror or error}") from error


class SharedFile:
    """A file that other processes may cut or punch at any time, because they have a descriptor of
    it.

    It is never mapped: touching a mapped page that the file no longer has kills the process by
    SIGBUS. It is closed with its last reference, so that it stays open while in use. Thread-safe.

    Raises:
        OSError: on construction, when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read_into(self, at: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `at` on.

        Raises:
            CorruptError: the file ends before `view` is full.
            OSError: the file system failed.
        """
        while len(view):
            count = os.preadv(self._descriptor, [view], at)
            if count == 0:
                what = f"{self.path.parent.name}/{self.path.name}"
                raise CorruptError(f"{what} was cut short: it ends before byte {at}")
            at, view = at + count, view[count:]

    def write(self, at: int, data: memoryview) -> None:
        """Put `data` at `at`; a file that was cut grows again. Raises OSError."""
        _write_at(self._descriptor, data, at)


def map_shared(path: Path) -> memoryview:
    """All bytes of `path`, writable, shared with every other mapping of it.

    The mapping lives as long as a view of it does. Only for files of which no other process has a
    descriptor, and which are never cut below the size that they were sealed with: touching a page
    that the file no longer has kills the process (`SharedFile`).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, size)) if size else memoryview(bytearray())
    finally:
        os.close(descriptor)


def touch(view: memoryview) -> None:
    """Enter every page of a mapping into the page table: its first use is then as fast as any."""
    if len(view):
        np.frombuffer(view, dtype=np.uint8)[::PAGE_BYTES].max()


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
