"""Tables of a model's experts: their bytes, their layer, and the ranks that hold them.

Partial snapshots capture some experts and everything else (PEC §3.1, MoEtion §4.1), so every policy
needs the same facts: which experts there are, how long each is, and which ranks hold it. They are
derived from the tables of tensors that ranks exchange once, so that all ranks have equal tables.

An expert here is a unit of kind `expert`. Shared experts, which every token passes through, are no
candidates: the conventions of the SDK count them as a layer's dense part, and where a model names
them as experts, `shared` lists them. They are captured in every snapshot, like the rest of the
non-expert part, because leaving either out would lose as many tokens.

This module holds no history (that is `experts.ledger`) and chooses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import TensorSize, UnitKey
from holdfast_core.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Expert:
    """One expert of one layer."""

    unit: UnitKey
    nbytes: int
    """Bytes that a snapshot captures of it: one copy of what replicas share, and all that is
    private."""
    gradient_bytes: int
    """Bytes of one gradient for it: as many as its compute weights."""
    owners: tuple[int, ...]
    """The ranks that hold any of it, ascending."""
    stage: int
    """Pipeline stage."""
    share: int
    """Share of the layer's experts that it belongs to: the index in expert parallelism."""

    @property
    def layer(self) -> int:
        return layer_of(self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeLayer:
    """The experts of one layer, by their index."""

    layer: int
    stage: int
    experts: tuple[Expert, ...]

    def interleaved(self) -> tuple[Expert, ...]:
        """The experts, dealt from the shares in turn: neighbours belong to different ranks.

        When all shares are equally large, any run of consecutive experts, even one that wraps
        around, holds equally many of each share, or one more.
        """
        turn: dict[int, int] = {}
        keyed = []
        for expert in self.experts:
            turn[expert.share] = turn.get(expert.share, 0) + 1
            keyed.append((turn[expert.share], expert.share, expert))
        return tuple(expert for _, _, expert in sorted(keyed, key=lambda entry: entry[:2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTable:
    """All experts that may be left out of a snapshot, and the size of everything else.

    Layers may have different numbers of experts, of different sizes.
    """

    layers: tuple[MoeLayer, ...]
    """Layers that have experts, ascending."""
    dense_bytes: int
    """Bytes of the rest, which every snapshot captures: one copy of it, including shared
    experts."""

    @classmethod
    def of(
        cls,
        tensors_by_rank: Mapping[int, Sequence[TensorSize]],
        topology: Topology,
        *,
        shared: Collection[UnitKey] = (),
    ) -> ExpertTable:
        """The table for the tensors that all ranks hold.

        It is `snapshots.sharding.plan_shards` that checks whether replicas hold equal tensors.

        Args:
            tensors_by_rank: for each rank of the world the tensors that it holds.
            shared: experts that every token passes through, and that are always captured.

        Raises:
            InvalidJobError: when one expert is held by ranks of different shares or stages, when
                the experts of one layer are on different stages, or when a shared one is unknown.
        """
        owners: dict[UnitKey, set[int]] = {}
        nbytes: dict[UnitKey, int] = {}
        gradients: dict[UnitKey, int] = {}
        dense_bytes = 0
        known: set[UnitKey] = set()
        for rank, tensors in sorted(tensors_by_rank.items()):
            for tensor in tensors:
                known.add(tensor.unit)
                counted = tensor.private or _is_first_replica(rank, tensor, topology)
                size = tensor.nbytes if counted else 0
                if not tensor.is_expert or tensor.unit in shared:
                    dense_bytes += size
                    continue
                unit = tensor.unit
                owners.setdefault(unit, set()).add(rank)
                nbytes[unit] = nbytes.get(unit, 0) + size
                if tensor.role is TensorRole.COMPUTE:
                    gradients[unit] = gradients.get(unit, 0) + size
        unknown = sorted(set(shared) - known)
        if unknown:
            raise InvalidJobError(
                f"shared expert {unknown[0]} is not in the model; name units that it has"
            )
        experts: dict[int, list[Expert]] = {}
        for unit in sorted(owners):
            stage, share = _home(unit, owners[unit], topology)
            experts.setdefault(layer_of(unit), []).append(
                Expert(
                    unit=unit,
                    nbytes=nbytes[unit],
                    gradient_bytes=gradients.get(unit, 0),
                    owners=tuple(sorted(owners[unit])),
                    stage=stage,
                    share=share,
                )
            )
        return cls(
            layers=tuple(_moe_layer(layer, experts[layer]) for layer in sorted(experts)),
            dense_bytes=dense_bytes,
        )

    @property
    def experts(self) -> tuple[Expert, ...]:
        """All experts, in the order of units."""
        return tuple(expert for layer in self.layers for expert in layer.experts)

    @property
    def units(self) -> tuple[UnitKey, ...]:
        """The unit of each expert, ascending."""
        return tuple(expert.unit for expert in self.experts)

    @property
    def experts_max(self) -> int:
        """The number of experts of the layer that has most; 0 without any."""
        return max((len(layer.experts) for layer in self.layers), default=0)

    @property
    def expert_bytes_max(self) -> int:
        """The length of the longest expert; 0 without any."""
        return max((expert.nbytes for expert in self.experts), default=0)

    def snapshot_bytes(self, selected: Iterable[UnitKey]) -> int:
        """Bytes of a snapshot of all ranks that captures these experts (MoEtion eq. 5)."""
        chosen = set(selected)
        return self.dense_bytes + sum(e.nbytes for e in self.experts if e.unit in chosen)

    @property
    def full_bytes(self) -> int:
        """Bytes of a snapshot of all ranks that captures every expert (MoEtion eq. 4)."""
        return self.snapshot_bytes(self.units)


NO_EXPERTS = ExpertTable(layers=(), dense_bytes=0)
"""The table of a model without experts, and where no policy leaves any out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The experts that one snapshot captures."""

    units: tuple[UnitKey, ...]
    """Units of the experts, ascending."""
    reason: str


def layer_of(unit: UnitKey) -> int:
    """The layer of an expert's unit."""
    assert unit.layer is not None, f"{unit} is not an expert"
    return unit.layer


def _is_first_replica(rank: int, tensor: TensorSize, topology: Topology) -> bool:
    replicas = topology.expert_replicas if tensor.is_expert else topology.dense_replicas
    return replicas(rank)[0] == rank


def _home(unit: UnitKey, owners: Collection[int], topology: Topology) -> tuple[int, int]:
    """Stage and share of the ranks that hold an expert."""
    places = {rank: topology.coordinates(rank) for rank in sorted(owners)}
    homes = {(at.pp, at.ep) for at in places.values()}
    if len(homes) > 1:
        raise InvalidJobError(
            f"unit {unit} is held by ranks {sorted(owners)}, which are not replicas of its share "
            f"of the experts in {topology}; correct the topology, or number layers and experts "
            f"over the whole model with the argument `units` of holdfast.init"
        )
    return homes.pop()


def _moe_layer(layer: int, experts: Sequence[Expert]) -> MoeLayer:
    stages = sorted({expert.stage for expert in experts})
    if len(stages) > 1:
        raise InvalidJobError(
            f"layer {layer} has experts on the pipeline stages {stages}; number the layers over "
            f"the whole model with the argument `units` of holdfast.init"
        )
    return MoeLayer(layer=layer, stage=stages[0], experts=tuple(experts))
