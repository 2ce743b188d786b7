"""The plan of the bytes that this rank captures, and of their places in its slot.

The base plan comes from the tables of all ranks, which are exchanged once:
`holdfast_core.snapshots.sharding` divides the state that replicas share. Later changes of the state
(an optimizer that fills its state step by step, a tensor that grows) must not need a collective,
because ranks notice them at different times. So all replicas apply the same rules to them without
communication: an optimizer state is divided like its parameter, and any other tensor goes whole to
one rank, which the hash of its name selects.

This module must not read or write the bytes of tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
import xxhash

from holdfast._copying.engine import CopyPlan, plan_copy
from holdfast._state.capture import TensorSource, Whole
from holdfast._state.casts import follows, name_of_weights
from holdfast._state.extras import dtype_name, dtype_of_name
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.recompute import BESIDE_STATE
from holdfast_core.experts.sparse_windows import (
    Operator,
    Schedule,
    alike,
    cut,
    ordered,
    room_for_any_order,
)
from holdfast_core.experts.tables import NO_EXPERTS, ExpertTable
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.layouts import (
    PAGE_BYTES,
    PIECE_BYTES,
    TENSOR_ALIGNMENT,
    Entry,
    Layout,
    TensorRole,
    round_up,
)
from holdfast_core.snapshots.names import TensorName
from holdfast_core.snapshots.sharding import Grain, Shard, ShardStrategy, plan_shards
from holdfast_core.snapshots.units import TensorSize, UnitKey
from holdfast_core.topology import Topology

EXTRAS_SPARE_BYTES = 16 * 1024

STATE_BYTES_PER_EXPERT = 320
"""Room in the extras for the policy's state about each expert."""

STATE_BYTES = 4096
"""Room in the extras for the policy's state about the newest recoveries."""

_log = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRules:
    """The requirements of a policy on the plan."""

    partial: bool = False
    """Whether snapshots may leave experts out."""
    window: int = 0
    """Largest number of steps in a sparse window; 0 if each snapshot captures one step."""
    adapts: bool = False
    """Whether windows may be shorter, as measurement requires."""
    reorders: bool = False
    """Whether experts may change slots from one window to the next."""
    repeats: Repeats = Repeats.TRAINING
    """Whether a recovery repeats training's or only the optimizers' steps of a window."""
    mirrors: bool = False
    """Whether ranks copy pieces of each other from their own replicas."""


NO_RULES = CaptureRules()


@dataclass(frozen=True, kw_only=True, slots=True)
class BasePlan:
    """The division of the capture between ranks, on which all of them have agreed once."""

    rank: int
    topology: Topology
    tables: Mapping[str, TensorSize]
    """This rank's tensors when the plan was agreed."""
    shards: Mapping[int, Mapping[str, tuple[tuple[int, int], ...]]]
    """Replica → tensor → (start, bytes) of the ranges that the replica captures."""
    peer_tables: Mapping[int, Sequence[TensorSize]] = field(default_factory=dict)
    """Replica → its tensors when the plan was agreed; only where ranks mirror."""
    largest_slot_bytes: int = 0
    alone: bool = field(default=False)
    """Whether this rank captures all of its tensors, because there is no process group."""
    experts: ExpertTable = NO_EXPERTS
    """Experts that a snapshot may leave out."""
    holders: Mapping[UnitKey, tuple[int, ...]] = field(default_factory=dict)
    """Ranks that capture any part of each of these experts; empty if `alone`."""
    casts: Mapping[str, str] = field(default_factory=dict)
    """Compute weights that equal their rounded masters, as all ranks agreed → their masters. They
    are not in `tables`. If they must be stored after all, they are divided like their masters."""
    piece_bytes: int = PIECE_BYTES
    schedules: tuple[Schedule, ...] = ()
    """The units in each slot of a window, for each length that windows may have, the shortest
    first; empty if each snapshot captures one step."""
    alike: tuple[tuple[UnitKey, ...], ...] = ()
    """Groups of experts that may exchange slots; none if their order is fixed."""

    @property
    def apart(self) -> frozenset[UnitKey]:
        """Units that have their own pieces, which they share with no other unit."""
        return frozenset(self.experts.units)

    @property
    def spread(self) -> dict[UnitKey, int]:
        """Expert → number of ranks that capture parts of it, for experts with more than one."""
        return {unit: len(ranks) for unit, ranks in self.holders.items() if len(ranks) > 1}

    def own_experts(self, table: Sequence[TensorSize]) -> frozenset[UnitKey]:
        """Find the experts that this rank captures, whole or in part."""
        shards = own_shards(self, table)
        return self.apart.intersection(shard.unit for shard in shards if shard.nbytes)

    def after_reseating(self, sources: Sequence[TensorSource]) -> BasePlan:
        """Return the plan after experts in seats have changed ranks: this rank captures those in
        `sources`."""
        here = {one.unit: (self.rank,) for one in sources if one.seats is not None}
        return replace(self, holders={**self.holders, **here})

    @property
    def state_bytes(self) -> int:
        """Room in the extras for the policy's state."""
        return STATE_BYTES + STATE_BYTES_PER_EXPERT * len(self.apart) if self.apart else 0


