"""Sets of a job in its durable tier: written rank by rank, committed, listed, opened, cleaned.

All calls block and may be made from several threads. The daemon that holds a rank calls
`write_rank`, the leading daemon `commit` and `clean`, and a restore `complete` and `open_rank`. A
set becomes visible with its manifest, and is whole then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from holdfast_core.durable.rank_files import (
    PartialFile,
    bytes_of_runs,
    describe_file,
    encode_header,
    file_name,
)
from holdfast_core.durable.sets import (
    LATEST_FILE,
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    StoredSet,
    checked_files,
    checked_job,
    decode_latest,
    encode_latest,
    encode_set,
    set_name,
)
from holdfast_core.durable.sparse_files import BaseSet, RankPlan, compose, plan_rank
from holdfast_core.errors import CorruptError, InvalidJobError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout, decode_manifest, piece_count
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.stored import RankFile, StoredUnit
from holdfast_storage.cleaning import Cleaned, clean
from holdfast_storage.composed import ComposedRank, PieceSource, RankSnapshot
from holdfast_storage.failing import WriteStoppedError
from holdfast_storage.finding import StoredSets, find_sets, lacks, read_manifest, unresolved
from holdfast_storage.marking import mark
from holdfast_storage.opening import open_root
from holdfast_storage.ranks import StoredRank
from holdfast_storage.retrying import Retry
from holdfast_storage.roots import TierRoot
from holdfast_storage.verified import verified

Read = Callable[[int, int], Iterable[memoryview]]
"""Function from (first byte, end) of the payload to those bytes, in order, in parts of any size."""

GRACE_S = 3600.0
"""Time for which a file that belongs to no set is left alone: longer than any writer pauses."""


class SetStore:
    """The sets of one job below a tier's URI."""

    def __init__(
        self,
        uri: str,
        job: str,
        *,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
        root: TierRoot | None = None,
        wall: Callable[[], float] = time.time,
        grace_s: float = GRACE_S,
    ) -> None:
        """`options` are for fsspec's file system, `retry` for requests to object storage; `root`
        replaces the storage that `uri` names.

        Raises:
            InvalidJobError: `uri` or `job` is not valid.
            StorageError: fsspec cannot open that kind of storage here.
        """
        self.uri = uri
        self.job = checked_job(job)
        self._root = root or open_root(uri, options or {}, retry or Retry())
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
        stop: threading.Event | None = None,
        plan: RankPlan | None = None,
    ) -> RankFile:
        """Store a rank's snapshot, given its encoded layout and manifest: all of it, or the pieces
        that `plan_rank` chose.

        `read` is called for the stored parts of the payload in order. Its views are used before the
        next is requested or, in object storage, a part or two later: they must not change until
        this returns. A file that is already there, whole and with the same bytes, is not sent
        again.

        Raises:
            CorruptError: the bytes do not match the manifest; nothing appears.
            WriteStoppedError: `stop` was set; nothing appears.
            StorageError: the storage failed, or the set is complete with other bytes.
        """
        content = decode_manifest(manifest)
        size = piece_count(content.payload_bytes, content.piece_bytes)
        runs = plan.pieces if plan else ((0, size),)
        whole = plan is None or (runs == ((0, size),) and not plan.older)
        sparse = None if plan is None or whole else PartialFile(pieces=runs, older=plan.older)
        header = encode_header(layout, manifest, sparse)
        file = describe_file(header, manifest, plan.units if plan else (), sparse)
        if (content.job, content.rank, content.generation) != (self.job, rank, generation):
            raise CorruptError(
                f"asked to store rank {rank} of generation {generation} of {self.job}, and the "
                f"manifest is of rank {content.rank} of {content.generation} of {content.job}"
            )
        path = f"{self._directory(generation)}/{file.file}"
        # Nothing to write if the same file is there; a complete set is never changed.
        with self._busy(generation):
            if self._is_there(path, file, header):
                return file
            if self._root.size(self._manifest_path(generation)) is not None:
                raise StorageError(
                    f"generation {generation} of {self.job} is complete in {self.uri} with other "
                    f"bytes for rank {rank}: take another epoch or another job name"
                )
            ended = stop or threading.Event()

            # Header and payload, each piece verified before a byte of it is sent.
            def parts() -> Iterator[memoryview]:
                yield memoryview(header)
                for run in runs:
                    first = run[0] * content.piece_bytes
                    parts_read = read(first, first + bytes_of_runs([run], content))
                    for part in verified(parts_read, content, path, run):
                        if ended.is_set():
                            raise WriteStoppedError(
                                f"writing {path} was stopped; nothing of it is visible"
                            )
                        yield part

            self._root.write(path, file.bytes, parts(), ended)
        return file

    def plan_rank(
        self, layout: bytes, manifest: Manifest, experts: int, base: Generation | None
    ) -> RankPlan | None:
        """Plan the file of a snapshot. It holds `experts` experts of each layer, those with the
        oldest versions in storage, and for the others the names of the sets that hold them, taken
        from the complete set `base`. None where all files hold all experts. If the base cannot be
        used, the file holds all experts.

        Raises:
            StorageError: the storage failed.
        """
        if not experts or not manifest.experts:
            return None
        base_set = None
        with suppress(CorruptError):
            if base is not None:
                stored = read_manifest(self._root, self.job, base)
                if manifest.rank < stored.world_size and stored.files[manifest.rank].units:
                    file = self._open_file(stored, manifest.rank)
                    base_set = BaseSet(stored=stored, experts=(*file.content.experts, *file.older))
        return plan_rank(decode_layout(layout), manifest, base_set, experts)

    def commit(self, generation: Generation, files: Sequence[RankFile]) -> None:
        """Complete the set of `files`, one of each rank; a second call changes nothing. The job's
        mark is written before the first set is complete.

        Raises:
            CorruptError: a file is missing or not as described; the set stays incomplete.
            StorageError: the storage failed, or the set is complete with other files.
            InvalidJobError: the set names so many experts that nobody would read its manifest.
        """
        ordered = checked_files(files, generation)
        directory = self._directory(generation)
        self._check_sizes(directory, ordered)
        self._check_named(generation, ordered)
        first = StoredRank.open(self._root, f"{directory}/{ordered[0].file}", ordered[0])
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
        encoded = encode_set(stored)
        if len(encoded) > MANIFEST_BYTES_MAX:
            named = sum(len(file.units) for file in ordered)
            raise InvalidJobError(
                f"the manifest of generation {generation} of {self.job} would have {len(encoded)} "
                f"bytes for {named} experts of all ranks, more than the {MANIFEST_BYTES_MAX} that "
                f"are read: leave persistence.experts out, or spread the experts over more ranks"
            )
        mark(self._root, self.job)
        if not self._root.create(self._manifest_path(generation), encoded):
            self._check_same(generation, stored)
        self._point_to(generation)

    def complete(self) -> StoredSets:
        """Complete sets, newest first; `.rejected` names the others that have a manifest.

        Raises:
            StorageError: the storage cannot be listed.
        """
        return find_sets(self._root, self.job).stored_sets()

    def open_rank(
        self, stored: StoredSet, rank: int, memory: Sequence[PieceSource] = ()
    ) -> RankSnapshot:
        """One rank's snapshot of a complete set, composed of all files that hold parts of it.

        Args:
            memory: the rank's newest snapshots in memory, if any; experts that they hold in the
                version that this set holds or names are read from there.

        Raises:
            CorruptError: a file is not the file that its set's manifest names.
            StorageError: the storage failed, or the set has no such rank.
        """
        own = self._open_file(stored, rank)
        units = own.file.units
        if all(u.held_in == stored.generation for u in units) and not (units and memory):
            return own
        others = sorted({u.held_in for u in units} - {stored.generation})
        files = [self._open_file(self._named(each, rank, units), rank) for each in others]
        sources: list[PieceSource] = [own, *files, *memory]
        first = 1 + len(files)
        composition = compose(
            decode_layout(own.layout),
            own.content,
            own.older,
            units,
            {each: (i, files[i - 1].content) for i, each in enumerate(others, start=1)},
            [(i, each.content) for i, each in enumerate(memory, start=first)],
        )
        return ComposedRank.of(own.layout, own.topology, composition, sources)

    def _named(self, generation: Generation, rank: int, units: Sequence[StoredUnit]) -> StoredSet:
        """The set of `generation`, checked to hold those of `units` that are expected in it."""
        stored = read_manifest(self._root, self.job, generation)
        problem = lacks(stored, generation, rank, units)
        if problem:
            raise CorruptError(problem)
        return stored

    def _open_file(self, stored: StoredSet, rank: int) -> StoredRank:
        if not 0 <= rank < stored.world_size or stored.job != self.job:
            raise StorageError(
                f"generation {stored.generation} of {stored.job} has ranks 0 to "
                f"{stored.world_size - 1}, and this is the tier of {self.job}: no rank {rank}"
            )
        path, named = f"{self._directory(stored.generation)}/{file_name(rank)}", stored.files[rank]
        size = self._root.size(path)
        if size != named.bytes:
            there = "missing" if size is None else f"{size} bytes long"
            raise CorruptError(
                f"{path} in {self.uri} is {there} and should have {named.bytes} bytes"
            )
        return StoredRank.open(self._root, path, stored.files[rank])

    def clean(self, *, keep: int, keep_every: int) -> Cleaned:
        """Remove sets that need not be kept, and files that belong to none; see
        `holdfast_core.durable.retention`. May be called again after any failure. First, the hint
        is pointed to the newest set: a writer that was delayed between reading and writing it may
        have set it back.

        Raises:
            InvalidJobError: `keep` or `keep_every` is out of range.
            StorageError: the storage failed; some files may already be removed.
        """
        with self._lock:
            writing = tuple(self._writing)
        findings = find_sets(self._root, self.job)
        if whole := findings.stored_sets():
            self._point_to(whole[0].generation)
        return clean(
            self._root,
            findings,
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
        if self._root.size(path) != file.bytes:
            return False
        stored = bytearray(len(header))
        self._root.read(path, 0, memoryview(stored))
        return stored == header

    def _check_sizes(self, directory: str, files: Sequence[RankFile]) -> None:
        for file in files:
            size = self._root.size(f"{directory}/{file.file}")
            if size != file.bytes:
                there = "missing" if size is None else f"{size} bytes"
                raise CorruptError(
                    f"{directory}/{file.file} in {self.uri} is {there}, and {file.bytes} were "
                    f"reported: the set stays incomplete; the next one is written from scratch"
                )

    def _check_named(self, generation: Generation, files: Sequence[RankFile]) -> None:
        """Check that the sets that these files name exist; otherwise this set would never be
        complete."""
        if not any(unit.held_in != generation for file in files for unit in file.units):
            return
        looked = {each.found.generation: each for each in find_sets(self._root, self.job).sets}
        problem = unresolved(files, generation, looked)
        if problem:
            raise CorruptError(f"generation {generation} of {self.job} stays incomplete: {problem}")

    def _check_same(self, generation: Generation, stored: StoredSet) -> None:
        committed = read_manifest(self._root, self.job, generation)
        if committed.files != stored.files:
            raise StorageError(
                f"generation {generation} of {self.job} is complete in {self.uri} with other "
                f"files: take another epoch or another job name"
            )

    def _point_to(self, generation: Generation) -> None:
        """Write the hint, unless it already points to a newer set that exists."""
        path = f"{self.job}/{LATEST_FILE}"
        wanted = encode_latest(generation)
        size = self._root.size(path)
        if size is not None and size <= len(wanted) + 64:
            data = bytearray(size)
            self._root.read(path, 0, memoryview(data))
            pointed = decode_latest(bytes(data))
            if pointed == generation:
                return
            if pointed and pointed > generation and self._root.size(self._manifest_path(pointed)):
                return
        self._root.write(path, len(wanted), [memoryview(wanted)], threading.Event())
