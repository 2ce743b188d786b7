"""Rank files that hold some experts and everything else, and the snapshots composed of them.

Two-level PEC (PEC §3.2, figure 4): each snapshot in memory captures K_snapshot experts of each
layer, and each copy in durable storage takes everything else and K_persist experts. After a fault
the surviving nodes restore fresh experts from memory; only what was lost with a node comes from the
persisted set, which is older, so tokens are lost. For each expert that a copy leaves out, its file
names the older set whose file holds it: always that set itself, never one that only names another.

An expert is left out by whole pieces, the units of the arena's digests. So every byte, from
whichever file or slot it is read, is verified by the digests of the trainer's copy, and nothing is
hashed a second time. Experts lie on pieces of their own wherever a policy leaves them out of
snapshots; an expert that shares a piece is in every file.

An expert whose parts lie on several ranks is never restored in an older version than the
snapshot's, because a rank that still has the snapshot in memory would continue with a newer part.
Each such rank names its part where storage has exactly this version, and writes it otherwise.

Pure: `holdfast_storage` reads and writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast_core.durable.rank_files import PieceRange
from holdfast_core.durable.sets import StoredSet
from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.choice import choose
from holdfast_core.experts.tables import Expert, ExpertTable, MoeLayer, Selection, layer_of
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, piece_count
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.snapshots.stored import StoredUnit
from holdfast_core.snapshots.units import UnitKey, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """Plan of a rank's file in a set."""

    pieces: tuple[PieceRange, ...]
    units: tuple[StoredUnit, ...]
    """For each expert that may be left out, its version and the set whose file holds it."""
    older: tuple[ExpertVersion, ...]
    """Versions of experts, of any rank, that a restore from the set may return instead of the newer
    versions in the snapshot."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSet:
    """The complete set on which a new one may build, and the versions in this rank's file of it."""

    stored: StoredSet
    experts: tuple[ExpertVersion, ...]
    """`Manifest.experts` and `older` in the file."""


def expert_runs(layout: Layout) -> dict[str, tuple[PieceRange, ...]]:
    """The pieces of each expert that shares none of its pieces with anything else."""
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
    """Whether `base` belongs to the past of `generation`: it is of the same epoch, or of the epoch
    that this one continued and not after the line. For anything older, it cannot be determined here
    whether training continued from it or abandoned it."""
    if base >= generation:
        return False
    if base.epoch == generation.epoch:
        return True
    before = line.generation if line is not None else None
    return before is not None and base.epoch == before.epoch and base <= before


def select_persisted(
    table: ExpertTable,
    k: int,
    memory: Mapping[UnitKey, Generation],
    persisted: Mapping[UnitKey, Generation],
) -> Selection:
    """The experts whose newest version in memory is persisted next (PEC §3.2, persist-PEC).

    A copy need not take the experts that its snapshot captured, because memory holds the newest
    version of every expert. The function chooses K of each layer, equally many of each rank: first
    those never persisted, then those whose persisted version is oldest, ties by unit. So none is
    left out forever. An expert whose newest version is already persisted is not chosen again; one
    that memory does not hold cannot be chosen.

    Args:
        memory: for each expert its newest version in memory.
        persisted: for each expert its newest version in storage.

    Raises:
        InvalidJobError: when `k` is below 1.
    """
    if k < 1:
        raise InvalidJobError(f"K of persistence is {k}; persist at least 1 expert of each layer")
    fresh = {
        unit for unit, held in memory.items() if unit not in persisted or persisted[unit] < held
    }
    layers = [
        replace(m, experts=tuple(expert for expert in m.experts if expert.unit in fresh))
        for m in table.layers
    ]

    def order(expert: Expert) -> tuple[bool, Generation]:
        held = persisted.get(expert.unit)
        return (held is not None, held or Generation(0, 0))

    candidates = sorted((e for layer in layers for e in layer.experts), key=order)
    # The oldest never give way, so that balance cannot keep an expert out of storage for ever.
    chosen = choose(layers, {m.layer: k for m in layers}, candidates, urgent=fresh)
    never = sum(unit not in persisted for unit in chosen)
    return Selection(
        units=tuple(chosen),
        reason=f"{k} experts of each layer, oldest in storage first: {len(chosen)} of the "
        f"{len(fresh)} that are newer in memory, {never} of them never persisted before",
    )


