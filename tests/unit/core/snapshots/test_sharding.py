from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError, ReplicaMismatchError
from holdfast_core.snapshots.layouts import TENSOR_ALIGNMENT, TensorRole
from holdfast_core.snapshots.sharding import (
    Grain,
    Shard,
    ShardItem,
    ShardPlan,
    ShardStrategy,
    adps,
    edps,
    items_of,
    plan_shards,
)
from holdfast_core.snapshots.units import TensorSize, UnitKey
from holdfast_core.topology import Topology

deterministic = settings(max_examples=150, deadline=None, derandomize=True)


def tensor(unit: str, name: str, nbytes: int, *, private: bool = False) -> TensorSize:
    return TensorSize(
        unit=UnitKey.parse(unit),
        tensor=name,
        role=TensorRole.COMPUTE,
        dtype="uint8",
        shape=(nbytes,),
        nbytes=nbytes,
        private=private,
    )


def item(name: str, nbytes: int) -> ShardItem:
    shard = Shard(unit=UnitKey.parse("other"), tensor=name, start=0, nbytes=nbytes)
    return ShardItem(name=name, shards=(shard,))


def items(sizes: Sequence[int]) -> list[ShardItem]:
    return [item(f"t{i:03}", size) for i, size in enumerate(sizes)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Topology, dict[int, list[TensorSize]]]:
    ep = draw(st.integers(1, 3))
    topology = Topology(
        dp=ep * draw(st.integers(1, 3)),
        ep=ep,
        tp=draw(st.integers(1, 2)),
        pp=draw(st.integers(1, 2)),
    )
    nbytes = st.integers(0, 3000)
    tables: dict[int, list[TensorSize]] = {}
    dense: dict[tuple[int, int], list[int]] = {}
    expert: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        plane = (at.tp, at.pp)
        if plane not in dense:
            dense[plane] = draw(st.lists(nbytes, max_size=5))
        if (*plane, at.ep) not in expert:
            expert[(*plane, at.ep)] = draw(st.lists(nbytes, max_size=3))
        own = draw(st.lists(nbytes, max_size=2))
        tables[rank] = [
            *(
                tensor(f"layer{at.pp}/{'gate' if i % 2 else 'dense'}", f"d{i}", size)
                for i, size in enumerate(dense[plane])
            ),
            *(
                tensor(f"layer{at.pp}/expert{at.ep}", f"e{at.ep}.{i}", size)
                for i, size in enumerate(expert[(*plane, at.ep)])
            ),
            *(tensor("other", f"p{i}", size, private=True) for i, size in enumerate(own)),
        ]
    return topology, tables


def assert_captured_once(
    plan: ShardPlan, topology: Topology, tables: dict[int, list[TensorSize]]
) -> None:
    for rank, table in tables.items():
        for one in table:
            if one.private:
                group: tuple[int, ...] = (rank,)
            elif one.is_expert:
                group = topology.expert_replicas(rank)
            else:
                group = topology.dense_replicas(rank)
            ranges = sorted(
                (shard.start, shard.nbytes)
                for member in group
                for shard in plan.shards[member]
                if (shard.unit, shard.tensor) == (one.unit, one.tensor)
            )
            assert ranges
            at = 0
            for start, nbytes in ranges:
                assert start == at
                assert start % TENSOR_ALIGNMENT == 0
                at += nbytes
            assert at == one.nbytes


@deterministic
@given(
    worlds(),
    st.sampled_from(ShardStrategy),
    st.sampled_from(Grain),
    st.one_of(st.none(), st.integers(1, 1500)),
)
def test_every_byte_is_captured_once_in_its_replica_group(
    world: tuple[Topology, dict[int, list[TensorSize]]],
    strategy: ShardStrategy,
    grain: Grain,
    split_bytes: int | None,
) -> None:
    topology, tables = world
    plan = plan_shards(tables, topology, strategy, grain=grain, split_bytes=split_bytes)
    assert set(plan.shards) == set(tables)
    assert_captured_once(plan, topology, tables)
    for rank, shards in plan.shards.items():
        assert plan.load_bytes(rank) == sum(shard.nbytes for shard in shards)
        assert list(shards) == sorted(shards, key=lambda s: (s.unit, s.tensor, s.start))


@deterministic
@given(worlds(), st.sampled_from(ShardStrategy), st.randoms(use_true_random=False))
def test_all_ranks_compute_the_same_plan_whatever_the_order_of_tensors(
    world: tuple[Topology, dict[int, list[TensorSize]]], strategy: ShardStrategy, random: object
) -> None:
    topology, tables = world
    shuffled = {}
    for rank in sorted(tables, reverse=True):
        table = list(tables[rank])
        random.shuffle(table)  # type: ignore[attr-defined]
        shuffled[rank] = table
    first = plan_shards(tables, topology, strategy, split_bytes=200)
    assert plan_shards(shuffled, topology, strategy, split_bytes=200) == first


@deterministic
@given(worlds())
def test_a_plan_for_one_replica_group_is_its_part_of_the_plan_for_all(
    world: tuple[Topology, dict[int, list[TensorSize]]],
) -> None:
    topology, tables = world
    whole = plan_shards(tables, topology, split_bytes=200)
    for rank in tables:
        group = topology.dense_replicas(rank)
        part = plan_shards({r: tables[r] for r in group}, topology, split_bytes=200)
        assert all(part.shards[r] == whole.shards[r] for r in group)


