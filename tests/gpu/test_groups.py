"""Process groups: left and formed again in one process, and ranks that share a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import Machine, bits
from ranks import run_ranks
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch
from torch.multiprocessing.spawn import start_processes

import holdfast
from holdfast.testing import FakeDaemon

WAIT_S = 60.0
RANKS = 2


def form(backend: str, meeting: Path, rank: int, ranks: int) -> None:
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)


class MoE(nn.Module):
    """A dense part that replicas share, of more bytes than one message between ranks, and
    experts."""

    def __init__(self, seed: int, experts_seed: int, kind: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(700, 700)])
        torch.manual_seed(experts_seed)
        self.moe = nn.ModuleDict(
            {"experts": nn.ParameterDict({"w": nn.Parameter(torch.randn(2, 300, 300))})}
        )
        self.to(kind)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 0.1 * step)
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for weight in model.parameters():
        state = optimizer.state[weight]
        tensors += [weight, *(state[key] for key in sorted(state))]
    return [bits(tensor) for tensor in tensors]


def live_through(
    rank: int, ranks: int, kind: str, backend: str, directory: str, worlds: int = 3
) -> None:
    """Train in `worlds` training worlds, one after the other in this process; each goes on from
    what the one before saved."""
    if kind == "cuda":
        torch.cuda.set_device(0)
    before: list[torch.Tensor] = []
    for world in range(1, worlds + 1):
        form(backend, Path(directory) / f"meeting-{world}", rank, ranks)
        # Replicas begin alike; later everything is restored.
        model = MoE(1 if world == 1 else 7 + rank, 10 * world + rank, kind)
        optimizer = torch.optim.AdamW(model.parameters())
        session = holdfast.init(
            model=model,
            optimizer=optimizer,
            topology=holdfast.Topology(dp=ranks, ep=ranks),
            daemon=FakeDaemon(directory, rank=rank, world_size=ranks, epoch=world),
            settings=holdfast.Settings(start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S),
        )
        restored = session.restore()
        assert restored == (2 * (world - 1) or None), (rank, world, restored)
        for found, wanted in zip(state_of(model, optimizer), before, strict=world > 1):
            assert torch.equal(found, wanted), (rank, world)
        for step in (2 * world - 1, 2 * world):
            train(model, optimizer, step)
            session.save(step).committed.result(WAIT_S)
        ones = torch.ones(1000, device=kind)
        dist.all_reduce(ones)
        assert bool((ones == ranks).all())
        before = state_of(model, optimizer)
        session.close()
        dist.destroy_process_group()


def test_a_process_leaves_its_group_and_forms_another(machine: Machine, arenas: Path) -> None:
    live_through(0, 1, machine.kind, machine.backend, str(arenas))


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch 2.15 has this")
def test_torch_gives_the_group_of_a_device_new_connections(machine: Machine) -> None:
    """What groups on devices need in order to stay as objects (decision 0100)."""
    reconfigurable: Any = dist
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group(
        "nccl2" if machine.is_cuda else "gloo",
        store=store,
        rank=0,
        world_size=1,
        enable_reconfigure=True,
    )
    try:
        assert reconfigurable._supports_reconfigure()
        for world in range(1, 4):
            handle = reconfigurable._get_reconfigure_handle()
            reconfigurable._reconfigure(uuid=world, handles=[handle]).wait()
            ones = torch.ones(1000, device=machine.kind)
            dist.all_reduce(ones)
            assert bool((ones == 1).all())
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_ranks_on_one_device_share_what_they_restore(machine: Machine, arenas: Path) -> None:
    args = (RANKS, machine.kind, "gloo", str(arenas))
    if machine.is_cuda:  # a process that has been forked from one with CUDA cannot use it
        start_processes(live_through, args=args, nprocs=RANKS, start_method="spawn")
    else:
        run_ranks(live_through, args, RANKS)
