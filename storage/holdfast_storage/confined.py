"""File system operations that stay below a directory, whatever links are placed there.

Trainers may be able to write to the location that their job persists to. A link in it would lead
the daemon, which can read and write every tenant's location, to another tenant's copies. So each
name below the directory is opened relative to its parent, and none may be a link (`O_NOFOLLOW`): a
check of the path beforehand could be out of date before the path is used. The directory itself and
everything above it belong to the platform team, and links there are followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_storage.local import FileSteps

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ConfinedFiles(FileSteps):
    """Operations below `top`; a path with a link below it raises OSError (ENOTDIR or ELOOP)."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def make_directory(self, path: Path) -> None:
        if not path.is_relative_to(self._top):
            super().make_directory(path)
            return
        super().make_directory(self._top)
        made = self._top
        for name in path.relative_to(self._top).parts:
            with self._opened(made) as parent, suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            made /= name

    def open_new(self, path: Path) -> int:
        with self._opened(path.parent) as parent:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(path.name, flags, 0o666, dir_fd=parent)

    def open_read(self, path: Path) -> int:
        with self._opened(path.parent) as parent:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.open(path.name, flags, dir_fd=parent)

    def rename(self, source: Path, target: Path) -> None:
        with self._opened(source.parent) as old, self._opened(target.parent) as new:
            os.rename(source.name, target.name, src_dir_fd=old, dst_dir_fd=new)

    def link(self, source: Path, target: Path) -> None:
        with self._opened(source.parent) as old, self._opened(target.parent) as new:
            os.link(source.name, target.name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        with suppress(FileNotFoundError), self._opened(path.parent) as parent:
            os.unlink(path.name, dir_fd=parent)

    def remove_directory(self, path: Path) -> None:
        with self._opened(path.parent) as parent:
            os.rmdir(path.name, dir_fd=parent)

    def sync_directory(self, path: Path) -> None:
        with self._opened(path) as directory:
            readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.fsync(readable)
        finally:
            os.close(readable)

    def stat(self, path: Path) -> os.stat_result:
        with self._opened(path.parent) as parent:
            return os.stat(path.name, dir_fd=parent, follow_symlinks=False)

    def list(self, path: Path) -> list[str]:
        with self._opened(path) as directory:
            readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            return os.listdir(readable)  # noqa: PTH208
        finally:
            os.close(readable)

    @contextmanager
    def _opened(self, directory: Path) -> Iterator[int]:
        """A descriptor of `directory`. Outside the top, links are followed."""
        inside = directory.is_relative_to(self._top)
        first = self._top if inside else directory
        descriptor = os.open(first, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in directory.relative_to(first).parts:
                below = os.open(name, _STEP, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)