@deterministic
@given(
    st.lists(st.integers(0, 1000), max_size=40),
    st.lists(st.integers(0, 2000), min_size=1, max_size=6),
)
def test_adaptive_sharding_keeps_the_bound_of_greedy_scheduling(
    sizes: list[int], fixed: list[int]
) -> None:
    m = len(fixed)
    loads = dict(enumerate(fixed))
    assigned = adps(items(sizes), loads)
    ends = {r: loads[r] + sum(i.nbytes for i in won) for r, won in assigned.items()}
    assert sum(ends.values()) == sum(fixed) + sum(sizes)
    bound = (sum(fixed) + sum(sizes)) / m + (1 - 1 / m) * max(sizes, default=0)
    assert all(end <= max(loads[rank], bound) for rank, end in ends.items())


@deterministic
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))
def test_equal_sharding_gives_consecutive_runs_within_one_item_of_the_share(
    sizes: list[int], m: int
) -> None:
    given_items = items(sizes)
    assigned = edps(given_items, range(m))
    assert [i for rank in range(m) for i in assigned[rank]] == given_items
    for won in assigned.values():
        assert sum(i.nbytes for i in won) <= sum(sizes) / m + max(sizes, default=0)


def test_adaptive_sharding_gives_the_largest_to_the_least_loaded_and_breaks_ties_by_name() -> None:
    sizes = {"b": 4, "a": 4, "c": 3, "d": 2}
    assigned = adps([item(name, size) for name, size in sizes.items()], {0: 1, 1: 0, 2: 0})
    assert {rank: [i.name for i in won] for rank, won in assigned.items()} == {
        0: ["c", "d"],
        1: ["a"],
        2: ["b"],
    }


def test_adaptive_sharding_fills_the_gaps_that_experts_leave_and_equal_does_not() -> None:
    topology = Topology(dp=2, ep=2)
    dense = [tensor("layer0/dense", f"d{i}", 1024) for i in range(8)]
    tables = {
        0: [*dense, tensor("layer0/expert0", "e0", 4096)],
        1: [*dense, tensor("layer0/expert1", "e1", 2048)],
    }
    adaptive = plan_shards(tables, topology, ShardStrategy.ADAPTIVE)
    equal = plan_shards(tables, topology, ShardStrategy.EQUAL)
    assert [adaptive.load_bytes(r) for r in (0, 1)] == [7168, 7168]
    assert [equal.load_bytes(r) for r in (0, 1)] == [8192, 6144]
    assert adaptive.reason == (
        "adaptive sharding by range over dp2·ep2·tp1·pp1: 7168 to 7168 bytes per rank"
    )


def test_a_unit_stays_together_at_the_grain_of_units() -> None:
    tensors = [tensor("layer0/dense", "a", 10), tensor("layer0/dense", "b", 20)]
    (only,) = items_of(tensors, 2, grain=Grain.UNIT)
    assert only.name == "layer0/dense"
    assert only.nbytes == 30


def test_large_tensors_are_cut_into_equal_aligned_ranges_and_small_ones_are_not() -> None:
    tensors = [tensor("head", "big", 1000), tensor("head", "small", 300)]
    cut = [i.shards[0] for i in items_of(tensors, 2, grain=Grain.RANGE, split_bytes=300)]
    assert [(s.tensor, s.start, s.nbytes) for s in cut] == [
        ("big", 0, 256),
        ("big", 256, 256),
        ("big", 512, 256),
        ("big", 768, 232),
        ("small", 0, 300),
    ]


def test_by_default_ranks_of_a_large_state_differ_by_a_few_percent_at_most() -> None:
    big = 3 * 1024**3 + 17
    tables = {rank: [tensor("embedding", "w", big)] for rank in range(4)}
    for strategy in ShardStrategy:
        plan = plan_shards(tables, Topology(dp=4), strategy)
        loads = [plan.load_bytes(rank) for rank in range(4)]
        assert max(loads) < 1.04 * big / 4


def test_a_tensor_without_bytes_is_still_listed_once() -> None:
    tables = {rank: [tensor("other", "empty", 0)] for rank in range(3)}
    for strategy in ShardStrategy:
        plan = plan_shards(tables, Topology(dp=3), strategy)
        assert sum(len(shards) for shards in plan.shards.values()) == 1


def test_a_world_without_tensors_has_an_empty_plan() -> None:
    plan = plan_shards({0: [], 1: []}, Topology(dp=2))
    assert plan.shards == {0: (), 1: ()}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ([], "rank 1 has nothing"),
        ([tensor("layer0/gate", "w", 8)], r"rank 1 has uint8\[8\] of 8 bytes in layer0/gate"),
    ],
)
def test_declared_replicas_with_different_tensors_are_refused_by_unit_and_rank(
    other: list[TensorSize], found: str
) -> None:
    tables = {0: [tensor("layer0/gate", "w", 4)], 1: other}
    with pytest.raises(ReplicaMismatchError, match=f"unit layer0/gate: .*ranks 0 and 1 .*{found}"):
        plan_shards(tables, Topology(dp=2))


def test_an_expert_that_only_a_replica_has_is_refused_by_name() -> None:
    tables = {0: [], 1: [tensor("layer2/expert7", "w", 4)]}
    with pytest.raises(ReplicaMismatchError, match=r"unit layer2/expert7: .*rank 0 has nothing"):
        plan_shards(tables, Topology(dp=2, ep=1))


def test_missing_replicas_are_named() -> None:
    with pytest.raises(InvalidJobError, match=r"rank 0: the tensors of its replicas \[1, 2\]"):
        plan_shards({0: []}, Topology(dp=3))


def test_a_name_used_twice_is_refused() -> None:
    twice = [tensor("head", "w", 4), tensor("other", "w", 4)]
    with pytest.raises(InvalidJobError, match="rank 0 names the tensor 'w' of unit other twice"):
        plan_shards({0: twice}, Topology(dp=1))


def test_ranges_of_no_bytes_are_refused() -> None:
    with pytest.raises(InvalidJobError, match="split_bytes=0"):
        plan_shards({0: []}, Topology(dp=1), split_bytes=0)
