from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

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
