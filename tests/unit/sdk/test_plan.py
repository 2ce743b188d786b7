from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast._plan import BasePlan, layout_of, own_shards, plan_alone, plan_together
from holdfast_core.errors import ReplicaMismatchError
from holdfast_core.layouts import TensorRole, decode_layout, encode_layout
from holdfast_core.sharding import ShardStrategy
from holdfast_core.topology import Topology
from holdfast_core.units import TensorSize, UnitKey, UnitKind

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


def test_states_that_appear_later_are_divided_without_talking() -> None:
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
