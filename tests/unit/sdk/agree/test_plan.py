from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from holdfast._agree.plan import (
    BasePlan,
    CaptureRules,
    layout_of,
    own_shards,
    plan_alone,
    plan_together,
)
from holdfast_core.errors import InvalidJobError, ReplicaMismatchError
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.layouts import TensorRole, decode_layout, encode_layout
from holdfast_core.snapshots.sharding import ShardStrategy
from holdfast_core.snapshots.units import TensorSize, UnitKey, UnitKind
from holdfast_core.topology import Topology

TOPOLOGY = Topology(dp=4, ep=2)
KIB = 1024


def size(name: str, nbytes: int, expert: int | None = None, private: bool = False) -> TensorSize:
    kind = UnitKind.DENSE if expert is None else UnitKind.EXPERT
    return TensorSize(
        unit=UnitKey(0, kind, expert),
        tensor=name,
        role=TensorRole.COMPUTE,
        dtype="float32",
        shape=(nbytes // 4,),
        nbytes=nbytes,
        private=private,
    )


def table(rank: int, states: bool = False) -> tuple[TensorSize, ...]:
    expert = rank % 2
    parameters = [size("dense", 6000 * KIB), size(f"expert.{expert}", 3000 * KIB, expert)]
    parameters.append(size("own", 10 * KIB + 4 * rank, private=True))
    if states:
        parameters += [
            size("dense:exp_avg", 6000 * KIB),
            size(f"expert.{expert}:exp_avg", 3000 * KIB, expert),
            size("dense:step", 4),
        ]
    return tuple(parameters)


def bases(states: bool = False) -> list[BasePlan]:
    tables = {rank: table(rank, states) for rank in range(4)}
    extras = dict.fromkeys(range(4), 100)
    return [
        plan_together(rank, TOPOLOGY, tables, extras, ShardStrategy.ADAPTIVE) for rank in range(4)
    ]


def test_windows_with_gradients_refuse_ranks_whose_optimizers_hold_other_parameters() -> None:
    """As ZeroRedundancyOptimizer makes them; windows whose training is repeated take them."""
    tables = {rank: table(rank) for rank in range(4)}
    tables[2] = tuple(replace(one, trained=one.tensor != "dense") for one in tables[2])
    extras = dict.fromkeys(range(4), 100)

    def plan(repeats: Repeats) -> BasePlan:
        return plan_together(
            0,
            TOPOLOGY,
            tables,
            extras,
            ShardStrategy.ADAPTIVE,
            CaptureRules(window=2, repeats=repeats),
        )

    assert plan(Repeats.TRAINING).schedules
    with pytest.raises(
        InvalidJobError, match="rank 0 holds dense, but no optimizer of rank 2 does"
    ):
        plan(Repeats.OPTIMIZER)


def check_partition(plans: Sequence[BasePlan], tables: Sequence[Sequence[TensorSize]]) -> None:
    """Each byte is captured once by its replicas, private ones by their rank."""
    captured: dict[str, list[tuple[int, int]]] = {}
    for rank, plan in enumerate(plans):
        for shard in own_shards(plan, tables[rank]):
            name = f"{shard.tensor}@{rank}" if shard.tensor == "own" else shard.tensor
            captured.setdefault(name, []).append((shard.start, shard.nbytes))
    for rank, tensors in enumerate(tables):
        for one in tensors:
            ranges = captured[f"{one.tensor}@{rank}" if one.private else one.tensor]
            end = 0
            for start, nbytes in sorted(ranges):
                assert start == end, one.tensor
                end += nbytes
            assert end == one.nbytes, one.tensor


@pytest.mark.parametrize("states", [False, True])
def test_replicas_divide_what_they_share(states: bool) -> None:
    check_partition(bases(states), [table(rank, states) for rank in range(4)])


def test_states_that_appear_later_are_divided_without_an_exchange() -> None:
    tables = [table(rank, states=True) for rank in range(4)]
    plans = bases()
    check_partition(plans, tables)
    for rank in range(4):
        shards = {shard.tensor: shard for shard in own_shards(plans[rank], tables[rank])}
        if "dense" in shards:
            ranges = (shards["dense"].start, shards["dense"].nbytes)
            assert ranges == (shards["dense:exp_avg"].start, shards["dense:exp_avg"].nbytes)


def test_a_tensor_that_grows_is_still_captured_once() -> None:
    grown = [
        tuple(size(one.tensor, 8000 * KIB) if one.tensor == "dense" else one for one in table(rank))
        for rank in range(4)
    ]
    check_partition(bases(), grown)


def test_all_ranks_reserve_for_the_largest_slot() -> None:
    plans = bases(states=True)
    largest = {plan.largest_slot_bytes for plan in plans}
    slots = [
        layout_of(plan, table(rank, True), own_shards(plan, table(rank, True)), 100).slot_bytes
        for rank, plan in enumerate(plans)
    ]
    assert largest == {max(slots)}


def test_replicas_that_declare_other_tensors_are_refused_by_name() -> None:
    tables = {rank: table(rank) for rank in range(4)}
    tables[2] = (*tables[2], size("odd", 64))
    with pytest.raises(ReplicaMismatchError, match="'odd'"):
        plan_together(0, TOPOLOGY, tables, dict.fromkeys(range(4), 0), ShardStrategy.EQUAL)


def test_a_layout_is_valid_and_has_room_for_extras() -> None:
    plan = plan_alone(1, TOPOLOGY)
    layout = layout_of(plan, table(1), own_shards(plan, table(1)), 5000)
    assert decode_layout(encode_layout(layout)) == layout
    assert layout.extras_capacity > 5000
    assert {entry.offset % 64 for entry in layout.entries} == {0}
    assert [entry.nbytes for entry in layout.entries] == [
        one.nbytes for one in sorted(table(1), key=lambda one: (one.unit, one.tensor))
    ]


def experts_of(
    tables: Mapping[int, tuple[TensorSize, ...]], topology: Topology, rank: int = 0
) -> BasePlan:
    extras = dict.fromkeys(tables, 0)
    return plan_together(
        rank, topology, tables, extras, ShardStrategy.ADAPTIVE, CaptureRules(partial=True)
    )


def unit(expert: int) -> UnitKey:
    return UnitKey(0, UnitKind.EXPERT, expert)


def test_an_expert_that_is_sharded_over_ranks_may_be_left_out_by_all_of_them() -> None:
    table = (size("dense", 64), size("a", 8 * KIB, 0, private=True), size("b", 8 * KIB, 1))
    plan = experts_of({0: table, 1: table}, Topology(dp=2))
    assert plan.apart == {unit(0), unit(1)}
    assert plan.spread == {unit(0): 2}
    both = [experts_of({0: table, 1: table}, Topology(dp=2), rank) for rank in (0, 1)]
    own = [each.own_experts(table) for each in both]
    assert own[0] & own[1] == {unit(0)}
    assert own[0] | own[1] == plan.apart


def test_tensor_parallel_ranks_hold_parts_of_the_same_experts() -> None:
    table = (size("a", 8 * KIB, 0), size("b", 8 * KIB, 1))
    plan = experts_of(dict.fromkeys(range(4), table), Topology(dp=2, tp=2))
    assert plan.spread == {unit(0): 2, unit(1): 2}


def test_pieces_are_small_beside_each_rank_s_part_of_an_expert() -> None:
    table = (size("a", 64 * KIB, 0, private=True),)
    assert experts_of({0: table}, Topology(dp=1)).piece_bytes == 8 * KIB
    assert experts_of({0: table, 1: table}, Topology(dp=2)).piece_bytes == 8 * KIB


def test_an_expert_over_ranks_of_other_experts_is_in_every_snapshot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tables = {
        rank: (size("a", 8 * KIB, 0, private=True), size(f"b{rank}", 8 * KIB, 1 + rank))
        for rank in range(2)
    }
    plan = experts_of(tables, Topology(dp=2, ep=2))
    assert plan.apart == {unit(1), unit(2)}
    assert "1 experts are spread over ranks" in caplog.text


def test_what_comes_later_of_an_expert_lies_where_the_rest_of_it_is() -> None:
    table = (size("a", 8 * KIB, 0, private=True),)
    later = (*table, size("a:step", 4, 0))
    plans = [experts_of({0: table, 1: table}, Topology(dp=2), rank) for rank in (0, 1)]
    shards = [shard for plan in plans for shard in own_shards(plan, later)]
    assert [shard.tensor for shard in shards].count("a:step") == 1


def test_a_part_that_other_ranks_do_not_expect_is_refused() -> None:
    table = (size("a", 8 * KIB, 0),)
    plans = [experts_of({0: table, 1: table}, Topology(dp=2), rank) for rank in (0, 1)]
    state = size("a:exp_avg", 8 * KIB, 0, private=True)
    stranger = next(plan for plan in plans if plan.rank not in plan.holders[unit(0)])
    with pytest.raises(InvalidJobError, match="a:exp_avg of layer0/expert0 did not exist"):
        own_shards(stranger, (*table, state))