def plan_rank(layout: Layout, manifest: Manifest, base: BaseSet | None, k: int) -> RankPlan:
    """The plan of this snapshot's file, when K experts of each layer are persisted in a copy.

    All ranks make the same choice from the same base if their snapshots hold the same versions.
    Otherwise a copy holds some experts more or fewer, and nothing else changes.

    Raises:
        InvalidJobError: when `k` is below 1, or a unit's name cannot be read.
    """
    generation = manifest.generation
    versions = {expert.unit: expert for expert in manifest.experts}
    runs = {unit: found for unit, found in expert_runs(layout).items() if unit in versions}
    total = piece_count(manifest.payload_bytes, manifest.piece_bytes)
    kept: dict[str, StoredUnit] = {}
    older: tuple[ExpertVersion, ...] = ()
    reason = "all experts: there is no earlier copy to refer to"
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
        reason = f"{selection.reason}; {len(kept)} of this rank stay in older copies"
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


def _of_rank(base: BaseSet, manifest: Manifest) -> dict[str, StoredUnit]:
    stored = base.stored
    if stored.world_size != manifest.world_size:
        return {}
    file = stored.files[manifest.rank]
    return {u.unit: u for u in file.units} if file.layout_id == manifest.layout_id else {}


def _in_storage(stored: StoredSet) -> tuple[ExpertTable, dict[UnitKey, Generation]]:
    """The experts that one rank alone holds, by layer, and their versions in storage."""
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


def _older(base: BaseSet, versions: Mapping[str, ExpertVersion]) -> tuple[ExpertVersion, ...]:
    """This rank's records of the versions in storage of experts that the snapshot has newer. Where
    this rank has no record of a capture, its newest record before that."""
    recorded: dict[str, list[ExpertVersion]] = {}
    for record in base.experts:
        recorded.setdefault(record.unit, []).append(record)
    older: dict[str, ExpertVersion] = {}
    for each in (unit for file in base.stored.files for unit in file.units):
        known = [r for r in recorded.get(each.unit, ()) if r.generation <= each.version]
        newer = versions.get(each.unit)
        if known and newer is not None and newer.generation > each.version:
            older[each.unit] = max(known, key=lambda record: record.generation)
    return tuple(older[unit] for unit in sorted(older))


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A snapshot composed of several sources."""

    manifest: Manifest
    source_of: Mapping[int, int]
    """For each piece that does not come from the set's own file, the index of its source."""
    from_memory: int
    """Number of experts that memory holds in a version no older than the stored one."""
    from_storage: int
    older: int
    """Number of experts that are older than in the snapshot that was persisted."""


def compose(
    layout: Layout,
    own: Manifest,
    own_older: Sequence[ExpertVersion],
    units: Sequence[StoredUnit],
    holders: Mapping[Generation, tuple[int, Manifest]],
    memory: Sequence[tuple[int, Manifest]] = (),
) -> Composition:
    """The source of each piece, and the manifest of the result.

    An expert is taken from memory where a slot holds the version of the persisted snapshot, or the
    one in storage; otherwise from the file that the set names (PEC figure 4).

    Args:
        own: the manifest in the set's file of this rank.
        own_older: the older versions in that file (`RankPlan.older`).
        units: this rank's experts in the set's manifest.
        holders: this rank's files in the other sets that are named: index as a source, and
            manifest.
        memory: sealed snapshots of this rank in local memory: index as a source, and manifest.

    Raises:
        CorruptError: when a file does not hold what the set's manifest lists for it.
    """
    runs = expert_runs(layout)
    captured = _versions(own)
    digests, source_of = bytearray(own.digests), dict[int, int]()
    experts = dict(captured)
    from_memory = older = 0
    slots = [(i, m, _versions(m)) for i, m in memory if m.layout_id == own.layout_id]
    for unit in units:
        if unit.unit not in runs or unit.unit not in captured:
            raise CorruptError(f"the set lists {unit.unit}, but this rank's file does not")
        wanted = (captured[unit.unit].generation, unit.version)
        in_memory = _in_memory(unit.unit, wanted, slots)
        from_memory += in_memory is not None
        if in_memory is None and unit.held_in == own.generation:
            continue
        index, manifest, version = in_memory or _in_file(unit, own, holders)
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
"""Index and manifest of a source, and the expert's version in it."""


def _in_memory(
    unit: str,
    wanted: Iterable[Generation],
    slots: Sequence[tuple[int, Manifest, Mapping[str, ExpertVersion]]],
) -> _Found | None:
    """The first of the wanted versions that a slot holds."""
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
            f"generation {unit.held_in} does not hold version {unit.version} of {unit.unit}, "
            f"although the set of {own.generation} refers to it"
        )
    return index, manifest, version


def _versions(manifest: Manifest) -> dict[str, ExpertVersion]:
    return {expert.unit: expert for expert in manifest.experts}
