"""Division of shared state among its replicas: which rank captures which bytes.

Replicas hold equal bytes, so one copy per replica group is captured (REFT §4.1), and the group
divides the work: equally in order (EDPS), or adaptively, the largest item to the least loaded rank
(ADPS, PEC §3.2). The plan is a pure function of sizes and topology: every rank computes the same
one, without a collective.

This module chooses the ranges; the SDK copies them. It does not check that replicas hold equal
bytes, only that they declare equal tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from holdfast_core.errors import InvalidJobError, ReplicaMismatchError
from holdfast_core.snapshots.layouts import TENSOR_ALIGNMENT, round_up
from holdfast_core.snapshots.units import TensorSize, UnitKey
from holdfast_core.topology import Topology

MIN_SPLIT_BYTES = 1024 * 1024
"""Least size of a range: smaller ones cost more in bookkeeping than they gain in balance."""

SPLITS_PER_RANK = 32
"""Ranges in a rank's equal share: by default, a tensor longer than 1/32 of it is cut, which bounds
the imbalance by about 3 % at the cost of few ranges."""


class ShardStrategy(StrEnum):
    """How a replica group divides what it shares."""

    EQUAL = "equal"
    """EDPS: in order, in equal parts, whatever else a rank has to capture."""
    ADAPTIVE = "adaptive"
    """ADPS: the largest item to the least loaded rank, counting everything that it captures."""


class Grain(StrEnum):
    """Smallest portion of the state that one rank captures alone."""

    UNIT = "unit"
    """Whole modules, as in PEC §3.2: all tensors of a unit stay together."""
    RANGE = "range"
    """Tensors, and aligned ranges of large ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The bytes [start, start + nbytes) of a tensor, captured by one rank of a replica group."""

    unit: UnitKey
    tensor: str
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardItem:
    """Item of the assignment: one or more shards that stay together."""

    name: str
    """Name that breaks ties between items of equal size; unique among the items of a group."""
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """Shards that each rank captures, in order of unit, tensor and start."""

    shards: Mapping[int, tuple[Shard, ...]]
    reason: str

    def load_bytes(self, rank: int) -> int:
        """Bytes that `rank` captures."""
        return sum(shard.nbytes for shard in self.shards[rank])

    @property
    def holders(self) -> dict[UnitKey, tuple[int, ...]]:
        """The ranks that capture any byte of each unit, ascending."""
        ranks_of: dict[UnitKey, set[int]] = {}
        for rank, shards in self.shards.items():
            for shard in shards:
                if shard.nbytes:
                    ranks_of.setdefault(shard.unit, set()).add(rank)
        return {unit: tuple(sorted(ranks)) for unit, ranks in ranks_of.items()}


def plan_shards(
    tensors_by_rank: Mapping[int, Sequence[TensorSize]],
    topology: Topology,
    strategy: ShardStrategy = ShardStrategy.ADAPTIVE,
    *,
    grain: Grain = Grain.RANGE,
    expert_grain: Grain | None = None,
    split_bytes: int | None = None,
) -> ShardPlan:
    """Divide the capture of all tensors so that each byte is captured once in its replica group.

    Experts are shared by the expert replicas and everything else by the dense replicas; private
    tensors stay with their rank. Private tensors are placed first, then experts, so that the
    adaptive strategy fills the gaps that they leave (PEC §3.2).

    Args:
        tensors_by_rank: for each rank the tensors it holds, in any order. A subset of the world
            is enough if it has all dense replicas of each of its ranks.
        topology: which ranks are replicas.
        expert_grain: grain of experts; `Grain.UNIT` where they are captured at different times, so
            that none is split between replicas. By default `grain`.
        split_bytes: with `Grain.RANGE`, tensors longer than this are cut into ranges of at most
            this many bytes, rounded up to 64; by default 1/32 of an equal share of the group.

    Raises:
        InvalidJobError: when replicas are missing or a name is used twice.
        ReplicaMismatchError: when declared replicas hold different tensors; names unit and ranks.
    """
    tables = {rank: _table(rank, tensors) for rank, tensors in sorted(tensors_by_rank.items())}
    for rank in tables:
        missing = [r for r in topology.dense_replicas(rank) if r not in tables]
        if missing:
            raise InvalidJobError(
                f"cannot shard rank {rank}: the tensors of its replicas {missing} in {topology} "
                f"are not given; gather the tables of all its replicas first"
            )
    taken: dict[int, list[Shard]] = {
        rank: [_whole(tensor) for tensor in table.values() if tensor.private]
        for rank, table in tables.items()
    }
    loads = {rank: sum(shard.nbytes for shard in shards) for rank, shards in taken.items()}
    for expert in (True, False):
        for group in _groups(tables, topology, expert=expert):
            shared = _shared(tables, group, topology, expert=expert)
            of = (expert_grain or grain) if expert else grain
            items = items_of(shared, len(group), grain=of, split_bytes=split_bytes)
            given = {rank: loads[rank] for rank in group}
            assigned = edps(items, group) if strategy is ShardStrategy.EQUAL else adps(items, given)
            for rank, won in assigned.items():
                taken[rank].extend(shard for item in won for shard in item.shards)
                loads[rank] += sum(item.nbytes for item in won)
    most, least = max(loads.values(), default=0), min(loads.values(), default=0)
    return ShardPlan(
        shards={rank: _coalesce(shards) for rank, shards in taken.items()},
        reason=f"{strategy.value} sharding by {grain.value} over {topology}: "
        f"{least} to {most} bytes per rank",
    )


def edps(items: Sequence[ShardItem], ranks: Sequence[int]) -> dict[int, tuple[ShardItem, ...]]:
    """Equal data-parallel sharding (REFT §4.1, EDPS of PEC §3.2): consecutive runs of equal bytes.

    An item goes to the rank whose equal share holds its middle, so a rank exceeds its share by less
    than the longest item.
    """
    total = sum(item.nbytes for item in items)
    assigned: dict[int, list[ShardItem]] = {rank: [] for rank in ranks}
    at = 0
    for item in items:
        twice_middle = 2 * at + item.nbytes
        share = min(twice_middle * len(ranks) // (2 * total), len(ranks) - 1) if total else 0
        assigned[ranks[share]].append(item)
        at += item.nbytes
    return {rank: tuple(won) for rank, won in assigned.items()}


def adps(items: Sequence[ShardItem], loads: Mapping[int, int]) -> dict[int, tuple[ShardItem, ...]]:
    """Adaptive data-parallel sharding (PEC §3.2): the largest item to the least loaded rank.

    Ties break by the item's name, then by rank. No rank ends above both its given load and T / m +
    (1 - 1 / m) · L, for m ranks, the total T of given loads and items, and the longest item L: the
    rank that received the last item had the least load before it.

    Args:
        loads: for each rank of the group the bytes that it captures anyway.
    """
    assigned: dict[int, list[ShardItem]] = {rank: [] for rank in loads}
    heap = sorted((load, rank) for rank, load in loads.items())
    for item in sorted(items, key=lambda item: (-item.nbytes, item.name)):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + item.nbytes, rank))
        assigned[rank].append(item)
    return {rank: tuple(won) for rank, won in assigned.items()}


def items_of(
    tensors: Sequence[TensorSize], ranks: int, *, grain: Grain, split_bytes: int | None = None
) -> tuple[ShardItem, ...]:
    """The items to assign, in order of unit and tensor. See `plan_shards` for the arguments."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.unit, tensor.tensor))
    if grain is Grain.UNIT:
        return tuple(
            ShardItem(name=str(unit), shards=tuple(_whole(tensor) for tensor in of_unit))
            for unit, of_unit in groupby(ordered, key=lambda tensor: tensor.unit)
        )
    if split_bytes is None:
        share = sum(tensor.nbytes for tensor in tensors) // ranks
        split_bytes = max(MIN_SPLIT_BYTES, share // SPLITS_PER_RANK)
    if split_bytes < 1:
        raise InvalidJobError(f"split_bytes={split_bytes}: ranges need at least 1 byte; give more")
    limit = round_up(split_bytes, TENSOR_ALIGNMENT)
    return tuple(
        ShardItem(name=f"{tensor.tensor}@{shard.start:020}", shards=(shard,))
        for tensor in ordered
        for shard in _ranges(tensor, limit)
    )


def _ranges(tensor: TensorSize, limit: int) -> Iterable[Shard]:
    """`tensor` in equal aligned ranges of at most `limit` bytes."""
    count = max(1, -(-tensor.nbytes // limit))
    step = max(round_up(-(-tensor.nbytes // count), TENSOR_ALIGNMENT), TENSOR_ALIGNMENT)
    for start in range(0, max(tensor.nbytes, 1), step):
        yield Shard(
            unit=tensor.unit,
            tensor=tensor.tensor,
            start=start,
            nbytes=min(step, tensor.nbytes - start),
        )


def _whole(tensor: TensorSize) -> Shard:
    return Shard(unit=tensor.unit, tensor=tensor.tensor, start=tensor.start, nbytes=tensor.nbytes)


def _coalesce(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """`shards` in order, neighbouring ranges of a tensor joined."""
    joined: list[Shard] = []
    for shard in sorted(shards, key=lambda s: (s.unit, s.tensor, s.start)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.unit, last.tensor) == (shard.unit, shard.tensor)
            and last.start + last.nbytes == shard.start
        ):
            joined[-1] = Shard(
                unit=last.unit,
                tensor=last.tensor,
                start=last.start,
                nbytes=last.nbytes + shard.nbytes,
            )
        else:
            joined.append(shard)
    return tuple(joined)


def _table(rank: int, tensors: Sequence[TensorSize]) -> dict[str, TensorSize]:
    table: dict[str, TensorSize] = {}
    for tensor in tensors:
        if tensor.tensor in table:
            raise InvalidJobError(
                f"rank {rank} names the tensor {tensor.tensor!r} of unit {tensor.unit} twice; "
                f"every tensor needs a name of its own"
            )
        table[tensor.tensor] = tensor
    return table


def _groups(
    ranks: Iterable[int], topology: Topology, *, expert: bool
) -> tuple[tuple[int, ...], ...]:
    """The replica groups of `ranks`, by lowest rank."""
    replicas = topology.expert_replicas if expert else topology.dense_replicas
    return tuple(sorted({replicas(rank) for rank in ranks}))


def _shared(
    tables: Mapping[int, Mapping[str, TensorSize]],
    group: Sequence[int],
    topology: Topology,
    *,
    expert: bool,
) -> list[TensorSize]:
    """The tensors that all of `group` hold alike.

    Raises:
        ReplicaMismatchError: when they differ.
    """
    shared = [
        {t.tensor: t for t in tables[rank].values() if t.is_expert == expert and not t.private}
        for rank in group
    ]
    first = shared[0]
    for rank, other in zip(group[1:], shared[1:], strict=True):
        if other == first:
            continue
        name = min(n for n in first.keys() | other.keys() if first.get(n) != other.get(n))
        described = [_describe(table.get(name)) for table in (first, other)]
        unit = (first.get(name) or other[name]).unit
        raise ReplicaMismatchError(
            f"unit {unit}: {topology} declares ranks {group[0]} and {rank} to be replicas, but for "
            f"tensor {name!r} rank {group[0]} has {described[0]} and rank {rank} has "
            f"{described[1]}; correct the topology, or mark the tensor as private to its rank"
        )
    return list(first.values())


def _describe(tensor: TensorSize | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{tensor.dtype}{list(tensor.shape)} of {tensor.nbytes} bytes in {tensor.unit}"
