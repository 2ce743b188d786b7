"""A tier in a directory: a local disk, NFS, or any other mounted file system.

A file is written under a temporary name, made safe (fsync), and renamed. Every operation on the
file system goes through `FileSteps`, so that tests can stop between any two of them. Links are not
followed: another user may have placed them in the tier.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast_core.errors import CorruptError
from holdfast_storage.failing import storage_errors
from holdfast_storage.roots import StoredFile, Unfinished

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.part")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class FileSteps:
    """Operations of the operating system. All raise OSError."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def open_new(self, path: Path) -> int:
        # The umask decides who may read: other users' tools and trainers may need to.
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def read(self, descriptor: int, start: int, buffer: memoryview) -> int:
        return os.preadv(descriptor, [buffer], start)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def stat(self, path: Path) -> os.stat_result:
        return path.lstat()

    def list(self, path: Path) -> list[str]:
        return [entry.name for entry in path.iterdir()]


class LocalRoot:
    """`TierRoot` in a directory, which is created with the first write."""

    def __init__(self, root: Path, files: FileSteps | None = None) -> None:
        self.root = root
        self._files = files or FileSteps()

    def write(
        self, path: str, nbytes: int, parts: Iterable[memoryview], stop: threading.Event
    ) -> None:
        target = self.root / path
        with storage_errors(f"writing {target}"):
            temporary = self._write_temporary(target, parts)
            try:
                self._files.rename(temporary, target)
                self._files.sync_directory(target.parent)
            except BaseException:
                self._forget(temporary)
                raise

    def create(self, path: str, data: bytes) -> bool:
        target = self.root / path
        with storage_errors(f"writing {target}"):
            temporary = self._write_temporary(target, [memoryview(data)])
            try:
                return self._appear(temporary, target)
            finally:
                self._forget(temporary)

    def size(self, path: str) -> int | None:
        target = self.root / path
        with storage_errors(f"looking at {target}"):
            status = self._stat(target)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def read(self, path: str, start: int, buffer: memoryview) -> None:
        target = self.root / path
        with storage_errors(f"reading {target}"):
            descriptor = self._files.open_read(target)
            try:
                done = 0
                while done < len(buffer):
                    count = self._files.read(descriptor, start + done, buffer[done:])
                    if count == 0:
                        raise CorruptError(
                            f"{target} ends at byte {start + done}, too early: its header "
                            f"promises more"
                        )
                    done += count
            finally:
                self._files.close(descriptor)

    def files(self, path: str) -> list[StoredFile]:
        return [
            StoredFile(path=file, bytes=status.st_size, modified_s=status.st_mtime)
            for file, status in self._walk(path)
            if not _TEMPORARY.fullmatch(file.rpartition("/")[2])
        ]

    def unfinished(self, path: str) -> list[Unfinished]:
        result = []
        for file, status in self._walk(path):
            directory, _, name = file.rpartition("/")
            if match := _TEMPORARY.fullmatch(name):
                whole = f"{directory}/{match['name']}"
                at = status.st_mtime
                result.append(Unfinished(path=whole, token=match["token"], modified_s=at))
        return result

    def discard(self, unfinished: Unfinished) -> None:
        temporary = _temporary(self.root / unfinished.path, unfinished.token)
        with storage_errors(f"removing {temporary}"):
            self._files.unlink(temporary)
            self._remove_if_empty(temporary.parent)

    def delete(self, paths: Sequence[str]) -> None:
        parents = sorted({(self.root / path).parent for path in paths})
        with storage_errors(f"removing {', '.join(paths)} in {self.root}"):
            for path in paths:
                self._files.unlink(self.root / path)
            for parent in parents:
                # Files removed first must be gone first, even after a power cut.
                with suppress(FileNotFoundError):
                    self._files.sync_directory(parent)
                self._remove_if_empty(parent)

    def _write_temporary(self, target: Path, parts: Iterable[memoryview]) -> Path:
        self._make(target.parent)
        temporary = _temporary(target, secrets.token_hex(8))
        descriptor = self._files.open_new(temporary)
        try:
            try:
                for part in parts:
                    left = part
                    while len(left):
                        left = left[self._files.write(descriptor, left) :]
                self._files.sync(descriptor)
            finally:
                self._files.close(descriptor)
        except BaseException:
            self._forget(temporary)
            raise
        return temporary

    def _make(self, directory: Path) -> None:
        if self._stat(directory) is None:
            self._files.make_directory(directory)
            for parent in (directory.parent, directory.parent.parent):
                self._files.sync_directory(parent)

    def _appear(self, temporary: Path, target: Path) -> bool:
        try:
            self._files.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links: two writers that create the same file at the same
            # instant both succeed, and each sees one whole file.
            if self._stat(target) is not None:
                return False
            self._files.rename(temporary, target)
        self._files.sync_directory(target.parent)
        return True

    def _forget(self, temporary: Path) -> None:
        with suppress(OSError):
            self._files.unlink(temporary)

    def _stat(self, path: Path) -> os.stat_result | None:
        try:
            return self._files.stat(path)
        except FileNotFoundError:
            return None

    def _remove_if_empty(self, directory: Path) -> None:
        try:
            self._files.remove_directory(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _walk(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Files in the directory `path` and one level below it, by path relative to the root."""
        with storage_errors(f"listing {self.root / path}"):
            for name, status in self._entries(path):
                if stat.S_ISDIR(status.st_mode):
                    yield from (
                        (below, found)
                        for below, found in self._entries(name)
                        if stat.S_ISREG(found.st_mode)
                    )
                elif stat.S_ISREG(status.st_mode):
                    yield name, status

    def _entries(self, path: str) -> list[tuple[str, os.stat_result]]:
        directory = self.root / path
        try:
            names = sorted(self._files.list(directory))
        except FileNotFoundError:
            return []
        statuses = ((f"{path}/{name}", self._stat(directory / name)) for name in names)
        return [(name, status) for name, status in statuses if status is not None]


def _temporary(target: Path, token: str) -> Path:
    return target.with_name(f".{target.name}.{token}.part")
