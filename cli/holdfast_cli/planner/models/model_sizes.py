"""Sizes of the training state of a model that does not exist yet, and which rank captures what.

Plans are made before a trainer runs. From a few numbers this module makes the tables that ranks
exchange at run time, and passes them to the same sharding (ADPS, PEC §3.2), so that a plan and a
trainer agree on the most loaded rank. It deals with neither times nor policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast_core.experts.tables import Expert, ExpertTable, MoeLayer, layer_of
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.sharding import Grain, plan_shards
from holdfast_core.snapshots.units import TensorSize, UnitKey, UnitKind
from holdfast_core.topology import Topology

_REST = UnitKey(None, UnitKind.OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Bytes of training state (weights, master weights, optimizer), one copy over the whole job."""

    experts: Mapping[UnitKey, int]
    """Bytes of each expert that a snapshot may leave out."""
    other_bytes: int
    """Bytes of everything else."""

    @classmethod
    def even(cls, *, layers: int, experts: int, expert_bytes: int, other_bytes: int) -> ModelSizes:
        """`layers` MoE layers of `experts` experts each, all of one size."""
        units = (
            UnitKey(layer, UnitKind.EXPERT, expert)
            for layer in range(layers)
            for expert in range(experts)
        )
        return cls(experts=dict.fromkeys(units, expert_bytes), other_bytes=other_bytes)

    @property
    def by_layer(self) -> dict[int, list[UnitKey]]:
        """The experts of each layer, both ascending."""
        layers: dict[int, list[UnitKey]] = {}
        for unit in sorted(self.experts):
            layers.setdefault(layer_of(unit), []).append(unit)
        return layers


def table_of_sizes(sizes: ModelSizes, topology: Topology) -> ExpertTable:
    """The table of experts that a trainer of this topology would find.

    Layers are dealt to pipeline stages, and a layer's experts to the shares of expert parallelism,
    in consecutive runs as equal as they can be.
    """
    layers = sizes.by_layer
    moe_layers = []
    for place, (layer, units) in enumerate(layers.items()):
        stage = place * topology.pp // len(layers)
        shares = [at * topology.ep // len(units) for at in range(len(units))]
        experts = tuple(
            Expert(
                unit=unit,
                nbytes=sizes.experts[unit],
                gradient_bytes=0,
                owners=_owners(topology, stage, share),
                stage=stage,
                share=share,
            )
            for unit, share in zip(units, shares, strict=True)
        )
        moe_layers.append(MoeLayer(layer=layer, stage=stage, experts=experts))
    return ExpertTable(layers=tuple(moe_layers), dense_bytes=sizes.other_bytes)


def _owners(topology: Topology, stage: int, share: int) -> tuple[int, ...]:
    return tuple(
        topology.rank_at(dp=dp, tp=tp, pp=stage)
        for dp in range(share, topology.dp, topology.ep)
        for tp in range(topology.tp)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturePlan:
    """Which rank captures what, as all ranks agree once when training starts.

    Ranks that differ only in their tensor-parallel index capture equally much, so the first of them
    stands for all.
    """

    topology: Topology
    always: Mapping[int, int]
    """Bytes that every snapshot captures, by rank."""
    experts: Mapping[UnitKey, tuple[tuple[int, int], ...]]
    """(rank, bytes) of each rank that captures a part of an expert, by expert."""

    def loads(self, units: Iterable[UnitKey]) -> list[int]:
        """Bytes that each rank of the world captures in a snapshot of these experts."""
        loads = dict(self.always)
        for unit in units:
            for rank, nbytes in self.experts[unit]:
                loads[rank] += nbytes
        tp = self.topology.tp
        return [loads[rank - rank % tp] for rank in range(self.topology.world_size)]


def plan_capture(table: ExpertTable, topology: Topology, *, partial: bool) -> CapturePlan:
    """Divide the model's capture as trainers do (adaptive sharding, PEC §3.2).

    Args:
        partial: whether snapshots leave experts out: then each is captured by one rank as a whole.
    """
    held: dict[tuple[int, int], tuple[TensorSize, ...]] = {}
    tables: dict[int, tuple[TensorSize, ...]] = {}
    for rank in range(0, topology.world_size, topology.tp):
        at = topology.coordinates(rank)
        home = (at.pp, at.ep)
        if home not in held:
            held[home] = _held_tensors(table, topology, *home)
        tables[rank] = held[home]
    plan = plan_shards(tables, topology, expert_grain=Grain.UNIT if partial else None)
    always = dict.fromkeys(tables, 0)
    experts: dict[UnitKey, list[tuple[int, int]]] = {unit: [] for unit in table.units}
    for rank, shards in plan.shards.items():
        for shard in shards:
            if shard.unit.kind is UnitKind.EXPERT:
                experts[shard.unit].append((rank, shard.nbytes))
            else:
                always[rank] += shard.nbytes
    return CapturePlan(
        topology=topology,
        always=always,
        experts={unit: tuple(parts) for unit, parts in experts.items()},
    )


def _held_tensors(
    table: ExpertTable, topology: Topology, stage: int, share: int
) -> tuple[TensorSize, ...]:
    """Bytes that a rank of this stage and share holds: its part of everything that tensor
    parallelism divides."""
    rest = _tensor(_REST, -(-table.dense_bytes // (topology.pp * topology.tp)))
    own = (e for e in table.experts if (e.stage, e.share) == (stage, share))
    return (rest, *(_tensor(expert.unit, -(-expert.nbytes // topology.tp)) for expert in own))


def _tensor(unit: UnitKey, nbytes: int) -> TensorSize:
    return TensorSize(
        unit=unit,
        tensor=str(unit),
        role=TensorRole.OPTIMIZER,
        dtype="uint8",
        shape=(nbytes,),
        nbytes=nbytes,
    )
