"""Keeps the failures of a local run's virtual nodes in a file of its directory.

The record outlives the control loop, and begins anew with each run, like the nodes. Nothing waits
for it: while the file cannot be read or written, the control loop goes on with what it remembers
itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast_cli.local.directory import replace_file
from holdfast_core.node_failures import (
    NodeFailure,
    NodeMemory,
    Rating,
    Record,
    from_document,
    to_document,
)

BYTES_MAX = 1 << 20
"""Size from which a file is no record: the largest one is half of that."""


def read_record(path: Path, now: float) -> tuple[Record, tuple[str, ...]]:
    """The record in a file, empty without the file, and what of it could not be understood, in
    words.

    Raises:
        OSError: when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return {}, ()
    if len(data) > BYTES_MAX:
        return {}, (f"it has more than {BYTES_MAX} bytes",)
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {}, (f"it is no JSON: {error}",)
    return from_document(document, now=now)


def write_record(path: Path, record: Record) -> None:
    """Replace the record in a file.

    Raises:
        OSError: when it cannot be written.
    """
    replace_file(path, msgspec.json.format(msgspec.json.encode(to_document(record))))


class NodeRecord:
    """The failures of nodes, as the control loop of a local run knows them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = NodeMemory()
        self._seen: tuple[int, int] | None = None
        self._said = ""

    def synchronise(self) -> str:
        """Read the file if it has changed, and add what is new to it. Returns a problem that has
        not been returned before, in words; empty without one."""
        now = time.time()
        try:
            problem = self._read(now)
            record = self._memory.to_write(now)
            if record is not None:
                write_record(self._path, record)
                self._memory.wrote(record)
        except OSError as error:
            problem = str(error)
        new, self._said = problem != self._said, problem
        return problem if new else ""

    def note(self, failures: Iterable[tuple[str, NodeFailure]]) -> None:
        """Remember failures, each with its node; `synchronise` writes them."""
        self._memory.note(failures, time.time())

    def rating(self, node: str) -> Rating:
        """How a node has done lately."""
        return self._memory.rating(node, time.time())

    def _read(self, now: float) -> str:
        """Read the file unless it is as it was; returns what is wrong with it."""
        version = self._version()
        if version == self._seen and version is not None:
            return self._said
        record, problems = read_record(self._path, now)
        self._memory.see(record)
        self._seen = version
        return problems[0] if problems else ""

    def _version(self) -> tuple[int, int] | None:
        """Identifies the content of the file; None without a file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino
