"""Arenas: the files that trainers copy their snapshots into, and the manifests that seal them.

`<rank>-<layout id>/layout.json` is written last, so an arena exists exactly when it is usable; the
file `slots` beside it holds the number of its slots, which differs from node to node.
`slot-<n>.manifest` is written last, so a snapshot exists exactly when all of it does. Neither is
ever changed in place. This module reserves no budget and takes no lock: `memory.job_storage`
does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import CorruptError, HoldfastError, StorageError
from holdfast_core.job.names import job_of_file_name
from holdfast_core.snapshots.layouts import (
    SLOTS_MAX,
    Layout,
    decode_layout,
    decode_manifest,
    layout_id,
    piece_count,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.pieces import PieceMap, encode_places, runs, split_places
from holdfast_daemon.memory.files import Files, SharedFile, replace, storage_errors
from holdfast_daemon.memory.grants import Grants

LAYOUT_FILE = "layout.json"
ARENA_FILE = "arena"
SLOTS_FILE = "slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedSlot:
    """A sealed slot: its manifest, the encoded bytes that the manifest's digest covers, and the
    places of its pieces (see `holdfast_core.snapshots.pieces`)."""

    manifest: Manifest
    encoded: bytes
    places: bytes = b""

    @property
    def file_bytes(self) -> bytes:
        """Content of the slot's manifest file."""
        return self.encoded + encode_places(self.places)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaPart:
    """Consecutive bytes of a payload: from `offset` of the payload, at `at` of the arena."""

    offset: int
    at: int
    nbytes: int


