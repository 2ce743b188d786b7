"""A tier in other object storage that fsspec reaches, using only what every kind supports.

A file is written under a temporary name and then moved. In object storage a move is a copy inside
the storage, so a kind in frequent use deserves an adapter of its own, as S3 has.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from holdfast_core.errors import CorruptError
from holdfast_storage.failing import foreign_errors
from holdfast_storage.roots import StoredFile, Unfinished

_TEMPORARY = re.compile(r"(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.part")


class GenericRoot:
    """`TierRoot` over an fsspec file system `fs`, below `root` in it."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self.root = root.rstrip("/")

    def write(
        self, path: str, nbytes: int, parts: Iterable[memoryview], stop: threading.Event
    ) -> None:
        target, token = self._full(path), secrets.token_hex(8)
        temporary = f"{target}.{token}.part"
        with foreign_errors(f"writing {target}"):
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                with self._fs.open(temporary, "wb") as file:
                    for part in parts:
                        file.write(part)
                self._fs.mv(temporary, target)
            except BaseException:
                with suppress(OSError):
                    self._fs.rm_file(temporary)
                raise

    def create(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        self.write(path, len(data), [memoryview(data)], threading.Event())
        return True

    def size(self, path: str) -> int | None:
        with foreign_errors(f"looking at {self._full(path)}"):
            try:
                return int(self._fs.info(self._full(path))["size"])
            except FileNotFoundError:
                return None

    def read(self, path: str, start: int, buffer: memoryview) -> None:
        with foreign_errors(f"reading {self._full(path)}"):
            data = self._fs.cat_file(self._full(path), start=start, end=start + len(buffer))
        if len(data) != len(buffer):
            raise CorruptError(f"{self._full(path)} ends at byte {start + len(data)}, too early")
        buffer[:] = data

    def files(self, path: str) -> list[StoredFile]:
        return [
            StoredFile(path=name, bytes=int(info["size"]), modified_s=_modified_s(info))
            for name, info in self._found(path)
            if not _TEMPORARY.fullmatch(name)
        ]

    def unfinished(self, path: str) -> list[Unfinished]:
        matches = ((_TEMPORARY.fullmatch(name), info) for name, info in self._found(path))
        return [
            Unfinished(path=match["name"], token=match["token"], modified_s=_modified_s(info))
            for match, info in matches
            if match is not None
        ]

    def discard(self, unfinished: Unfinished) -> None:
        self.delete([f"{unfinished.path}.{unfinished.token}.part"])

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with foreign_errors(f"removing {self._full(path)}"), suppress(FileNotFoundError):
                self._fs.rm_file(self._full(path))
        for parent in sorted({self._full(path).rpartition("/")[0] for path in paths}):
            with suppress(OSError):  # not empty, or storage without directories
                self._fs.rmdir(parent)

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _found(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        with foreign_errors(f"listing {self._full(path)}"):
            try:
                self._fs.invalidate_cache(self._full(path))
                entries = self._fs.find(self._full(path), maxdepth=2, detail=True)
            except FileNotFoundError:
                return []
        begin = len(self.root) + 1
        return sorted((name[begin:], info) for name, info in entries.items())


def _modified_s(info: dict[str, Any]) -> float:
    """Time of last modification, under any of the keys that file systems use; 0, long ago, if there
    is none."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
