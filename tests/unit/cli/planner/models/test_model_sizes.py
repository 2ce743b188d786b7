"""A model given by sizes: its table, and who would capture what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_cli.planner.models.model_sizes import ModelSizes, plan_capture, table_of_sizes
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.sharding import Grain, plan_shards
from holdfast_core.snapshots.units import TensorSize, UnitKey, UnitKind
from holdfast_core.topology import Topology

MIB = 1024**2


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    ep = draw(st.integers(1, 4))
    return Topology(
        dp=ep * draw(st.integers(1, 3)),
        ep=ep,
        tp=draw(st.integers(1, 2)),
        pp=draw(st.integers(1, 2)),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    return ModelSizes.even(
        layers=draw(st.integers(1, 5)),
        experts=draw(st.integers(1, 6)),
        expert_bytes=draw(st.integers(1, 8 * MIB)),
        other_bytes=draw(st.integers(0, 64 * MIB)),
    )


@given(models(), topologies(), st.booleans())
def test_every_byte_is_captured_once(sizes: ModelSizes, topology: Topology, partial: bool) -> None:
    table = table_of_sizes(sizes, topology)
    captured = sum(plan_capture(table, topology, partial=partial).loads(table.units))
    assert table.full_bytes == sum(sizes.experts.values()) + sizes.other_bytes
    # Parts that tensor and pipeline parallelism do not divide evenly are rounded up.
    spare = topology.tp * (len(table.experts) + topology.pp)
    assert table.full_bytes <= captured <= table.full_bytes + spare


@given(models(), topologies())
def test_a_partial_plan_gives_each_expert_to_one_rank(
    sizes: ModelSizes, topology: Topology
) -> None:
    table = table_of_sizes(sizes, topology)
    plan = plan_capture(table, topology, partial=True)
    owners = {expert.unit: expert.owners for expert in table.experts}
    for unit, parts in plan.experts.items():
        ((rank, _),) = parts
        assert rank in owners[unit]


def test_the_plan_is_that_of_a_trainer_with_the_same_tensors() -> None:
    """What ranks exchange, from tensors of their own, gives the same table and the same loads."""
    topology = Topology(dp=4, ep=2)
    expert, rest = 3 * MIB, 50 * MIB

    def tensor(unit: UnitKey, nbytes: int) -> TensorSize:
        return TensorSize(
            unit=unit,
            tensor=f"model.{unit}",
            role=TensorRole.COMPUTE,
            dtype="float32",
            shape=(nbytes // 4,),
            nbytes=nbytes,
        )

    held = {
        rank: [
            tensor(UnitKey(None, UnitKind.EMBEDDING), rest),
            *(
                tensor(UnitKey(layer, UnitKind.EXPERT, 2 * (rank % 2) + i), expert)
                for layer in range(3)
                for i in range(2)
            ),
        ]
        for rank in range(4)
    }
    exchanged = ExpertTable.of(held, topology)
    sizes = ModelSizes.even(layers=3, experts=4, expert_bytes=expert, other_bytes=rest)
    table = table_of_sizes(sizes, topology)
    assert table.dense_bytes == exchanged.dense_bytes
    assert [(e.unit, e.nbytes, e.owners, e.stage, e.share) for e in table.experts] == [
        (e.unit, e.nbytes, e.owners, e.stage, e.share) for e in exchanged.experts
    ]
    shards = plan_shards(held, topology, expert_grain=Grain.UNIT)
    planned = plan_capture(table, topology, partial=True)
    assert planned.loads(table.units) == [shards.load_bytes(rank) for rank in range(4)]


def test_layers_of_different_experts_are_dealt_to_all_shares() -> None:
    sizes = ModelSizes(
        experts={UnitKey(m, UnitKind.EXPERT, e): 10 for m, n in ((0, 3), (4, 5)) for e in range(n)},
        other_bytes=7,
    )
    table = table_of_sizes(sizes, Topology(dp=2, ep=2, pp=2))
    assert [(m.layer, m.stage, len(m.experts)) for m in table.layers] == [(0, 0, 3), (4, 1, 5)]
    assert [e.share for e in table.layers[1].experts] == [0, 0, 0, 1, 1]
