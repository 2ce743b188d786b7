"""What a set store needs of a place, whatever kind of storage it is.

Paths are relative to the tier's root, with slashes, and made of names that `holdfast_core` has
checked. All calls block. What fails is a StorageError that says what to do; a missing file is None.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A file that is there."""

    path: str
    bytes: int
    modified_s: float
    """Seconds since 1970, by the clock of the storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A file that somebody began and that is not there yet: a temporary name, or a multipart."""

    path: str
    """Where it was to appear."""
    token: str
    """What tells it from others for the same path."""
    modified_s: float
    """When it was begun, or grew, as far as the storage says."""


class Place(Protocol):
    """The root of a tier."""

    def write(
        self, path: str, nbytes: int, parts: Iterable[memoryview], stop: threading.Event
    ) -> None:
        """Make `path` appear with all of `parts`, `nbytes` together, in the place of what is there.

        Nothing appears before the last byte is safe, nor when `parts` raises, as it does once
        `stop` is set; a place that waits for others looks at `stop` itself.
        """

    def create(self, path: str, data: bytes) -> bool:
        """As `write`, for something small; False when `path` is there already, which stays."""

    def size(self, path: str) -> int | None:
        """Bytes of the file, or None when it is not there."""

    def read(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on.

        Raises:
            CorruptError: the file ends before the buffer does.
        """

    def files(self, path: str) -> list[Item]:
        """Files in the directory and in the directories in it; without the unfinished."""

    def unfinished(self, path: str) -> list[Unfinished]:
        """What was begun in the directory and in the directories in it."""

    def discard(self, unfinished: Unfinished) -> None:
        """Remove what was begun; nothing happens when it is gone."""

    def delete(self, paths: Sequence[str]) -> None:
        """Remove files of one directory, and the directory when nothing is left in it. They are
        gone for good when this returns. Nothing happens when one is gone already."""