class Arena:
    """One rank's region of shared memory, made for one layout."""

    def __init__(
        self, directory: Path, rank: int, encoded_layout: bytes, layout: Layout, slots: int
    ) -> None:
        self.directory = directory
        self.rank = rank
        """Its rank; `layout.rank` is the world rank, which may be another."""
        self.path = directory / ARENA_FILE
        """The file whose descriptor is passed to the trainer."""
        self.encoded_layout = encoded_layout
        self.layout = layout
        self.slots = slots
        """Number of its slots."""
        self.layout_id = layout_id(encoded_layout)
        self.sealed: dict[int, SealedSlot] = {}
        self._file: SharedFile | None = None

    @property
    def nbytes(self) -> int:
        return self.layout.arena_bytes(self.slots)

    def slot_start(self, slot: int) -> int:
        """First byte of `slot` in the arena."""
        if not 0 <= slot < self.slots:
            raise StorageError(f"the arena has slots 0 to {self.slots - 1}, not {slot}")
        return slot * self.layout.slot_bytes

    def parts(self, piece_map: PieceMap, start: int, nbytes: int) -> Iterator[ArenaPart]:
        """The parts of the arena that hold bytes [start, start + nbytes) of a payload, in order."""
        piece_bytes, stop = self.layout.piece_bytes, start + nbytes
        for run in runs(piece_map, start // piece_bytes, piece_count(stop, piece_bytes)):
            first = max(run.first * piece_bytes, start)
            end = min(run.end * piece_bytes, stop)
            yield ArenaPart(offset=first, at=self.slot_start(run.slot) + first, nbytes=end - first)

    def read_into(self, piece_map: PieceMap, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a payload from `start` on, as they are now.

        Raises:
            CorruptError: the file no longer has them, because its trainer cut it.
            StorageError: the file system failed.
        """
        with storage_errors(f"reading {self.path}"):
            file = self._opened()
            for part in self.parts(piece_map, start, len(view)):
                at = part.offset - start
                file.read_into(part.at, view[at : at + part.nbytes])

    def read_mirror_into(self, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the mirror from `start` on, as they are now; raises as
        `read_into` does."""
        with storage_errors(f"reading {self.path}"):
            self._opened().read_into(self.slots * self.layout.slot_bytes + start, view)

    def write(self, piece_map: PieceMap, start: int, data: memoryview) -> None:
        """Put `data` at the places of the payload's bytes from `start` on. Raises StorageError."""
        with storage_errors(f"writing {self.path}"):
            file = self._opened()
            for part in self.parts(piece_map, start, len(data)):
                at = part.offset - start
                file.write(part.at, data[at : at + part.nbytes])

    def close(self) -> None:
        """Stop using the file; reads and writes in progress may finish."""
        self._file = None

    def _opened(self) -> SharedFile:
        if self._file is None:
            self._file = SharedFile(self.path)
        return self._file

    def manifest_path(self, slot: int) -> Path:
        return self.directory / f"slot-{slot}.manifest"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedArena:
    """An arena that a starting daemon found, with the slots sealed in it."""

    rank: int
    layout: Layout
    layout_id: str
    slots: int
    """Number of its slots."""
    sealed: Mapping[int, SealedSlot]
    """Sealed slots, by number."""


class ArenaFiles:
    """The arenas of one job, below `<job>/arenas`."""

    def __init__(self, directory: Path, job: str, files: Files, grants: Grants) -> None:
        self._directory = directory
        self._job = job
        self._files = files
        self._grants = grants

    def allocate(self, rank: int, encoded_layout: bytes, slots: int) -> Arena:
        """Make a new arena of `slots` slots. Raises OSError when there is no memory, and then
        leaves nothing behind."""
        layout = decode_layout(encoded_layout)
        name = f"{rank}-{layout_id(encoded_layout)}"
        arena = Arena(self._directory / name, rank, encoded_layout, layout, slots)
        try:
            self._files.mkdir(arena.directory)
            self._files.allocate(arena.path, 0, arena.nbytes)
            self._files.write(arena.directory / SLOTS_FILE, str(slots).encode())
            replace(self._files, arena.directory / LAYOUT_FILE, encoded_layout)
        except OSError:
            with suppress(OSError):
                self._files.remove_tree(arena.directory)
            raise
        self._grants.grant(arena.path, arena.nbytes, self._job)
        return arena

    def remove(self, arena: Arena) -> None:
        """Delete the arena: its sealed slots first, then its layout, then its memory."""
        for slot in sorted(arena.sealed):
            self.free(arena, slot)
        self._files.unlink(arena.directory / LAYOUT_FILE)
        arena.close()
        self._files.unlink(arena.directory / SLOTS_FILE)
        self._grants.remove(arena.path)
        self._files.remove_tree(arena.directory)

    def seal(self, arena: Arena, slot: int, sealed: SealedSlot) -> None:
        _check_fits(self._job, arena, slot, sealed)
        replace(self._files, arena.manifest_path(slot), sealed.file_bytes)
        arena.sealed[slot] = sealed

    def free(self, arena: Arena, slot: int) -> None:
        self._files.unlink(arena.manifest_path(slot))
        arena.sealed.pop(slot, None)

    def adopt(self) -> tuple[list[Arena], list[str]]:
        """Take over every whole arena with its whole slots; return them, and a sentence about each
        damage.

        Incomplete arenas and slots are removed: they were never promised to any other process.
        """
        arenas: list[Arena] = []
        problems: list[str] = []
        if self._directory.is_dir():
            for directory in sorted(self._directory.iterdir()):
                try:
                    arena = _read_arena(directory)
                except (HoldfastError, OSError) as error:
                    problems.append(f"arena {directory.name} removed: {error}")
                    self._grants.remove(directory / ARENA_FILE)
                    self._files.remove_tree(directory)
                    continue
                self._grants.grant(arena.path, arena.nbytes, self._job)
                problems.extend(self._adopt_slots(arena))
                arenas.append(arena)
        return arenas, problems

    def _adopt_slots(self, arena: Arena) -> list[str]:
        problems = []
        slots = {arena.manifest_path(slot): slot for slot in range(arena.slots)}
        for path in sorted(arena.directory.iterdir()):
            if path in slots:
                try:
                    encoded, places = split_places(path.read_bytes())
                    sealed = SealedSlot(
                        manifest=decode_manifest(encoded), encoded=encoded, places=places
                    )
                    _check_fits(self._job, arena, slots[path], sealed)
                    arena.sealed[slots[path]] = sealed
                    continue
                except (HoldfastError, OSError) as error:
                    problems.append(f"{arena.directory.name}/{path.name} removed: {error}")
            elif path.name in (LAYOUT_FILE, ARENA_FILE, SLOTS_FILE):
                continue
            self._files.unlink(path)
        return problems


def granted_below(jobs: Path) -> Iterator[tuple[Path, int, str]]:
    """(file, bytes, job) of every arena on a node that has a layout; nothing is verified."""
    for layout in sorted(jobs.glob(f"*/arenas/*/{LAYOUT_FILE}")):
        with suppress(HoldfastError, OSError):
            nbytes = decode_layout(layout.read_bytes()).arena_bytes(_slots_of(layout.parent))
            job = job_of_file_name(layout.parents[2].name)
            yield layout.with_name(ARENA_FILE), nbytes, job


def _read_arena(directory: Path) -> Arena:
    try:
        encoded = (directory / LAYOUT_FILE).read_bytes()
    except FileNotFoundError as error:
        raise StorageError("its allocation or removal was interrupted") from error
    layout = decode_layout(encoded)
    rank, _, named = directory.name.partition("-")
    if not rank.isdecimal() or named != layout_id(encoded):
        raise CorruptError("its layout does not match its directory's name")
    arena = Arena(directory, int(rank), encoded, layout, _slots_of(directory))
    file_bytes = arena.path.stat().st_size
    if file_bytes != arena.nbytes:
        raise CorruptError(
            f"its file has {file_bytes} bytes and {arena.slots} slots of its layout {arena.nbytes}"
        )
    return arena


def _slots_of(directory: Path) -> int:
    """Number of slots of the arena in `directory`; three where an earlier version did not write it.

    Raises:
        CorruptError: when its file holds something else.
        OSError: when it cannot be read.
    """
    path = directory / SLOTS_FILE
    text = path.read_text() if path.exists() else str(SLOTS_MAX)
    if text not in (str(slots) for slots in range(1, SLOTS_MAX + 1)):
        raise CorruptError(f"its number of slots is {text[:40]!r}, not 1 to {SLOTS_MAX}")
    return int(text)


def _check_fits(job: str, arena: Arena, slot: int, sealed: SealedSlot) -> None:
    arena.slot_start(slot)
    manifest = sealed.manifest
    pieces = piece_count(manifest.payload_bytes, manifest.piece_bytes)
    if max(sealed.places, default=0) >= arena.slots:
        raise CorruptError(
            f"the manifest has pieces in slot {max(sealed.places)}, and the arena has slots 0 to "
            f"{arena.slots - 1}"
        )
    if manifest.piece_bytes != arena.layout.piece_bytes or len(sealed.places) not in (0, pieces):
        raise CorruptError(
            f"the manifest has {pieces} pieces of {manifest.piece_bytes} bytes and "
            f"{len(sealed.places)} places; pieces of the layout have {arena.layout.piece_bytes} "
            f"bytes"
        )
    rank = arena.layout.rank
    if (manifest.job, manifest.rank, manifest.layout_id) != (job, rank, arena.layout_id):
        raise CorruptError(
            f"the manifest is of job {manifest.job} world rank {manifest.rank} layout "
            f"{manifest.layout_id}, not of job {job} world rank {rank} layout {arena.layout_id}"
        )
    if manifest.payload_bytes > arena.layout.slot_bytes:
        raise CorruptError(
            f"the manifest has {manifest.payload_bytes} bytes of payload, and the slot has "
            f"{arena.layout.slot_bytes}"
        )
