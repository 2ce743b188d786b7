"""What lies in a job's directory: which sets are complete, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.persisted_retention import FoundSet, SetState
from holdfast_core.persisted_sets import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    StoredSet,
    decode_set,
    parse_set_name,
)
from holdfast_core.values import Generation
from holdfast_storage.places import Item, Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A set that has a manifest and is not complete, and why."""

    generation: Generation
    reason: str


class StoredSets(list[StoredSet]):
    """Complete sets, newest first."""

    def __init__(self, sets: Iterable[StoredSet], rejected: Iterable[Rejected]) -> None:
        super().__init__(sets)
        self.rejected = tuple(rejected)
        """Newest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """One set as it was found."""

    found: FoundSet
    items: Mapping[str, Item]
    """Its files, by name."""
    stored: StoredSet | None
    """What its manifest says, if that can be read."""
    reason: str
    """Why it is not complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """All sets of a job, newest first."""

    job: str
    sets: tuple[Looked, ...]

    def stored_sets(self) -> StoredSets:
        """Without those that nobody committed."""
        whole = [s.stored for s in self.sets if s.found.state is SetState.COMPLETE and s.stored]
        bad = [s for s in self.sets if s.found.state in (SetState.DAMAGED, SetState.UNKNOWN)]
        return StoredSets(
            whole, [Rejected(generation=s.found.generation, reason=s.reason) for s in bad]
        )


def find_sets(place: Place, job: str) -> Findings:
    """List the job's directory and read the manifest of each set.

    Raises:
        StorageError: the directory cannot be listed.
    """
    sets: dict[Generation, dict[str, Item]] = {}
    for item in place.files(job):
        names = item.path.split("/")[1:]
        generation = parse_set_name(names[0]) if len(names) == 2 else None
        if generation is not None:
            sets.setdefault(generation, {})[names[1]] = item
    newest_first = sorted(sets.items(), reverse=True, key=lambda pair: pair[0])
    return Findings(
        job=job, sets=tuple(_look(place, job, generation, of) for generation, of in newest_first)
    )


def _look(place: Place, job: str, generation: Generation, items: Mapping[str, Item]) -> Looked:
    stored, state, reason = None, SetState.UNCOMMITTED, "it has no manifest"
    if manifest := items.get(MANIFEST_FILE):
        try:
            stored = _read_manifest(place, manifest, job, generation)
            reason = _missing(stored, items)
            state = SetState.DAMAGED if reason else SetState.COMPLETE
        except CorruptError as error:
            state, reason = SetState.DAMAGED, str(error)
        except StorageError as error:
            state, reason = SetState.UNKNOWN, str(error)
    modified_s = max(item.modified_s for item in items.values())
    return Looked(
        found=FoundSet(generation=generation, state=state, modified_s=modified_s),
        items=items,
        stored=stored,
        reason=reason,
    )


def _read_manifest(place: Place, item: Item, job: str, generation: Generation) -> StoredSet:
    if item.bytes > MANIFEST_BYTES_MAX:
        raise CorruptError(f"{item.path} has {item.bytes} bytes, more than {MANIFEST_BYTES_MAX}")
    data = bytearray(item.bytes)
    place.read(item.path, 0, memoryview(data))
    return decode_set(bytes(data), job=job, generation=generation)


def _missing(stored: StoredSet, items: Mapping[str, Item]) -> str:
    for file in stored.files:
        if file.file not in items:
            return f"{file.file} is missing"
        size = items[file.file].bytes
        if size != file.bytes:
            return f"{file.file} has {size} bytes instead of {file.bytes}"
    return ""
