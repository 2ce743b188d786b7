"""The sets in a job's directory: the complete ones, and the faults of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast_core.durable.retention import FoundSet, SetState
from holdfast_core.durable.sets import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    StoredSet,
    decode_set,
    parse_set_name,
    set_name,
)
from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.stored import RankFile, StoredUnit
from holdfast_storage.roots import StoredFile, TierRoot


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A set that has a manifest but is not complete, and the reason."""

    generation: Generation
    reason: str


class StoredSets(list[StoredSet]):
    """Complete sets, newest first."""

    def __init__(self, sets: Iterable[StoredSet], rejected: Iterable[Rejected]) -> None:
        super().__init__(sets)
        self.rejected = tuple(rejected)
        """Sets with a manifest that are not complete, newest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """One set in storage."""

    found: FoundSet
    items: Mapping[str, StoredFile]
    """Its files, by name."""
    stored: StoredSet | None
    """Content of its manifest, or None if that cannot be read."""
    reason: str
    """Reason why it is not complete; empty when it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """All sets of a job, newest first."""

    job: str
    sets: tuple[Looked, ...]

    def stored_sets(self) -> StoredSets:
        """Complete sets, and rejected ones; sets that were never committed are left out."""
        whole = [s.stored for s in self.sets if s.found.state is SetState.COMPLETE and s.stored]
        bad = [s for s in self.sets if s.found.state in (SetState.DAMAGED, SetState.UNKNOWN)]
        return StoredSets(
            whole, [Rejected(generation=s.found.generation, reason=s.reason) for s in bad]
        )


def find_sets(root: TierRoot, job: str) -> Findings:
    """List the job's directory and read the manifest of each set.

    Raises:
        StorageError: the directory cannot be listed.
    """
    sets: dict[Generation, dict[str, StoredFile]] = {}
    for item in root.files(job):
        names = item.path.split("/")[1:]
        generation = parse_set_name(names[0]) if len(names) == 2 else None
        if generation is not None:
            sets.setdefault(generation, {})[names[1]] = item
    newest_first = sorted(sets.items(), reverse=True, key=lambda pair: pair[0])
    looked = {g: _look(root, job, g, of) for g, of in newest_first}
    resolved = [_resolved(each, looked) for each in looked.values()]
    needed = frozenset[Generation]().union(
        *(each.found.needs for each in resolved if each.found.state is SetState.COMPLETE)
    )
    return Findings(job=job, sets=tuple(_as_holder(each, needed) for each in resolved))


def unresolved(
    files: Sequence[RankFile], generation: Generation, found: Mapping[Generation, Looked]
) -> str:
    """Why the sets in `found` do not hold every expert that `files`, of a set of `generation`,
    name; empty when they do."""
    for file in files:
        named: dict[Generation, list[StoredUnit]] = {}
        for unit in file.units:
            if unit.held_in != generation:
                named.setdefault(unit.held_in, []).append(unit)
        for held_in, units in named.items():
            at = found.get(held_in)
            if at is None or at.stored is None:
                why = at.reason if at is not None else "it is not there"
                return f"it needs generation {held_in}: {why}"
            problem = lacks(at.stored, held_in, file.rank, units)
            if problem:
                return problem
            there = at.items.get(file.file)
            if there is None or there.bytes != at.stored.files[file.rank].bytes:
                return f"it needs {file.file} of generation {held_in}, which is not whole"
    return ""


def _as_holder(looked: Looked, needed: Collection[Generation]) -> Looked:
    """`looked`, but as a holder where a complete set names it and it lacks only older sets."""
    found = looked.found
    if found.generation not in needed or found.state is not SetState.DAMAGED:
        return looked
    if looked.stored is None or _missing(looked.stored, looked.items):
        return looked
    return replace(looked, found=replace(found, state=SetState.HOLDER))


def lacks(stored: StoredSet, generation: Generation, rank: int, units: Sequence[StoredUnit]) -> str:
    """Reason naming the first of `units` that the rank's file of this set should hold but does not;
    empty when it holds all."""
    units_here = stored.files[rank].units if rank < stored.world_size else ()
    for unit in units:
        if unit.held_in == generation and unit not in units_here:
            return f"generation {generation} does not hold version {unit.version} of {unit.unit}"
    return ""


def _resolved(looked: Looked, found: Mapping[Generation, Looked]) -> Looked:
    """`looked`, but not complete where experts that it names in other sets are missing."""
    stored, state = looked.stored, looked.found.state
    if stored is None:
        return looked
    reason = ""
    if state is SetState.COMPLETE:
        reason = unresolved(stored.files, stored.generation, found)
    if reason:
        state = SetState.DAMAGED
        if any(found[g].found.state is SetState.UNKNOWN for g in stored.needs if g in found):
            state = SetState.UNKNOWN
    return replace(
        looked,
        found=replace(looked.found, state=state, needs=stored.needs),
        reason=reason or looked.reason,
    )


def _look(
    root: TierRoot, job: str, generation: Generation, items: Mapping[str, StoredFile]
) -> Looked:
    stored, state, reason = None, SetState.UNCOMMITTED, "it has no manifest"
    if manifest := items.get(MANIFEST_FILE):
        try:
            stored = read_manifest(root, job, generation, manifest.bytes)
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


def read_manifest(
    root: TierRoot, job: str, generation: Generation, nbytes: int | None = None
) -> StoredSet:
    """Content of a set's manifest.

    Args:
        nbytes: size of the manifest, where known from a listing.

    Raises:
        CorruptError: it is missing, damaged, or of another set.
        StorageError: the storage failed.
    """
    path = f"{job}/{set_name(generation)}/{MANIFEST_FILE}"
    size = root.size(path) if nbytes is None else nbytes
    if size is None:
        raise CorruptError(f"{path} is not there: the set was removed, or never completed")
    if size > MANIFEST_BYTES_MAX:
        raise CorruptError(f"{path} has {size} bytes, more than {MANIFEST_BYTES_MAX}")
    data = bytearray(size)
    root.read(path, 0, memoryview(data))
    return decode_set(bytes(data), job=job, generation=generation)


def _missing(stored: StoredSet, items: Mapping[str, StoredFile]) -> str:
    for file in stored.files:
        if file.file not in items:
            return f"{file.file} is missing"
        size = items[file.file].bytes
        if size != file.bytes:
            return f"{file.file} has {size} bytes instead of {file.bytes}"
    return ""