def table_of(sources: Sequence[TensorSource]) -> tuple[TensorSize, ...]:
    """Describe `sources` for planning."""
    return tuple(
        TensorSize(
            unit=source.unit,
            tensor=source.name,
            role=source.role,
            dtype=dtype_name(source.tensor.dtype),
            shape=source.shape,
            start=source.start,
            nbytes=source.nbytes,
            private=source.private,
            trained=source.whole.param_group >= 0,
        )
        for source in sources
    )


def plan_alone(
    rank: int,
    topology: Topology,
    table: Sequence[TensorSize] = (),
    rules: CaptureRules = NO_RULES,
    *,
    casts: Mapping[str, str] | None = None,
) -> BasePlan:
    """Plan for a rank that captures all of its tensors. The table is needed unless there are no
    rules."""
    casts = casts or {}
    operators = operators_of({0: table}, Topology(dp=1), casts, rules.repeats)
    table = [size for size in table if size.tensor not in casts]
    experts = experts_apart({0: table}, Topology(dp=1)) if rules.partial else NO_EXPERTS
    return BasePlan(
        rank=rank,
        topology=topology,
        tables={},
        shards={},
        alone=True,
        experts=experts,
        casts=casts,
        piece_bytes=piece_bytes_for(experts, {}),
        schedules=_schedules(operators, rules),
        alike=alike(operators) if rules.reorders else (),
    )


def _schedules(operators: Sequence[Operator], rules: CaptureRules) -> tuple[Schedule, ...]:
    """Return the units in each slot of a window; see `BasePlan.schedules`."""
    if not rules.window:
        return ()
    lengths = range(1 if rules.adapts else rules.window, rules.window + 1)
    cuts = [cut(operators, length, rules.repeats) for length in lengths]
    # Fewer saves may be just as small, so that several lengths are the same.
    return tuple({schedule.window: schedule for schedule in cuts}.values())


def operators_of(
    tables: Mapping[int, Sequence[TensorSize]],
    topology: Topology,
    casts: Mapping[str, str],
    repeats: Repeats,
) -> tuple[Operator, ...]:
    """Return the units of all ranks, in the order of their slots in a window."""
    all_weights = repeats is Repeats.TRAINING
    compute: dict[UnitKey, int] = {}
    state: dict[UnitKey, int] = {}
    homes: dict[UnitKey, tuple[int, int]] = {}
    for rank, table in tables.items():
        at = topology.coordinates(rank)
        for size in table:
            expert = size.is_expert
            held_by = topology.expert_replicas(rank) if expert else topology.dense_replicas(rank)
            # If n ranks hold the same bytes, each counts an n-th, in units of 1/world_size.
            nbytes = size.nbytes * topology.world_size // (1 if size.private else len(held_by))
            homes[size.unit] = (at.pp, at.ep) if expert else (0, 0)
            state.setdefault(size.unit, 0)
            if size.role is TensorRole.COMPUTE and (all_weights or size.trained):
                compute[size.unit] = compute.get(size.unit, 0) + nbytes
            if size.role is not TensorRole.BUFFER and size.tensor not in casts:
                state[size.unit] += nbytes
    operators = [
        Operator(
            unit=unit,
            compute_bytes=min(compute.get(unit, 0), nbytes),
            state_bytes=nbytes,
            home=homes[unit],
        )
        for unit, nbytes in state.items()
    ]
    return ordered(operators)


