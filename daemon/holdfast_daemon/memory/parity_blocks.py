"""Parity blocks: two files of memory per parity lane, and the entries that seal them.

A block's `.entry` describes the content and is written last, so a parity block exists exactly when
it is whole. While one block holds the newest protected generation, the next is built in the other.
An arena takes the memory of its blocks, and the first build touches it. A block that holds nothing
gives its memory back: its file keeps the size, for which room stays reserved, and is a hole until
the next build fills it. A block that is larger than the job's arenas need now, for example in a
smaller world, gets their size with its next build. The file is replaced and never cut, because
another thread may still read a mapping of it. This module reserves no budget and takes no lock:
`memory.job_storage` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast_core.errors import CorruptError, HoldfastError, StorageError
from holdfast_core.protection.budget import PARITY_SLOTS
from holdfast_core.snapshots.manifests import ParityEntry
from holdfast_daemon.memory.files import (
    Files,
    map_shared,
    replace,
    sign,
    signed_body,
    storage_errors,
    touch,
)

_ENTRY_NAME = re.compile(r"([0-9]+)-([0-9]+)\.entry")
_BLOCK_NAME = re.compile(r"([0-9]+)-([0-9]+)\.block")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRecord:
    """Content of an entry file: enough to find and verify every byte of the block."""

    entry: ParityEntry
    nbytes: int
    """Bytes of the block that are in use, from 0."""
    piece_bytes: int
    digests: bytes
    """xxh3-64 of each piece of the block, as in `Manifest.digests`."""
    payload_bytes: tuple[tuple[int, int], ...]
    """(rank, payload size) of every snapshot that went into the block."""

    def __post_init__(self) -> None:
        if self.piece_bytes <= 0 or len(self.digests) != 8 * -(-self.nbytes // self.piece_bytes):
            raise CorruptError(
                f"parity of lane {self.entry.lane}: {len(self.digests)} bytes of digests for "
                f"{self.nbytes} bytes in pieces of {self.piece_bytes}"
            )


_PARITY_RECORD = msgspec.json.Decoder(ParityRecord)


def encode_record(record: ParityRecord) -> bytes:
    return sign(msgspec.json.encode(record, order="deterministic"))


def decode_record(data: bytes) -> ParityRecord:
    """The record that `encode_record` wrote; raises CorruptError for anything else."""
    body = signed_body(data, "parity entry")
    try:
        return _PARITY_RECORD.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"parity entry cannot be read: {error}") from error


class ParityBlocks:
    """The parity blocks of one job, below `<job>/parity`."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files
        self.records: dict[tuple[int, int], ParityRecord] = {}
        """Sealed blocks by (lane, slot)."""
        self._sizes: dict[tuple[int, int], int] = {}
        self._held: set[tuple[int, int]] = set()
        """Blocks that have their memory."""
        self._building: set[tuple[int, int]] = set()
        self._idle: set[tuple[int, int]] = set()
        """Blocks that held nothing when `empty_idle` last looked."""
        self._views: dict[tuple[int, int], memoryview] = {}

    @property
    def nbytes(self) -> int:
        """Memory that is kept for the blocks: as much as all of them can take at once."""
        return sum(self._sizes.values())

    @property
    def held_bytes(self) -> int:
        """Memory that the blocks take now."""
        return sum(self._sizes[key] for key in self._held)

    def missing_bytes(self, lanes: Sequence[int], nbytes: int) -> int:
        """Memory that `grow` would have to add."""
        return sum(
            max(nbytes - self._sizes.get((lane, slot), 0), 0)
            for lane in lanes
            for slot in range(PARITY_SLOTS)
        )

    def grow(self, lanes: Sequence[int], nbytes: int) -> None:
        """Grow both blocks of each of `lanes` to at least `nbytes`.

        A block grows at its end, in place, so its sealed bytes stay valid. On OSError every block
        has its old size.
        """
        before = dict(self._sizes)
        try:
            for lane, slot in ((lane, slot) for lane in lanes for slot in range(PARITY_SLOTS)):
                size = self._sizes.get((lane, slot), 0)
                if nbytes > size:
                    self._grow(lane, slot, size, nbytes)
        except OSError:
            for lane in lanes:
                self._shrink(lane, before)
            self._sizes = before
            self._held &= before.keys()
            raise

    def begin(self, lane: int, slot: int) -> None:
        """Keep the memory of a free block, which is about to be built, until `end`."""
        self._building.add((lane, slot))

    def fill(self, lane: int, slot: int) -> None:
        """Give a block its memory if it has none, and enter it into the page table. Raises
        OSError."""
        key = (lane, slot)
        if key not in self._sizes:
            return
        if key not in self._held:
            self._files.allocate(self.path(lane, slot), 0, self._sizes[key])
            self._held.add(key)
        if key not in self._views:
            touch(self._map(lane, slot))

    def end(self, lane: int, slot: int) -> None:
        """End what `begin` began: the block is sealed, or holds nothing."""
        self._building.discard((lane, slot))

    def empty_idle(self) -> list[memoryview]:
        """Take the memory from blocks that have held nothing since the last call. Raises OSError.

        Returns:
            Views of the old memory, which is free once nothing refers to them any more.
        """
        idle = self._held - self.records.keys() - self._building
        given = []
        for key in sorted(idle & self._idle):
            given.append(self._map(*key))
            self._empty(key, self._sizes[key])
        self._idle = idle - self._idle
        return given

    def trim(self, lane: int, slot: int, nbytes: int) -> int:
        """Make a free block that is larger than `nbytes` a hole of that size; return the bytes of
        room that it had beyond. Raises OSError."""
        key = (lane, slot)
        beyond = self._sizes.get(key, 0) - nbytes
        if beyond <= 0:
            return 0
        self._empty(key, nbytes)
        return beyond

    def _empty(self, key: tuple[int, int], nbytes: int) -> None:
        hole = self.path(*key).with_suffix(".hole")
        self._files.write(hole, b"")
        self._files.truncate(hole, nbytes)
        self._files.rename(hole, self.path(*key))
        self._sizes[key] = nbytes
        self._held.discard(key)
        self._views.pop(key, None)

    def path(self, lane: int, slot: int) -> Path:
        return self._directory / f"{lane}-{slot}.block"

    def entry_path(self, lane: int, slot: int) -> Path:
        return self._directory / f"{lane}-{slot}.entry"

    def view(self, lane: int, slot: int) -> memoryview:
        """All bytes of a block.

        Raises:
            StorageError: the lane has no such block.
        """
        if (lane, slot) not in self._sizes:
            raise StorageError(f"lane {lane} has no parity block {slot}: no arena has reserved one")
        with storage_errors(f"mapping {self.path(lane, slot)}"):
            return self._map(lane, slot)

    def seal(self, slot: int, record: ParityRecord) -> None:
        lane = record.entry.lane
        replace(self._files, self.entry_path(lane, slot), encode_record(record))
        self.records[lane, slot] = record

    def free(self, lane: int, slot: int) -> None:
        self._files.unlink(self.entry_path(lane, slot))
        self.records.pop((lane, slot), None)

    def adopt(self) -> list[str]:
        """Take over every block and every whole entry. Remove incomplete entries, and return a
        sentence about each."""
        problems: list[str] = []
        if not self._directory.is_dir():
            return problems
        entries: list[tuple[tuple[int, int], Path]] = []
        for path in sorted(self._directory.iterdir()):
            block, entry = _BLOCK_NAME.fullmatch(path.name), _ENTRY_NAME.fullmatch(path.name)
            if block and int(block[2]) < PARITY_SLOTS and path.stat().st_size:
                key = int(block[1]), int(block[2])
                self._sizes[key] = path.stat().st_size
                if path.stat().st_blocks:
                    self._held.add(key)
            elif entry:
                entries.append(((int(entry[1]), int(entry[2])), path))
            else:
                self._files.unlink(path)
        for key, path in entries:
            try:
                record = decode_record(path.read_bytes())
                if record.entry.lane != key[0] or record.nbytes > self._sizes.get(key, 0):
                    raise CorruptError("it does not fit the block beside it")
                self.records[key] = record
            except (HoldfastError, OSError) as error:
                problems.append(f"parity/{path.name} removed: {error}")
                self._files.unlink(path)
        return problems

    def _map(self, lane: int, slot: int) -> memoryview:
        view = self._views.get((lane, slot))
        if view is None:
            view = self._views[lane, slot] = map_shared(self.path(lane, slot))
        return view

    def _grow(self, lane: int, slot: int, size: int, nbytes: int) -> None:
        path, key = self.path(lane, slot), (lane, slot)
        is_hole = size > 0 and key not in self._held
        if is_hole and key not in self._building:
            self._files.truncate(path, nbytes)
        else:
            self._files.mkdir(self._directory)
            self._files.allocate(path, size, nbytes - size)
        self._sizes[key] = nbytes
        self._views.pop(key, None)
        if not is_hole:
            self._held.add(key)

    def _shrink(self, lane: int, sizes: dict[tuple[int, int], int]) -> None:
        for slot in range(PARITY_SLOTS):
            self._views.pop((lane, slot), None)
            with suppress(OSError):
                if (lane, slot) in sizes:
                    self._files.truncate(self.path(lane, slot), sizes[lane, slot])
                else:
                    self._files.unlink(self.path(lane, slot))
