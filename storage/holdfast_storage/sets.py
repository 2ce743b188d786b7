"""Sets of a job in its durable tier: written rank by rank, committed, listed, opened, cleaned.

All calls block and may be made from several threads. `write_rank` is for the daemon that holds the
rank, `commit` and `clean` for the leader's, `complete` and `open_rank` for whoever restores. A set
is visible from the moment that its manifest is, and whole then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.layouts import decode_manifest
from holdfast_core.persisted import RankFile, describe_file, encode_header, file_name
from holdfast_core.persisted_sets import (
    LATEST_FILE,
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    StoredSet,
    checked_files,
    checked_job,
    decode_latest,
    decode_set,
    encode_latest,
    encode_set,
    set_name,
)
from holdfast_core.values import Generation
from holdfast_storage.cleaning import Cleaned, clean
from holdfast_storage.finding import StoredSets, find_sets
from holdfast_storage.opening import open_place
from holdfast_storage.pacing import Clock, Pace, SystemClock
from holdfast_storage.places import Place
from holdfast_storage.ranks import StoredRank
from holdfast_storage.retrying import Retry
from holdfast_storage.verified import verified

Read = Callable[[int, int], Iterable[memoryview]]
"""(first byte, end) of the payload → those bytes, in order, in parts of any size."""

GRACE_S = 3600.0
"""How long a file that belongs to nothing is left alone: longer than any writer pauses."""


class SetStore:
    """The sets of one job below a tier's URI."""

    def __init__(
        self,
        uri: str,
        job: str,
        *,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
        place: Place | None = None,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        grace_s: float = GRACE_S,
    ) -> None:
        """`options` are for fsspec's file system, `retry` for requests to object storage; `place`
        stands in for what `uri` names.

        Raises:
            InvalidJobError: `uri` or `job` is not what may be opened.
            StorageError: fsspec does not know that kind of storage here.
        """
        self.uri = uri
        self.job = checked_job(job)
        self._place = place or open_place(uri, options or {}, retry or Retry())
        self._clock = clock or SystemClock()
        self._wall = wall
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._writing: list[Generation] = []

    def write_rank(
        self,
        generation: Generation,
        rank: int,
        *,
        layout: bytes,
        manifest: bytes,
        read: Read,
        bytes_per_s: int = 0,
        stop: threading.Event | None = None,
    ) -> RankFile:
        """Store a rank's snapshot, whose encoded layout and manifest these are.

        `read` is asked for the payload in order, and its views are used before the next is asked
        for, or, in object storage, a part or two later: they must stay as they are until this
        returns. A file that is there already, whole and of the same bytes, is not sent again.

        Raises:
            CorruptError: the bytes are not those of the manifest; nothing appears.
            WriteStoppedError: `stop` was set; nothing appears.
            StorageError: the storage failed, or the set is complete with other bytes.
        """
        header = encode_header(layout, manifest)
        file = describe_file(header, manifest)
        content = decode_manifest(manifest)
        if (content.job, content.rank, content.generation) != (self.job, rank, generation):
            raise CorruptError(
                f"asked to store rank {rank} of generation {generation} of {self.job}, and the "
                f"manifest is of rank {content.rank} of {content.generation} of {content.job}"
            )
        path = f"{self._directory(generation)}/{file.file}"
        with self._busy(generation):
            if self._is_there(path, file, header):
                return file
            if self._place.size(self._manifest_path(generation)) is not None:
                raise StorageError(
                    f"generation {generation} of {self.job} is complete in {self.uri} with other "
                    f"bytes for rank {rank}: take another epoch or another job name"
                )
            stop = stop or threading.Event()
            pace = Pace(bytes_per_s, self._clock, stop)

            def parts() -> Iterator[memoryview]:
                pace.take(len(header))
                yield memoryview(header)
                for part in verified(read(0, file.payload_bytes), content, path):
                    pace.take(len(part))
                    yield part

            self._place.write(path, file.bytes, parts(), stop)
        return file

    def commit(self, generation: Generation, files: Sequence[RankFile]) -> None:
        """Make the set of `files`, one of each rank, complete; again is the same as once.

        Raises:
            CorruptError: a file is missing or not as described; the set stays incomplete.
            StorageError: the storage failed, or the set is complete with other files.
        """
        ordered = checked_files(files)
        directory = self._directory(generation)
        self._check_sizes(directory, ordered)
        first = StoredRank.open(self._place, f"{directory}/{ordered[0].file}", ordered[0])
        if first.content.world_size != len(ordered):
            raise CorruptError(
                f"generation {generation} of {self.job} was captured by "
                f"{first.content.world_size} ranks, and {len(ordered)} files were given"
            )
        stored = StoredSet(
            job=self.job,
            generation=generation,
            topology=first.topology,
            created=self._wall(),
            files=ordered,
        )
        if not self._place.create(self._manifest_path(generation), encode_set(stored)):
            self._check_same(generation, stored)
        self._point_to(generation)

    def complete(self) -> StoredSets:
        """Complete sets, newest first; `.rejected` names the others that have a manifest.

        Raises:
            StorageError: the storage cannot be listed.
        """
        return find_sets(self._place, self.job).stored_sets()

    def open_rank(self, stored: StoredSet, rank: int) -> StoredRank:
        """One rank's file of a complete set.

        Raises:
            CorruptError: the file is not the one that the set's manifest names.
            StorageError: the storage failed, or the set has no such rank.
        """
        if not 0 <= rank < stored.world_size or stored.job != self.job:
            raise StorageError(
                f"generation {stored.generation} of {stored.job} has ranks 0 to "
                f"{stored.world_size - 1}, and this is the tier of {self.job}: no rank {rank}"
            )
        path = f"{self._directory(stored.generation)}/{file_name(rank)}"
        return StoredRank.open(self._place, path, stored.files[rank])

    def clean(self, *, keep: int, keep_every: int) -> Cleaned:
        """Remove sets that need not be kept, and what belongs to none; see
        `holdfast_core.persisted_retention`. May be called again after any failure.

        Raises:
            InvalidJobError: `keep` or `keep_every` is out of range.
            StorageError: the storage failed; what was removed is removed.
        """
        with self._lock:
            writing = tuple(self._writing)
        return clean(
            self._place,
            find_sets(self._place, self.job),
            keep=keep,
            keep_every=keep_every,
            idle_since_s=self._wall() - self._grace_s,
            writing=writing,
        )

    @contextmanager
    def _busy(self, generation: Generation) -> Iterator[None]:
        with self._lock:
            self._writing.append(generation)
        try:
            yield
        finally:
            with self._lock:
                self._writing.remove(generation)

    def _directory(self, generation: Generation) -> str:
        return f"{self.job}/{set_name(generation)}"

    def _manifest_path(self, generation: Generation) -> str:
        return f"{self._directory(generation)}/{MANIFEST_FILE}"

    def _is_there(self, path: str, file: RankFile, header: bytes) -> bool:
        if self._place.size(path) != file.bytes:
            return False
        found = bytearray(len(header))
        self._place.read(path, 0, memoryview(found))
        return found == header

    def _check_sizes(self, directory: str, files: Sequence[RankFile]) -> None:
        for file in files:
            size = self._place.size(f"{directory}/{file.file}")
            if size != file.bytes:
                found = "missing" if size is None else f"{size} bytes"
                raise CorruptError(
                    f"{directory}/{file.file} in {self.uri} is {found}, and {file.bytes} were "
                    f"reported: the set stays incomplete; the next one is written from scratch"
                )

    def _check_same(self, generation: Generation, stored: StoredSet) -> None:
        path = self._manifest_path(generation)
        size = self._place.size(path) or 0
        data = bytearray(min(size, MANIFEST_BYTES_MAX))
        self._place.read(path, 0, memoryview(data))
        found = decode_set(bytes(data), job=self.job, generation=generation)
        if found.files != stored.files:
            raise StorageError(
                f"generation {generation} of {self.job} is complete in {self.uri} with other "
                f"files: take another epoch or another job name"
            )

    def _point_to(self, generation: Generation) -> None:
        """Write the hint, unless it points to something newer that is there."""
        path = f"{self.job}/{LATEST_FILE}"
        wanted = encode_latest(generation)
        size = self._place.size(path)
        if size is not None and size <= len(wanted) + 64:
            data = bytearray(size)
            self._place.read(path, 0, memoryview(data))
            found = decode_latest(bytes(data))
            if found == generation:
                return
            if found and found > generation and self._place.size(self._manifest_path(found)):
                return
        self._place.write(path, len(wanted), [memoryview(wanted)], threading.Event())
