from __future__ import annotations

from collections.abc import Mapping

import pytest
from expert_worlds import unit, world

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.sharding import ShardStrategy, plan_shards
from holdfast_core.snapshots.units import TensorSize, UnitKey
from holdfast_core.topology import Topology


def tensor(
    where: str,
    nbytes: int,
    name: str = "w",
    *,
    role: TensorRole = TensorRole.COMPUTE,
    private: bool = False,
) -> TensorSize:
    return TensorSize(
        unit=UnitKey.parse(where),
        tensor=f"{where}.{name}",
        role=role,
        dtype="uint8",
        shape=(nbytes,),
        nbytes=nbytes,
        private=private,
    )


def expert(layer: int, index: int, *, nbytes: int = 128) -> list[TensorSize]:
    where = f"layer{layer}/expert{index}"
    return [
        tensor(where, nbytes),
        tensor(where, 4 * nbytes, "m", role=TensorRole.OPTIMIZER),
    ]


def tables(topology: Topology, experts: int) -> dict[int, list[TensorSize]]:
    """One MoE layer a stage, its experts over the shares, and a dense part on every rank."""
    held = {}
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        local = experts // topology.ep
        held[rank] = [
            tensor(f"layer{at.pp}/dense", 1024),
            tensor("other", 10, f"own{rank}", private=True),
            *(t for i in range(at.ep * local, (at.ep + 1) * local) for t in expert(at.pp, i)),
        ]
    return held


def test_the_table_counts_each_byte_of_replicas_once_and_private_bytes_always() -> None:
    topology = Topology(dp=4, ep=2)
    table = ExpertTable.of(tables(topology, experts=4), topology)
    assert [str(e.unit) for e in table.experts] == [f"layer0/expert{i}" for i in range(4)]
    assert {e.nbytes for e in table.experts} == {5 * 128}
    assert {e.gradient_bytes for e in table.experts} == {128}
    assert table.dense_bytes == 1024 + 4 * 10
    assert [(e.share, e.owners) for e in table.experts] == [
        (0, (0, 2)),
        (0, (0, 2)),
        (1, (1, 3)),
        (1, (1, 3)),
    ]


def test_the_pieces_of_tensor_parallel_ranks_add_up() -> None:
    topology = Topology(dp=2, ep=2, tp=2)
    table = ExpertTable.of(tables(topology, experts=2), topology)
    assert {e.nbytes for e in table.experts} == {2 * 5 * 128}
    assert table.dense_bytes == 2 * 1024 + 4 * 10


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_bytes_of_a_selection_are_what_all_ranks_capture_of_it(ep: int) -> None:
    topology = Topology(dp=4, ep=ep, pp=2)
    held = tables(topology, experts=4)
    table = ExpertTable.of(held, topology)
    for chosen in ((), (unit(0, 1),), (unit(0, 0), unit(0, 3), unit(1, 2)), table.units):
        left_out = set(table.units).difference(chosen)
        captured = {rank: [t for t in of if t.unit not in left_out] for rank, of in held.items()}
        for strategy in ShardStrategy:
            plan = plan_shards(captured, topology, strategy)
            assert sum(map(plan.load_bytes, held)) == table.snapshot_bytes(chosen)
    assert table.snapshot_bytes(table.units) == table.full_bytes


def test_shared_experts_are_not_candidates_and_count_as_dense() -> None:
    topology = Topology(dp=1)
    held = tables(topology, experts=4)
    table = ExpertTable.of(held, topology, shared={unit(0, 3)})
    assert unit(0, 3) not in table.units
    assert table.dense_bytes == 1024 + 10 + 5 * 128


def test_layers_differ_in_number_and_size_of_experts() -> None:
    held = {0: [*expert(1, 0), *expert(1, 1), *expert(4, 0, nbytes=7), tensor("head", 3)]}
    table = ExpertTable.of(held, Topology(dp=1))
    assert [(m.layer, len(m.experts)) for m in table.layers] == [(1, 2), (4, 1)]
    assert (table.experts_max, table.expert_bytes_max) == (2, 640)


def test_a_model_without_experts_has_an_empty_table() -> None:
    table = ExpertTable.of({0: [tensor("head", 3)]}, Topology(dp=1))
    assert (table.layers, table.experts_max, table.expert_bytes_max) == ((), 0, 0)
    assert table.full_bytes == table.dense_bytes == 3


@pytest.mark.parametrize(
    ("held", "topology", "shared", "message"),
    [
        pytest.param(
            {0: expert(0, 0), 1: expert(0, 0)},
            Topology(dp=2, ep=2),
            (),
            r"unit layer0/expert0 is held by ranks \[0, 1\], which are not replicas .* dp2·ep2",
            id="one expert in two shares",
        ),
        pytest.param(
            {0: expert(0, 0), 1: expert(0, 1)},
            Topology(dp=1, pp=2),
            (),
            r"layer 0 has experts on the pipeline stages \[0, 1\]; number the layers",
            id="one layer on two stages",
        ),
        pytest.param(
            {0: expert(0, 0)},
            Topology(dp=1),
            (unit(0, 7),),
            "shared expert layer0/expert7 is not in the model",
            id="unknown shared expert",
        ),
    ],
)
def test_contradictions_are_refused(
    held: Mapping[int, list[TensorSize]],
    topology: Topology,
    shared: tuple[UnitKey, ...],
    message: str,
) -> None:
    with pytest.raises(InvalidJobError, match=message):
        ExpertTable.of(held, topology, shared=shared)


def test_neighbours_in_the_interleaved_order_belong_to_different_shares() -> None:
    ring = world([8], shares=4).layers[0].interleaved()
    assert [e.share for e in ring] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [str(e.unit) for e in ring[:4]] == [f"layer0/expert{i}" for i in (0, 2, 4, 6)]
