from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast import Topology, topology_from_device_mesh
from holdfast._state.capture import LiveState
from holdfast_core.errors import InvalidJobError


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh_of(*names: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.zeros([1] * len(names), dtype=torch.int), mesh_dim_names=names)


@pytest.mark.usefixtures("group")
def test_a_mesh_with_named_dimensions_describes_a_topology() -> None:
    assert topology_from_device_mesh(mesh_of("dp", "ep")) == Topology(dp=1, ep=1)
    assert topology_from_device_mesh(mesh_of("pp", "dp", "tp")) == Topology(dp=1)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("names", [("ep", "dp"), ("data",), ("tp", "pp")])
def test_another_mesh_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidJobError, match="mesh dimensions"):
        topology_from_device_mesh(mesh_of(*names))


@pytest.mark.usefixtures("group")
def test_distributed_tensors_appear_as_their_local_shard() -> None:
    mesh = mesh_of("dp")
    model: Any = nn.Linear(4, 4)
    for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
        tensor = DTensor.from_local(getattr(model, name).detach(), mesh, [placement])
        setattr(model, name, nn.Parameter(tensor))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    live = LiveState(model, [optimizer], Topology(dp=1), 0)
    found = {source.name: source for source in live.discover()}
    assert type(found["weight"].tensor) is torch.Tensor
    assert found["weight"].tensor.data_ptr() == model.weight.to_local().data_ptr()
    assert not live.has_changed()
    model.weight._local_tensor = torch.zeros(4, 4)
    assert live.has_changed()


def fake_mesh(rank: int, sizes: dict[str, int]) -> DeviceMesh:
    """A mesh of a world in which only this rank exists."""
    count = math.prod(sizes.values())
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    ranks = torch.arange(count, dtype=torch.int).reshape(tuple(sizes.values()))
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(sizes))


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


NAMED: list[tuple[dict[str, int], Topology]] = [
    ({"replicate": 2, "shard": 4}, Topology(dp=8)),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, Topology(dp=4, tp=2)),
    ({"pp": 2, "dp_shard": 2, "cp": 2}, Topology(dp=4, pp=2)),
    ({"dp_replicate": 2, "dp_shard_cp": 4}, Topology(dp=8)),
    ({"pp": 2, "dp_replicate": 2, "ep": 2}, Topology(dp=4, ep=2, pp=2)),
    ({"efsdp": 2, "ep": 2, "etp": 2}, Topology(dp=4, ep=2, tp=2)),
    ({"dp_shard_mod_ep": 2, "dp_shard_in_ep": 2, "cp": 2}, Topology(dp=8, ep=4)),
]


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(("sizes", "expected"), NAMED, ids=str)
def test_dimensions_have_the_names_that_frameworks_give_them(
    sizes: dict[str, int], expected: Topology
) -> None:
    assert topology_from_device_mesh(fake_mesh(5, sizes)) == expected


@pytest.mark.usefixtures("no_group")
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_flattened_dimensions_count() -> None:
    sizes = {"dp_shard_mod_ep": 2, "dp_shard_in_ep": 2, "cp": 1, "tp": 2}
    mesh = fake_mesh(3, sizes)
    assert topology_from_device_mesh(mesh) == Topology(dp=4, ep=2, tp=2)
    mesh["dp_shard_in_ep", "cp"]._flatten("ep")
    assert topology_from_device_mesh(mesh) == Topology(dp=4, ep=2, tp=2)
    dist.destroy_process_group()
    mesh = fake_mesh(3, sizes)
    mesh["dp_shard_in_ep", "cp", "tp"]._flatten("ep")
    assert topology_from_device_mesh(mesh) == Topology(dp=4, tp=2)
    dist.destroy_process_group()
    mesh = fake_mesh(3, {"dp_replicate": 2, "dp_shard": 2})
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    assert topology_from_device_mesh(mesh["dp"]) == Topology(dp=4)
    dist.destroy_process_group()
    mesh = fake_mesh(3, {"dp_replicate": 2, "dp_shard": 2})
    mesh["dp_replicate"]._flatten("ep")
    with pytest.raises(InvalidJobError, match=r"ep of the mesh has ranks \[1, 3\]"):
        topology_from_device_mesh(mesh)


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(
    "names", [("tp", "dp_shard"), ("ep", "dp_shard"), ("tp", "etp"), ("dp", "ep", "dp_shard")]
)
def test_an_order_that_a_topology_does_not_have_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidJobError, match="ranks are numbered by pipeline stage"):
        topology_from_device_mesh(fake_mesh(0, dict.fromkeys(names, 2)))


@dataclass
class Degrees:
    """As torchtitan's ParallelDims."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


def test_degrees_of_a_framework_describe_a_topology() -> None:
    assert topology_from_device_mesh(
        Degrees(dp_replicate=2, dp_shard=2, cp=2, pp=2, ep=4)
    ) == Topology(dp=8, ep=4, pp=2)
    assert topology_from_device_mesh(Degrees(dp_shard=4, tp=2, ep=8)) == Topology(dp=4, tp=2)
    within = Degrees(dp_shard=4, tp=2, ep=4, etp=2)
    assert topology_from_device_mesh(within, ep=4) == Topology(dp=4, tp=2, ep=4)
    with pytest.raises(InvalidJobError, match=r"give ep=4, but the argument is ep=2"):
        topology_from_device_mesh(within, ep=2)
    with pytest.raises(InvalidJobError, match="dp_shard=-1 is not known yet"):
        topology_from_device_mesh(Degrees(dp_shard=-1))
    with pytest.raises(InvalidJobError, match="a Linear says nothing of parallelism"):
        topology_from_device_mesh(nn.Linear(1, 1))  # type: ignore[arg-type]
