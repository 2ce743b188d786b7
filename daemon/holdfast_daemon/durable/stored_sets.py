"""The durable tier as the loader needs it: `durable.loader.SetReader` over the storage library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_core.durable.choice import Found, StoredCopy, UnreadableCopy
from holdfast_core.durable.retention import SetState
from holdfast_core.errors import StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_storage.composed import PieceSource, RankSnapshot
from holdfast_storage.finding import find_sets, read_manifest
from holdfast_storage.marking import is_marked
from holdfast_storage.opening import open_root
from holdfast_storage.retrying import Retry
from holdfast_storage.roots import TierRoot
from holdfast_storage.sets import SetStore


class TierSets:
    """The sets of one job below a URI."""

    def __init__(self, uri: str, job: str, *, root: TierRoot | None = None) -> None:
        """`root`: the root that `uri` names, if it is open already. Raises InvalidJobError,
        StorageError."""
        self._uri, self._job = uri, job
        self._root = open_root(uri, {}, Retry()) if root is None else root
        self._store = SetStore(uri, job, root=self._root)

    def find(self) -> Found:
        """Find the job's sets. The mark is read only if there is no set, since a set is proof
        enough.

        Raises:
            StorageError: storage, or the manifest of a set, cannot be read. Such a set might be
                whole, so an older set must not be loaded instead.
        """
        looked = find_sets(self._root, self._job).sets
        for candidate in looked:
            if candidate.found.state is SetState.UNKNOWN:
                raise StorageError(f"generation {candidate.found.generation}: {candidate.reason}")
        found = Found(
            copies=tuple(
                StoredCopy(
                    generation=candidate.found.generation, world_size=candidate.stored.world_size
                )
                for candidate in looked
                if candidate.found.state is SetState.COMPLETE and candidate.stored is not None
            ),
            unreadable=tuple(
                UnreadableCopy(generation=candidate.found.generation, reason=candidate.reason)
                for candidate in looked
                if candidate.found.state is SetState.DAMAGED
            ),
        )
        if found.copies or found.unreadable:
            return found
        return replace(found, marked=is_marked(self._root, self._job))

    def open_rank(
        self, generation: Generation, rank: int, memory: Sequence[PieceSource] = ()
    ) -> RankSnapshot:
        """One rank's snapshot of a whole set; see `SetStore.open_rank`.

        Raises:
            CorruptError: the set is no longer whole, or a file is not the file that it names.
            StorageError: the storage failed.
        """
        stored = read_manifest(self._root, self._job, generation)
        return self._store.open_rank(stored, rank, memory)
