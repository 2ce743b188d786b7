"""The durable tier as the loader needs it: `loader.StoredSets` over the storage library."""

from __future__ import annotations

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.persisted_retention import SetState
from holdfast_core.persisted_sets import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    StoredSet,
    decode_set,
    set_name,
)
from holdfast_core.stored_line import Found, StoredCopy
from holdfast_core.values import Generation
from holdfast_storage.finding import find_sets
from holdfast_storage.opening import open_place
from holdfast_storage.places import Place
from holdfast_storage.ranks import StoredRank
from holdfast_storage.retrying import Retry
from holdfast_storage.sets import SetStore


class TierSets:
    """The sets of one job below a URI."""

    def __init__(self, uri: str, job: str, *, place: Place | None = None) -> None:
        """`place`: what is behind `uri`, where that is known. Raises InvalidJobError,
        StorageError."""
        self._uri, self._job = uri, job
        self._place = open_place(uri, {}, Retry()) if place is None else place
        self._store = SetStore(uri, job, place=self._place)

    def find(self) -> Found:
        """What is there.

        Raises:
            StorageError: storage cannot be read, or the manifest of a set cannot: that set might
                be whole, so that an older one must not be taken instead.
        """
        looked = find_sets(self._place, self._job).sets
        for one in looked:
            if one.found.state is SetState.UNKNOWN:
                raise StorageError(f"generation {one.found.generation}: {one.reason}")
        return Found(
            copies=tuple(
                StoredCopy(generation=one.found.generation, world_size=one.stored.world_size)
                for one in looked
                if one.found.state is SetState.COMPLETE and one.stored is not None
            ),
            unreadable=tuple(
                (str(one.found.generation), one.reason)
                for one in looked
                if one.found.state is SetState.DAMAGED
            ),
        )

    def open_rank(self, generation: Generation, rank: int) -> StoredRank:
        """One rank's snapshot of a whole set.

        Raises:
            CorruptError: the set is not whole any more, or the file is not the one that it names.
            StorageError: the storage failed.
        """
        directory = f"{self._job}/{set_name(generation)}"
        stored = self._read_manifest(f"{directory}/{MANIFEST_FILE}", generation)
        if rank < stored.world_size:
            named = stored.files[rank]
            size = self._place.size(f"{directory}/{named.file}")
            if size != named.bytes:
                there = "missing" if size is None else f"{size} bytes long"
                raise CorruptError(
                    f"{directory}/{named.file} in {self._uri} is {there} and should have "
                    f"{named.bytes} bytes"
                )
        return self._store.open_rank(stored, rank)

    def _read_manifest(self, path: str, generation: Generation) -> StoredSet:
        size = self._place.size(path)
        if size is None:
            raise CorruptError(f"generation {generation} is no longer in {self._uri}")
        if size > MANIFEST_BYTES_MAX:
            raise CorruptError(f"{path} has {size} bytes, more than {MANIFEST_BYTES_MAX}")
        data = bytearray(size)
        self._place.read(path, 0, memoryview(data))
        return decode_set(bytes(data), job=self._job, generation=generation)