def frames_bytes(
    shards: Sequence[Shard],
    sizes: Mapping[str, TensorSize],
    masters: Mapping[str, TensorSize],
    base: BasePlan,
) -> int:
    """Return the room that the compute weights, or the gradients, in the saves of a window need on
    a rank that captures `shards`, for any length of the window and any order of experts.

    Args:
        sizes: tensors of the rank, by name.
        masters: weights that are not stored, by the name of their master.
    """
    bytes_of_units: dict[UnitKey, int] = {}
    all_weights = all(one.repeats is Repeats.TRAINING for one in base.schedules)
    for shard in shards if base.schedules else ():
        size, nbytes = sizes[shard.tensor], 0
        weights = masters.get(shard.tensor)
        if weights is not None:
            nbytes = shard.nbytes * weights.nbytes // max(size.nbytes, 1)
        elif size.role is TensorRole.COMPUTE and (all_weights or size.trained):
            nbytes = shard.nbytes
        needed = round_up(nbytes, TENSOR_ALIGNMENT)
        bytes_of_units[shard.unit] = bytes_of_units.get(shard.unit, 0) + needed
    rooms = (room_for_any_order(one, base.alike, bytes_of_units) for one in base.schedules)
    return max(rooms, default=0)


def experts_apart(tables: Mapping[int, Sequence[TensorSize]], topology: Topology) -> ExpertTable:
    """Find the experts that a snapshot may leave out; empty if the model has none."""
    homes: dict[UnitKey, set[tuple[int, int]]] = {}
    for rank, table in tables.items():
        at = topology.coordinates(rank)
        for size in table:
            if size.is_expert and size.private:
                homes.setdefault(size.unit, set()).add((at.pp, at.ep))
    # Such experts belong to no rank's share of a layer, so leaving them out relieves no rank.
    across = [unit for unit, places in homes.items() if len(places) > 1]
    if across:
        _log.warning(
            "%d experts are spread over ranks that %s declares to hold different experts; they are "
            "captured in every snapshot: correct the topology",
            len(across),
            topology,
        )
    found = ExpertTable.of(tables, topology, shared=across)
    if not found.experts:
        _log.warning(
            "snapshot.policy has no effect on this model, because it has no experts that could be "
            "left out: every snapshot captures everything"
        )
    return found


