from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast._copying.devices import CpuDevice, CudaDevice, device_of
from holdfast._copying.engine import CopyEngine, plan_copy
from holdfast._copying.placed import Placed
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.layouts import PIECE_BYTES, Layout, piece_digests

WAIT_S = 60
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_tensors_in_host_memory_need_no_device() -> None:
    assert isinstance(device_of([torch.zeros(1)]), CpuDevice)


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    made = CopyEngine(2, CudaDevice())
    yield made
    made.close()


@gpu
@needs_cuda
def test_device_and_host_tensors_share_a_slot_and_come_back(
    engine: CopyEngine, tmp_path: Path
) -> None:
    flats = [
        torch.randint(256, (length,), dtype=torch.uint8, device=device)
        for length, device in ((40 * PIECE_BYTES + 7, "cuda"), (1000, "cpu"), (5, "cuda"))
    ]
    parts, at = [], 0
    for flat in flats:
        parts.append((at, 0, flat))
        at += flat.numel() + 64
    plan = plan_copy(parts, (), PIECE_BYTES)
    layout = Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=at,
        extras_capacity=100,
    )
    raw = (ctypes.c_ubyte * layout.arena_bytes)()
    arena, address = memoryview(raw).cast("B"), ctypes.addressof(raw)
    target = Placed(arena=arena, address=address, layout=layout, slot=1)
    device = CudaDevice()
    device.register(address, len(arena))
    digests = engine.finish(target, b"extras", engine.capture(plan, target, device.fence()))
    device.unregister(address)
    assert digests == piece_digests(target.read(0, at + 6), PIECE_BYTES)
    wanted = [flat.clone() for flat in flats]
    for flat in flats:
        flat.zero_()
    engine.restore(plan, target, at + 6, digests)
    assert all(torch.equal(flat, was) for flat, was in zip(flats, wanted, strict=True))


@gpu
@needs_cuda
def test_a_save_on_a_device_is_the_state_of_its_step_and_comes_back(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 64)).cuda()
        return model, torch.optim.AdamW(model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()

    model, optimizer = make(0)
    session = holdfast.init(model=model, optimizer=optimizer, daemon=FakeDaemon(tmp_path))
    for step in range(1, 4):
        train(model, optimizer)
        state = [p.detach().clone() for p in model.parameters()]
        handle = session.save(step)
        train(model, optimizer)  # the hook holds it back until the copies are done
        handle.committed.result(WAIT_S)
    session.close()
    other, again = make(1)
    resumed = holdfast.init(model=other, optimizer=again, daemon=FakeDaemon(tmp_path, epoch=2))
    assert resumed.restore() == 3
    assert all(torch.equal(p, was) for p, was in zip(other.parameters(), state, strict=True))
    weight = next(other.parameters())
    assert again.state[weight]["exp_avg"].is_cuda
    assert not again.state[weight]["step"].is_cuda
    resumed.close()
