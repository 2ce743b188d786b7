"""The interface that a set store needs of a root, whatever kind of storage it is.

Paths are relative to the tier's root, with slashes, and made of names that `holdfast_core` has
checked. All calls block. Failures raise a StorageError with advice; a missing file is None.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A complete file in storage."""

    path: str
    bytes: int
    modified_s: float
    """Seconds since 1970, by the clock of the storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A file that was begun and never finished: a temporary name, or a multipart upload."""

    path: str
    """Path at which it was to appear."""
    token: str
    """Identifier that distinguishes it from others for the same path."""
    modified_s: float
    """Time at which it was begun or last grew, as far as the storage reports it."""


class TierRoot(Protocol):
    """The root of a tier."""

    def write(
        self, path: str, nbytes: int, parts: Iterable[memoryview], stop: threading.Event
    ) -> None:
        """Make `path` appear with all of `parts`, `nbytes` in total, replacing an existing file.

        Nothing appears before the last byte is safe, nor when `parts` raises, as it does once
        `stop` is set; a root that waits for a server checks `stop` itself.
        """

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file; return False and change nothing when `path` exists already."""

    def size(self, path: str) -> int | None:
        """Size of the file in bytes, or None when it is not there."""

    def read(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on.

        Raises:
            CorruptError: the file ends before the buffer does.
        """

    def files(self, path: str) -> list[StoredFile]:
        """Files in the directory and in its subdirectories, without unfinished ones."""

    def unfinished(self, path: str) -> list[Unfinished]:
        """Unfinished files in the directory and in its subdirectories."""

    def discard(self, unfinished: Unfinished) -> None:
        """Remove an unfinished file; nothing happens when it is already gone."""

    def delete(self, paths: Sequence[str]) -> None:
        """Remove files of one directory, and the directory itself once it is empty. They are gone
        for good when this returns. Files that are already gone are ignored."""