def piece_bytes_for(experts: ExpertTable, holders: Mapping[UnitKey, tuple[int, ...]]) -> int:
    """Choose the size of pieces: small enough that rounding each rank's part of an expert up to
    whole pieces costs about an eighth, but at least a page and at most the usual size."""
    if not experts.experts:
        return PIECE_BYTES
    smallest = min(e.nbytes // len(holders.get(e.unit, (0,))) for e in experts.experts)
    wanted = 1 << max(smallest // 8, 1).bit_length() - 1
    return min(max(wanted, PAGE_BYTES), PIECE_BYTES)


def find_agreed_casts(
    claims: Mapping[int, Mapping[str, str]], tables: Mapping[int, Collection[str]]
) -> dict[str, str]:
    """Find the weights that equal the same rounded master on every rank that holds a tensor of
    their name.

    Args:
        claims: rank → its weights → their masters.
        tables: rank → names of all its tensors.
    """
    agreed: dict[str, str] = {}
    for rank in sorted(claims):
        for name, master in claims[rank].items():
            if name not in agreed and all(
                claims[other].get(name) == master for other in tables if name in tables[other]
            ):
                agreed[name] = master
    return agreed


def plan_together(
    rank: int,
    topology: Topology,
    tables: Mapping[int, Sequence[TensorSize]],
    extras_bytes: Mapping[int, int],
    strategy: ShardStrategy,
    rules: CaptureRules = NO_RULES,
    *,
    casts: Mapping[str, str] | None = None,
) -> BasePlan:
    """Compute the plan that every rank derives from the same exchanged tables.

    Args:
        casts: see `BasePlan.casts`; equal on all ranks.

    Raises:
        ReplicaMismatchError: declared replicas hold different tensors.
        InvalidJobError: windows would have to capture the gradients of a parameter that only some
            ranks' optimizers hold.
    """
    # Divide the units over the slots of a window.
    casts = casts or {}
    if rules.window and rules.repeats is Repeats.OPTIMIZER:
        _check_shared_parameters(tables)
    operators = operators_of(tables, topology, casts, rules.repeats)
    schedules = _schedules(operators, rules)
    peers = topology.dense_replicas(rank) if rules.mirrors else ()
    peer_tables = {  # usually equal: then they share one
        r: tables[rank] if tables[r] == tables[rank] else tables[r] for r in peers
    }
    weights = {
        r: {casts[size.tensor]: size for size in table if size.tensor in casts}
        for r, table in tables.items()
    }
    tables = {r: [size for size in tables[r] if size.tensor not in casts] for r in tables}
    # Divide the captured bytes over replicas; an expert that may be left out stays whole.
    experts = experts_apart(tables, topology) if rules.partial else NO_EXPERTS
    apart = frozenset(experts.units)
    grain = Grain.UNIT if apart else None
    plan = plan_shards(tables, topology, strategy, expert_grain=grain)
    holders = {unit: ranks for unit, ranks in plan.holders.items() if unit in apart}
    empty = BasePlan(
        rank=rank,
        topology=topology,
        tables={},
        shards={},
        experts=experts,
        holders=holders,
        casts=casts,
        piece_bytes=piece_bytes_for(experts, holders),
        schedules=schedules,
        alike=alike(operators) if rules.reorders else (),
    )
    # Find the largest slot of any rank, so that all arenas can have slots of equal size.
    largest = 0
    for r in tables:
        sizes = {size.tensor: size for size in tables[r]}
        extras = extras_bytes[r] * max((one.window for one in schedules), default=1)
        layout = layout_of(replace(empty, rank=r), tables[r], plan.shards[r], extras)
        frames = frames_bytes(plan.shards[r], sizes, weights[r], empty)
        largest = max(largest, layout.slot_bytes + round_up(frames, PAGE_BYTES))
    return replace(
        empty,
        tables={size.tensor: size for size in tables[rank]},
        shards={r: _ranges(plan.shards[r]) for r in topology.dense_replicas(rank)},
        peer_tables=peer_tables,
        largest_slot_bytes=largest,
    )


def _check_shared_parameters(tables: Mapping[int, Sequence[TensorSize]]) -> None:
    """Raise InvalidJobError if the optimizers of some ranks hold a parameter and those of other
    ranks do not."""
    first_seen: dict[str, tuple[int, bool]] = {}
    for rank, table in tables.items():
        for size in table:
            first, trained = first_seen.setdefault(size.tensor, (rank, size.trained))
            if size.trained is not trained:
                holds, lacks = (first, rank) if trained else (rank, first)
                raise InvalidJobError(
                    f"an optimizer of rank {holds} holds {size.tensor}, but no optimizer of rank "
                    f"{lacks} does, as with ZeroRedundancyOptimizer: each rank repeats only the "
                    f"steps of its own optimizers; use snapshot.policy.sparse.repeats Training"
                )


def own_shards(base: BasePlan, table: Sequence[TensorSize]) -> tuple[Shard, ...]:
    """Return the shards of `table` that this rank captures, sorted by unit, tensor and start.

    Raises:
        InvalidJobError: this rank holds a part of an expert that may be left out, and the part did
            not exist when the ranks agreed.
    """
    shards = []
    for size in sorted(table, key=lambda size: (size.unit, size.tensor)):
        for start, nbytes in _own_ranges(base, size):
            known = base.alone or size.unit not in base.apart or not nbytes
            if not known and base.rank not in base.holders.get(size.unit, ()):
                raise InvalidJobError(
                    f"{size.tensor} of {size.unit} did not exist at the first save, when ranks "
                    f"agreed which of them captures its parts; make the first save after the first "
                    f"step of the optimizer"
                )
            shards.append(Shard(unit=size.unit, tensor=size.tensor, start=start, nbytes=nbytes))
    return tuple(shards)


def _own_ranges(base: BasePlan, size: TensorSize) -> tuple[tuple[int, int], ...]:
    """Return (start, bytes) of the ranges of a tensor that this rank captures."""
    # A tensor that the agreed plan contains.
    whole = ((size.start, size.nbytes),)
    if base.alone or size.private:
        return whole
    if base.tables.get(size.tensor) == size:
        return base.shards[base.rank].get(size.tensor, ())
    # A newer tensor follows the rules: like its parameter or master, or else whole to one rank.
    topology = base.topology
    replicas = (
        topology.expert_replicas(base.rank)
        if size.is_expert
        else topology.dense_replicas(base.rank)
    )
    beside = base.casts.get(size.tensor, str(TensorName.parse(size.tensor).base))
    parameter = base.tables.get(beside)
    if parameter is not None and parameter.shape == size.shape and parameter.nbytes:
        # States are divided like their parameter, and weights like their master.
        ranges = base.shards[base.rank].get(parameter.tensor, ())
        return tuple(
            (start * size.nbytes // parameter.nbytes, nbytes * size.nbytes // parameter.nbytes)
            for start, nbytes in ranges
        )
    if size.unit in base.apart:  # One of the ranks that capture its other parts.
        holders = base.holders.get(size.unit, ())
        replicas = tuple(rank for rank in replicas if rank in holders) or replicas
    owner = replicas[xxhash.xxh3_64_intdigest(size.tensor.encode()) % len(replicas)]
    return whole if owner == base.rank else ()


def layout_of(
    base: BasePlan,
    table: Sequence[TensorSize],
    shards: Sequence[Shard],
    extras_bytes: int,
    sources: Sequence[TensorSource] = (),
    masters: Mapping[str, str] | None = None,
) -> Layout:
    """Lay out a slot for `shards` and for extras of about `extras_bytes`.

    Experts that snapshots may leave out come last, each on pieces of its own, followed by its
    gradients, also on pieces of their own.

    Args:
        sources: live tensors, which describe the whole tensors to which they belong. Offsets do not
            depend on them.
        masters: weights → masters that round to them. A shard of such weights gets no room if the
            layout has the same elements of the master.
    """
    # Place each shard behind the previous one.
    rank, topology, apart = base.rank, base.topology, base.apart
    sizes = {size.tensor: size for size in table}
    wholes = {source.name: source.whole for source in sources}
    entries: list[Entry] = []
    end = 0
    beside = {size.tensor for size in table if size.role in BESIDE_STATE}
    part: tuple[UnitKey, bool] | None = None
    without_room = _casts_among(shards, sizes, masters or {})

    def order(shard: Shard) -> tuple[bool, UnitKey, bool]:
        return shard.unit in apart, shard.unit, shard.tensor in beside

    for shard in sorted((s for s in shards if s not in without_room), key=order):
        size, whole = sizes[shard.tensor], wholes.get(shard.tensor, Whole())
        before, part = part, (shard.unit, shard.tensor in beside)
        alone = shard.unit in apart and part != before
        offset = round_up(end, base.piece_bytes if alone else TENSOR_ALIGNMENT)
        end = offset + shard.nbytes
        entries.append(_entry(shard, size, whole, offset))
    entries_of: dict[str, list[Entry]] = {}
    for entry in entries:
        entries_of.setdefault(entry.tensor, []).append(entry)
    # Leave room for the extras to grow, and let weights without room refer to their masters.
    extras_offset = round_up(end, base.piece_bytes if apart else TENSOR_ALIGNMENT)
    room = round_up(extras_offset + extras_bytes * 5 // 4 + EXTRAS_SPARE_BYTES, PAGE_BYTES)
    casts = [
        msgspec.structs.replace(
            _entry(shard, sizes[shard.tensor], wholes.get(shard.tensor, Whole()), 0),
            cast_of=master.tensor,
            offset=_offset_of(entries_of[master.tensor], master),
        )
        for shard, master in sorted(
            without_room.items(), key=lambda item: (item[0].tensor, item[0].start)
        )
    ]
    return Layout(
        rank=rank,
        world_size=topology.world_size,
        topology=str(topology),
        entries=tuple(entries),
        extras_offset=extras_offset,
        extras_capacity=room - extras_offset,
        piece_bytes=base.piece_bytes,
        casts=(*casts, *_weights_made_from(entries, sources)),
    )


def _weights_made_from(
    entries: Sequence[Entry], sources: Sequence[TensorSource]
) -> Iterator[Entry]:
    """Yield the weights that no rank captures, because the program makes them from the masters in
    `entries`."""
    dtypes = {source.name: source.weights for source in sources if source.weights is not None}
    for entry in entries:
        dtype = dtypes.get(entry.tensor)
        if dtype is not None and follows(dtype, dtype_of_name(entry.dtype)):
            wider = dtype_of_name(entry.dtype).itemsize // dtype.itemsize
            yield msgspec.structs.replace(
                entry,
                tensor=name_of_weights(entry.tensor),
                role=TensorRole.COMPUTE,
                dtype=dtype_name(dtype),
                start=entry.start // wider,
                nbytes=entry.nbytes // wider,
                cast_of=entry.tensor,
            )


def _entry(shard: Shard, size: TensorSize, whole: Whole, offset: int) -> Entry:
    return Entry(
        unit=str(shard.unit),
        tensor=shard.tensor,
        role=size.role,
        dtype=size.dtype,
        shape=size.shape,
        start=shard.start,
        nbytes=shard.nbytes,
        offset=offset,
        global_shape=whole.global_shape,
        global_offsets=whole.global_offsets,
        own=whole.own,
        param_group=whole.param_group,
    )


def _casts_among(
    shards: Sequence[Shard], sizes: Mapping[str, TensorSize], masters: Mapping[str, str]
) -> dict[Shard, Shard]:
    """Map shards of the weights in `masters` to the shards of their masters with the same elements,
    if `shards` has these."""
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.tensor, []).append(shard)
    covered: dict[Shard, Shard] = {}
    for name in by_name.keys() & masters.keys():
        master = masters[name]
        if master not in by_name:
            continue
        wider = sizes[master].nbytes // sizes[name].nbytes
        for shard in by_name[name]:
            low, nbytes = shard.start * wider, shard.nbytes * wider
            for part in by_name[master]:
                if part.start <= low and low + nbytes <= part.start + part.nbytes and nbytes:
                    covered[shard] = replace(part, start=low, nbytes=nbytes)
    return covered


def _offset_of(entries: Sequence[Entry], shard: Shard) -> int:
    """Return the offset in the slot of the first byte of `shard`, which lies within one of the
    `entries` of its tensor."""
    return next(
        entry.offset + shard.start - entry.start
        for entry in entries
        if entry.start <= shard.start < entry.start + entry.nbytes
    )


def same_places(old: Layout, new: Layout) -> bool:
    """Whether tensors have the same places in both layouts; the room for extras may differ."""
    return (old.entries, old.casts, old.extras_offset, old.piece_bytes, old.mirror) == (
        new.entries,
        new.casts,
        new.extras_offset,
        new.piece_bytes,
        new.mirror,
    )


def moves_of(layout: Layout, sources: Sequence[TensorSource]) -> CopyPlan:
    """Plan the copies between a slot of `layout` and the `sources` of that layout."""
    by_name = {source.name: source for source in sources}
    ranges: list[tuple[int, int, torch.Tensor]] = []
    staged = []
    for source in sources:
        if source.staging is not None and not source.eager:
            staged.append((source.staging, source.tensor))
    for entry in layout.entries:
        part = by_name[entry.tensor].part(entry.start, entry.nbytes)
        ranges.append((entry.offset, entry.start, part))
    return plan_copy(ranges, staged, layout.piece_bytes)


def _ranges(shards: Sequence[Shard]) -> dict[str, tuple[tuple[int, int], ...]]:
    ranges: dict[str, tuple[tuple[int, int], ...]] = {}
    for shard in shards:
        ranges[shard.tensor] = (*ranges.get(shard.tensor, ()), (shard.start, shard.nbytes))
    return ranges
