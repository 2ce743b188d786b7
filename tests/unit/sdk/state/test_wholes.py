"""What layouts say about the whole tensors that local ones are parts of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast import Topology
from holdfast._agree.plan import layout_of, own_shards, plan_alone, table_of
from holdfast._state.capture import LiveState, TensorSource, Whole
from holdfast._state.dtensors import is_box
from holdfast_core.snapshots.layouts import Entry

RANK = 5


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four by two ranks, of which this one is at (2, 1)."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=8)
    yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def sources(model: nn.Module, *optimizers: Any, **more: Any) -> dict[str, TensorSource]:
    live = LiveState(model, optimizers, Topology(dp=4, tp=2), RANK, **more)
    return {source.name: source for source in live.discover()}


def entries(found: dict[str, TensorSource]) -> dict[str, Entry]:
    base = plan_alone(RANK, Topology(dp=4, tp=2))
    table = table_of(list(found.values()))
    layout = layout_of(base, table, own_shards(base, table), 100, list(found.values()))
    return {entry.tensor: entry for entry in layout.entries}


def test_a_shard_has_its_offsets_in_the_whole(mesh: DeviceMesh) -> None:
    model = nn.Linear(6, 8, bias=False)
    local = torch.zeros(2, 3)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0), Shard(1)]))
    entry = entries(sources(model))["weight"]
    assert (entry.shape, entry.global_shape, entry.global_offsets) == ((2, 3), (8, 6), (4, 3))


def test_a_full_copy_is_marked_as_the_whole(mesh: DeviceMesh) -> None:
    model = nn.Linear(6, 8, bias=False)
    copies = [Replicate(), Replicate()]
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(8, 6), mesh, copies))
    found = sources(model)["weight"]
    assert found.whole == Whole(global_shape=(8, 6), global_offsets=(0, 0), param_group=-1)
    assert not found.private


def test_slices_of_a_sharded_stack_are_numbered_over_all_ranks(mesh: DeviceMesh) -> None:
    experts = nn.Module()
    shards = DTensor.from_local(torch.zeros(2, 4, 3), mesh, [Shard(0), Shard(2)])
    experts.w = nn.Parameter(shards)
    found = sources(nn.ModuleDict({"experts": experts}))
    assert list(found) == ["experts.w[4]", "experts.w[5]"]
    whole = found["experts.w[4]"].whole
    assert (whole.global_shape, whole.global_offsets) == ((4, 6), (0, 3))


def test_optimizer_states_lie_as_their_tensors_do(mesh: DeviceMesh) -> None:
    model = nn.Linear(6, 8, bias=False)
    model.weight = nn.Parameter(
        DTensor.from_local(torch.zeros(2, 6), mesh, [Shard(0), Replicate()])
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    found = sources(model, optimizer)
    assert found["weight:exp_avg"].whole.global_offsets == (4, 0)
    assert found["weight:step"].whole == Whole()


def test_parameter_groups_count_over_all_optimizers() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleList([first, second])
    groups: list[dict[str, Any]] = [{"params": [first.weight]}, {"params": [first.bias]}]
    one = torch.optim.SGD(groups)
    two = torch.optim.SGD([second.weight])
    found = {name: s.whole.param_group for name, s in sources(model, one, two).items()}
    assert found == {"0.weight": 0, "0.bias": 1, "1.weight": 2, "1.bias": -1}


def test_a_state_that_no_other_rank_holds_is_marked_as_its_own() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    private = frozenset({"weight:momentum_buffer"})
    found = entries(sources(model, optimizer, private=private))
    assert {name for name, entry in found.items() if entry.own} == private


def test_a_parameter_that_only_an_optimizer_has_is_marked() -> None:
    extra = torch.zeros(3, requires_grad=True)
    found = entries(sources(nn.Linear(2, 2), torch.optim.SGD([extra])))
    assert [name for name, entry in found.items() if entry.own] == ["optimizer/0/parameter0"]


class Strided:
    """As torch's private `_StridedShard`."""

    def __init__(self, dim: int, split_factor: int) -> None:
        self.dim, self.split_factor = dim, split_factor


@pytest.mark.parametrize(
    ("placements", "box"),
    [
        ([Shard(0), Shard(1)], True),
        ([Strided(0, 2), Shard(0)], True),  # FSDP2 over tensor-parallel rows
        ([Strided(0, 2), Shard(1)], False),
        ([Strided(0, 2), Replicate()], False),
        ([Strided(0, 4), Shard(0)], False),
    ],
)
def test_slices_that_lie_apart_are_no_box(placements: list[Any], box: bool) -> None:
    assert is_box(placements, (4, 2)) is box
