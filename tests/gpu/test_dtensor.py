"""Sharded state: DTensors over a device mesh of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from machines import Machine, bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout

WAIT_S = 60.0
WIDTH = 96


@pytest.fixture
def mesh(machine: Machine, tmp_path: Path) -> Iterator[DeviceMesh]:
    if machine.is_cuda:
        torch.cuda.set_device(0)
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group(machine.backend, init_method=meeting, rank=0, world_size=1)
    yield init_device_mesh(machine.kind, (1,))
    dist.destroy_process_group()


def plain(seed: int, machine: Machine) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    return made.to(machine.kind)


def distributed(seed: int, machine: Machine, mesh: DeviceMesh) -> nn.Module:
    """Weights in shards of rows and of columns, and replicated biases."""
    model = plain(seed, machine)
    for number, layer in enumerate((model[0], model[2])):
        assert isinstance(layer, nn.Linear)
        weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(number)])
        layer.weight = nn.Parameter(weight)
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate()]))
    return model


def fully_sharded(seed: int, machine: Machine, mesh: DeviceMesh) -> nn.Module:
    model = plain(seed, machine)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for weight in model.parameters():
        assert isinstance(weight, DTensor)
        gradient = torch.randn(weight.shape).to(weight.device)
        weight.grad = distribute_tensor(gradient, weight.device_mesh, weight.placements)
    optimizer.step()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return bits(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


@pytest.mark.parametrize("make", [distributed, fully_sharded])
def test_sharded_weights_and_their_optimizer_state_come_back_to_the_bit(
    machine: Machine,
    mesh: DeviceMesh,
    arenas: Path,
    make: Callable[[int, Machine, DeviceMesh], nn.Module],
) -> None:
    model = make(1, machine, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = holdfast.init(model=model, optimizer=optimizer, daemon=FakeDaemon(arenas))
    for step in (1, 2, 3):
        train(model, optimizer, step)
        handle = session.save(step)
    handle.committed.result(WAIT_S)
    session.close()

    other = make(7, machine, mesh)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    daemon = FakeDaemon(arenas, epoch=2)
    resumed = holdfast.init(model=other, optimizer=again, daemon=daemon)
    assert resumed.restore() == 3
    resumed.close()
    for (name, found), wanted in zip(other.named_parameters(), model.parameters(), strict=True):
        assert isinstance(found, DTensor)
        assert torch.equal(local(found), local(wanted)), name
        for key, value in optimizer.state[wanted].items():
            twin = again.state[found][key]
            assert type(twin) is type(value), (name, key)
            assert torch.equal(local(twin), local(value)), (name, key)
    train(model, optimizer, 4)
    train(other, again, 4)
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(local(found), local(wanted))

    held = daemon.sealed()[Generation(1, 3)]
    layout = decode_layout((held.home / "layout.json").read_bytes())
    shapes = {entry.tensor: entry.global_shape for entry in layout.entries}
    assert shapes["0.weight"] == (2 * WIDTH, WIDTH)
