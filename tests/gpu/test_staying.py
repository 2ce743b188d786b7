"""Processes that stay, on a device: worlds of one rank with NCCL, and of two ranks with gloo, since
NCCL refuses two ranks on one device.

On a machine without a device, gloo plays NCCL (`played_nccl`), if torch can keep groups there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import Machine
from members import Members
from ranks import run_ranks
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from holdfast import elastic
from holdfast._elastic.connections import why_not
from holdfast._elastic.session import reset_sharded
from holdfast._elastic.world import World
from holdfast_core.errors import UnreachableError

WAIT_S = 40.0
WIDTH, BATCH, BLOCKS = 64, 16, 3
LONELY = dict.fromkeys(range(1, 5), (0,))
"""Worlds of one rank."""
SHARED = {1: (0, 1), 2: (0, 1)}
"""Worlds of two ranks, the second of which has a new process in the second."""
REPLACED = 1
BOTH = "cpu:gloo,cuda:nccl"

# Without a device, ranks may have to import torch beside other tests.
pytestmark = pytest.mark.timeout(60 if torch.cuda.is_available() else 180)
needs_torch = pytest.mark.skipif(bool(why_not("gloo")), reason="torch 2.15 has this")


def enter(
    rank: int, ranks: int, kind: str, backend: str, socket: str, *, nccl_stays: bool = False
) -> World:
    """Join the first world of this process."""
    os.environ.update(HOLDFAST_SOCKET=socket, HOLDFAST_JOB="job", RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(0)
    elif "nccl" in backend:
        from played_nccl import play_nccl

        play_nccl("cuda" if backend == BOTH else "cpu")
    return elastic.init(backend, nccl_stays=nccl_stays)


def make_model(world: World, kind: str, layout: str) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)]
    model = nn.Sequential(*layers).to(kind)
    if layout == "ddp":
        return world.ddp(model)
    mesh = init_device_mesh(kind, (world.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients_of(model: nn.Module, rank: int, kind: str) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator).to(kind)
    model(inputs).square().mean().backward()
    found = []
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        assert gradient is not None
        found.append(getattr(gradient, "_local_tensor", gradient).clone())
    return found


def live_alone(
    process: int, kind: str, backend: str, layout: str, stays: bool, socket: str, port: str
) -> None:
    """Compute the same gradients in each world, with the same groups where they stay."""
    del process
    clock: Any = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=WAIT_S))
    clock.get("began-1")
    world = enter(0, 1, kind, backend, socket, nccl_stays=stays)
    assert world.groups_stay == (stays or not why_not(backend))
    model = make_model(world, kind, layout)
    everyone, first = dist.group.WORLD, gradients_of(model, 0, kind)
    for epoch in LONELY:
        assert world.epoch == epoch
        assert all(map(torch.equal, gradients_of(model, 0, kind), first)), epoch
        world.finish_collectives()
        assert not world.groups_stay or dist.group.WORLD is everyone
        clock.add(f"done-{epoch}", 1)
        if epoch == len(LONELY):
            clock.get(f"began-{epoch + 1}")
            break
        following = world._following
        assert following is not None and following.wait_newer(epoch, WAIT_S)
        if "nccl" in backend:
            with pytest.raises(UnreachableError):
                world.finish_collectives()
        world.leave()
        reset_sharded(model)
        world.join()
    world.close()
    assert not dist.is_initialized()


def share_the_device(process: int, kind: str, socket: str, port: str) -> None:
    """Average gradients over both ranks; then the second one is replaced."""
    rank, first = [(0, 1), (REPLACED, 1), (REPLACED, 2)][process]
    clock: Any = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=WAIT_S))
    clock.get(f"began-{first}")
    world = enter(rank, 2, kind, "gloo", socket)
    model = make_model(world, kind, "ddp")
    expected = gradients_of(model, rank, kind)
    if first == 1:
        clock.add("done-1", 1)
        if rank == REPLACED:
            clock.get("began-2")
            world.close()
            return
        with pytest.raises(RuntimeError):  # the other one does not come
            dist.all_reduce(torch.ones(1000, device=kind))
        world.leave()
        world.join()
        assert all(map(torch.equal, gradients_of(model, rank, kind), expected))
    total = torch.full((1000,), float(rank + 1), device=kind)
    dist.all_reduce(total)
    assert bool((total == 3).all())
    clock.add("done-2", 1)
    clock.get("began-3")
    world.close()


def run(
    body: Callable[..., None],
    machine: Machine,
    directory: Path,
    worlds: Mapping[int, Sequence[int]],
    processes: int,
    *arguments: Any,
) -> None:
    """Run `body(process, kind, *arguments, socket, port)` in each process."""
    members = Members(directory / "socket", worlds)  # type: ignore[abstract]  # it serves two calls
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = (machine.kind, *arguments, str(directory / "socket"), str(clock.port))
    try:
        with members.begin_all(clock):
            if machine.is_cuda:  # a process forked from one with CUDA cannot use it
                start_processes(body, args=args, nprocs=processes, start_method="spawn")
            else:
                run_ranks(body, args, processes)
    finally:
        members.stop()


@needs_torch
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("backend", ["nccl", BOTH])
def test_groups_of_nccl_get_new_connections_in_each_world(
    backend: str, layout: str, machine: Machine, tmp_path: Path
) -> None:
    run(live_alone, machine, tmp_path, LONELY, 1, backend, layout, True)


def test_groups_of_a_device_are_made_again_in_each_world(machine: Machine, tmp_path: Path) -> None:
    """Where nobody asked for groups that stay, or torch cannot give them new connections."""
    run(live_alone, machine, tmp_path, LONELY, 1, machine.backend, "ddp", False)


def test_a_rank_that_shares_a_device_is_replaced(machine: Machine, tmp_path: Path) -> None:
    run(share_the_device, machine, tmp_path, SHARED, 3)
