"""Ranks' files that hold some experts and all else, and the snapshots that they make together.

Two-level PEC (PEC §3.2): a copy in durable storage takes all that is no expert and K experts of
each layer; of each other expert it names the older set whose file holds it. An expert is left out
by whole pieces, which the arena's digests are of, so that whatever is read, from whichever file or
slot, is verified by the digests that the trainer's copy had; nothing is hashed anew. Experts lie
on pieces of their own wherever a policy leaves them out of snapshots; one that does not is in every
file. An expert whose parts lie on several ranks is never given in an older version than the
snapshot's: a rank that still has the snapshot in memory would go on with a newer part. Each rank
names its part where storage has this very version, and writes it otherwise.

A file names the set that holds an expert, never one that only names another in turn. Pure:
`holdfast_storage` reads and writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast_core.durable.rank_files import PieceRange
from holdfast_core.durable.sets import StoredSet
from holdfast_core.durable.two_level import select_persisted
from holdfast_core.errors import CorruptError
from holdfast_core.experts.tables import Expert, ExpertTable, MoeLayer, layer_of
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, piece_count
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.snapshots.stored import StoredUnit
from holdfast_core.snapshots.units import UnitKey, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What a rank's file of a set holds."""

    pieces: tuple[PieceRange, ...]
    units: tuple[StoredUnit, ...]
    """Of each expert that may be left out: its version, and the set whose file holds it."""
    older: tuple[ExpertVersion, ...]
    """Versions of experts, of any rank, that the set may give back instead of those that the
    snapshot knows."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The complete set that a new one may name sets of, and what this rank's file of it says."""

    stored: StoredSet
    experts: tuple[ExpertVersion, ...]
    """`Manifest.experts` and `older` in the file."""


def expert_runs(layout: Layout) -> dict[str, tuple[PieceRange, ...]]:
    """For each expert that shares none of its pieces with anything else, these pieces."""
    size = layout.piece_bytes
    holds: dict[int, set[str]] = {}
    pieces: dict[str, set[int]] = {}
    for entry in layout.entries:
        if entry.nbytes:
            first, last = entry.offset // size, (entry.offset + entry.nbytes - 1) // size
            for piece in range(first, last + 1):
                holds.setdefault(piece, set()).add(entry.unit)
                pieces.setdefault(entry.unit, set()).add(piece)
    extras = layout.extras_offset // size
    return {
        unit: runs_of_pieces(found)
        for unit, found in pieces.items()
        if UnitKey.parse(unit).kind is UnitKind.EXPERT
        and all(len(holds[piece]) == 1 and piece < extras for piece in found)
    }


def runs_of_pieces(pieces: Iterable[int]) -> tuple[PieceRange, ...]:
    """Pieces as runs [first, end), ascending."""
    runs: list[PieceRange] = []
    for piece in sorted(pieces):
        if runs and runs[-1][1] == piece:
            runs[-1] = (runs[-1][0], piece + 1)
        else:
            runs.append((piece, piece + 1))
    return tuple(runs)


def may_build_on(base: Generation, generation: Generation, line: Line | None) -> bool:
    """Whether what `base` holds belongs to the past of `generation`: it is of the same epoch, or of
    the epoch that this one went on from and not after the line. Of what is further back nobody
    knows here whether training went on from it or beside it."""
    if base >= generation:
        return False
    if base.epoch == generation.epoch:
        return True
    before = line.generation if line is not None else None
    return before is not None and base.epoch == before.epoch and base <= before


def plan_rank(layout: Layout, manifest: Manifest, base: Base | None, k: int) -> RankPlan:
    """What the file of this snapshot holds, when K experts of each layer are persisted in a copy.

    All ranks come to the same choice from the same base where they know the same versions. Where
    they do not, a copy holds some experts more or fewer, and nothing else changes.

    Raises:
        InvalidJobError: `k` is below 1, or a unit's name cannot be read.
    """
    generation = manifest.generation
    versions = {expert.unit: expert for expert in manifest.experts}
    runs = {unit: found for unit, found in expert_runs(layout).items() if unit in versions}
    total = piece_count(manifest.payload_bytes, manifest.piece_bytes)
    kept: dict[str, StoredUnit] = {}
    older: tuple[ExpertVersion, ...] = ()
    reason = "all experts: there is no copy before it that it could name"
    known = _of_rank(base, manifest) if base is not None else {}
    if base is not None and known:
        table, persisted = _in_storage(base.stored)
        memory = {UnitKey.parse(unit): version.generation for unit, version in versions.items()}
        selection = select_persisted(table, k, memory, persisted)
        chosen, alone = {str(unit) for unit in selection.units}, set(map(str, table.units))
        kept = {
            unit: known[unit]
            for unit in runs
            if unit in known
            and known[unit].version <= versions[unit].generation
            and (
                known[unit].version == versions[unit].generation
                or (unit in alone and unit not in chosen)
            )
        }
        older = _older(base, versions)
        reason = f"{selection.reason}; {len(kept)} of this rank are named where they are"
    units = tuple(
        kept.get(unit)
        or StoredUnit(unit=unit, version=versions[unit].generation, held_in=generation)
        for unit in sorted(runs)
    )
    left_out = {piece for unit in kept for first, end in runs[unit] for piece in range(first, end)}
    return RankPlan(
        pieces=runs_of_pieces(set(range(total)) - left_out),
        units=units,
        older=older,
        reason=reason,
    )


def _of_rank(base: Base, manifest: Manifest) -> dict[str, StoredUnit]:
    stored = base.stored
    if stored.world_size != manifest.world_size:
        return {}
    file = stored.files[manifest.rank]
    return {u.unit: u for u in file.units} if file.layout_id == manifest.layout_id else {}


def _in_storage(stored: StoredSet) -> tuple[ExpertTable, dict[UnitKey, Generation]]:
    """The experts that one rank holds alone, by layer, and their versions in storage."""
    ranks = Counter(unit.unit for file in stored.files for unit in file.units)
    layers: dict[int, list[Expert]] = {}
    versions: dict[UnitKey, Generation] = {}
    for file in stored.files:
        for each in file.units:
            if ranks[each.unit] == 1:
                unit = UnitKey.parse(each.unit)
                versions[unit] = each.version
                layers.setdefault(layer_of(unit), []).append(
                    Expert(
                        unit=unit,
                        nbytes=0,
                        gradient_bytes=0,
                        owners=(file.rank,),
                        stage=0,
                        share=file.rank,
                    )
                )
    table = ExpertTable(
        layers=tuple(
            MoeLayer(layer=layer, stage=0, experts=tuple(sorted(of, key=lambda e: e.unit)))
            for layer, of in sorted(layers.items())
        ),
        dense_bytes=0,
    )
    return table, versions


def _older(base: Base, versions: Mapping[str, ExpertVersion]) -> tuple[ExpertVersion, ...]:
    """This rank's word on versions that the base has in storage and the snapshot has newer. Of a
    capture that this rank did not hear of, its word on the newest one before."""
    words: dict[str, list[ExpertVersion]] = {}
    for word in base.experts:
        words.setdefault(word.unit, []).append(word)
    found: dict[str, ExpertVersion] = {}
    for each in (unit for file in base.stored.files for unit in file.units):
        known = [w for w in words.get(each.unit, ()) if w.generation <= each.version]
        newer = versions.get(each.unit)
        if known and newer is not None and newer.generation > each.version:
            found[each.unit] = max(known, key=lambda word: word.generation)
    return tuple(found[unit] for unit in sorted(found))


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A snapshot that is put together of several sources."""

    manifest: Manifest
    source_of: Mapping[int, int]
    """For each piece that does not come from the set's own file, the index of its source."""
    from_memory: int
    """Experts that memory holds in a version that is no older than the stored one."""
    from_storage: int
    older: int
    """Experts that are older than they were in the snapshot that was persisted."""


def compose(
    layout: Layout,
    own: Manifest,
    own_older: Sequence[ExpertVersion],
    units: Sequence[StoredUnit],
    holders: Mapping[Generation, tuple[int, Manifest]],
    memory: Sequence[tuple[int, Manifest]] = (),
) -> Composition:
    """What each piece is read from, and the manifest of the result.

    An expert is taken from memory where a slot holds the version of the persisted snapshot, or the
    one in storage; otherwise from the file that the set names (PEC figure 4).

    Args:
        own: the manifest in the set's file of this rank.
        own_older: the older versions that the file tells of.
        units: what the set's manifest says of this rank's experts.
        holders: the files of other sets that are named: index as a source, and manifest.
        memory: sealed snapshots of this rank in local memory, likewise.

    Raises:
        CorruptError: a file does not hold what the set says that it holds.
    """
    runs = expert_runs(layout)
    captured = _versions(own)
    digests, source_of = bytearray(own.digests), dict[int, int]()
    experts = dict(captured)
    from_memory = older = 0
    slots = [(i, m, _versions(m)) for i, m in memory if m.layout_id == own.layout_id]
    for unit in units:
        if unit.unit not in runs or unit.unit not in captured:
            raise CorruptError(f"the set says where {unit.unit} is, and its file does not know it")
        wanted = (captured[unit.unit].generation, unit.version)
        found = _in_memory(unit.unit, wanted, slots)
        from_memory += found is not None
        if found is None and unit.held_in == own.generation:
            continue
        index, manifest, version = found or _in_file(unit, own, holders)
        experts[unit.unit] = version
        older += version.generation != captured[unit.unit].generation
        for first, end in runs[unit.unit]:
            digests[8 * first : 8 * end] = manifest.digests[8 * first : 8 * end]
            source_of.update(dict.fromkeys(range(first, end), index))
    return Composition(
        manifest=replace(
            own,
            digests=bytes(digests),
            experts=tuple(experts[unit] for unit in captured),
            older=tuple(own_older),
        ),
        source_of=source_of,
        from_memory=from_memory,
        from_storage=len(units) - from_memory,
        older=older,
    )


_Found = tuple[int, Manifest, ExpertVersion]
"""Index and manifest of a source, and the version in it."""


def _in_memory(
    unit: str,
    wanted: Iterable[Generation],
    slots: Sequence[tuple[int, Manifest, Mapping[str, ExpertVersion]]],
) -> _Found | None:
    """The first of the versions that a slot holds."""
    return next(
        (
            (index, manifest, held[unit])
            for version in wanted
            for index, manifest, held in slots
            if unit in held and held[unit].generation == version
        ),
        None,
    )


def _in_file(
    unit: StoredUnit, own: Manifest, holders: Mapping[Generation, tuple[int, Manifest]]
) -> _Found:
    index, manifest = holders[unit.held_in]
    version = _versions(manifest).get(unit.unit)
    fits = manifest.layout_id == own.layout_id
    if not fits or version is None or version.generation != unit.version:
        raise CorruptError(
            f"generation {unit.held_in} does not hold version {unit.version} of {unit.unit}, as "
            f"the manifest of {own.generation} says"
        )
    return index, manifest, version


def _versions(manifest: Manifest) -> dict[str, ExpertVersion]:
    return {expert.unit: expert for expert in manifest.experts}
