"""Tensors of every kind come back to the bit, on the device that they were on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machines import Machine, Part, bits, random_bytes, room_for, slot_range
from torch import nn

import holdfast
from holdfast._copying.engine import CopyEngine, plan_copy
from holdfast._digests import BLOCK_BYTES, block_sums, digest_of
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.layouts import PIECE_BYTES, TENSOR_ALIGNMENT, piece_digests, round_up

WAIT_S = 60.0
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def tensor_of(machine: Machine, dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    """A tensor of random bits, NaNs among them; a bool has one of its two values."""
    count = torch.Size(shape).numel()
    raw = random_bytes(machine, count * dtype.itemsize, seed)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def forms_of(machine: Machine, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of one dtype in every form that torch has for them."""
    base = tensor_of(machine, dtype, 6, 40, seed=seed + 1)
    image = tensor_of(machine, dtype, 2, 3, 4, 5, seed=seed + 2)
    return {
        "plain": tensor_of(machine, dtype, 33, 7, seed=seed),
        "scalar": tensor_of(machine, dtype, 1, seed=seed + 3).reshape(()),
        "empty": tensor_of(machine, dtype, 0, 5, seed=seed),
        "transposed": tensor_of(machine, dtype, 8, 50, seed=seed + 4).t(),
        "every_third": tensor_of(machine, dtype, 100, seed=seed + 5)[::3],
        "view_of_one": base[:2],
        "other_view": base[3:, 5:20],
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "expanded": tensor_of(machine, dtype, 4, 1, seed=seed + 6).expand(4, 9),
    }


class Holder(nn.Module):
    """Every form of every dtype, and a weight for an optimizer."""

    def __init__(self, machine: Machine, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device=machine.kind))
        for number, dtype in enumerate(DTYPES):
            name = str(dtype).removeprefix("torch.")
            for form, tensor in forms_of(machine, dtype, seed + 100 * number).items():
                made = nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(f"{name}_{form}", made)


class Small(nn.Module):
    """Many small tensors."""

    def __init__(self, machine: Machine, seed: int) -> None:
        super().__init__()
        flat = torch.full((machine.small, 33), float(seed), device=machine.kind)
        flat += torch.arange(machine.small, device=machine.kind).unsqueeze(1)
        weights = [nn.Parameter(row.clone(), requires_grad=False) for row in flat]
        self.weights = nn.ParameterList(weights)
        self.head = nn.Parameter(torch.ones(2, device=machine.kind))


def session_of(
    model: nn.Module, directory: Path, epoch: int = 1
) -> tuple[holdfast.Session, torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    daemon = FakeDaemon(directory, epoch=epoch)
    return holdfast.init(model=model, optimizer=optimizer, daemon=daemon), optimizer


@pytest.mark.parametrize("kind", [Holder, Small])
def test_what_a_model_holds_comes_back_to_the_bit(
    machine: Machine, arenas: Path, kind: type[Holder] | type[Small]
) -> None:
    model = kind(machine, 1)
    session, _ = session_of(model, arenas)
    session.save(1).committed.result(WAIT_S)
    session.close()

    other = kind(machine, 7)
    resumed, _ = session_of(other, arenas, epoch=2)
    assert resumed.restore() == 1
    resumed.close()
    for (name, found), wanted in zip(other.named_parameters(), model.parameters(), strict=True):
        assert found.stride() == wanted.stride(), name
        assert torch.equal(bits(found), bits(wanted)), name


@pytest.fixture(params=["pinned", "through a buffer"])
def pinned(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "pinned")


@pytest.fixture
def engine(machine: Machine) -> Iterator[CopyEngine]:
    made = CopyEngine(2, machine.copier())
    yield made
    made.close()


def test_tensors_of_device_and_host_share_a_slot(
    machine: Machine, engine: CopyEngine, pinned: bool
) -> None:
    lengths = ((40 * PIECE_BYTES + 7, machine.kind), (1000, "cpu"), (5, machine.kind))
    flats = [random_bytes(Machine(kind), length) for length, kind in lengths]
    parts: list[Part] = []
    at = 0
    for flat in flats:
        parts.append((at, 0, flat))
        at += flat.numel() + 64
    plan = plan_copy(parts, (), PIECE_BYTES)
    target, device = room_for(at, extras_bytes=100), engine._device
    if pinned:
        device.register(*slot_range(target))
    digests = engine.finish(target, b"extras", engine.capture(plan, target, device.fence()))
    device.unregister()
    assert digests == piece_digests(target.read(0, at + 6), PIECE_BYTES)
    assert all(target.read(start, f.numel()) == bytes(f.cpu().numpy()) for start, _, f in parts)
    wanted = [flat.clone() for flat in flats]
    for flat in flats:
        flat.zero_()
    engine.restore(plan, target, at + 6, digests)
    assert all(torch.equal(flat, was) for flat, was in zip(flats, wanted, strict=True))


@pytest.mark.timeout(180)
def test_a_large_tensor_comes_back_to_the_bit(machine: Machine, engine: CopyEngine) -> None:
    nbytes = machine.large_bytes
    flat = random_bytes(machine, nbytes)
    plan = machine.plan([(0, 0, flat)])
    target, device = room_for(nbytes), engine._device
    device.register(*slot_range(target))
    digests = engine.finish(target, b"", engine.capture(plan, target, device.fence()))
    device.unregister()
    wanted = digest_of([flat])
    flat.zero_()
    assert digest_of([flat]) != wanted
    engine.restore(plan, target, nbytes, digests)
    assert digest_of([flat]) == wanted
    assert not machine.is_cuda or 1e9 < device.bytes_s < 1e12  # a link's rate


def test_small_tensors_that_change_between_captures_are_collected_anew(
    machine: Machine, engine: CopyEngine
) -> None:
    """Their copies are as large as a group, across pieces."""
    length, count = 2 * PIECE_BYTES // 5, machine.small // 50
    flats = [random_bytes(machine, length, seed) for seed in range(count)]
    starts = [index * round_up(length, TENSOR_ALIGNMENT) for index in range(count)]
    plan = machine.plan([(at, 0, flat) for at, flat in zip(starts, flats, strict=True)])
    assert len(plan.gather.tensors) == (count if machine.is_cuda else 0)
    end = starts[-1] + length
    target, device = room_for(end), engine._device
    device.register(*slot_range(target))
    for _ in range(5):
        machine.later(lambda: torch._foreach_add_(flats, 1))
        digests = engine.finish(target, b"", engine.capture(plan, target, device.fence()))
        machine.finish()
        assert digests == piece_digests(target.read(0, end), PIECE_BYTES)
        found = [target.read(at, length) for at in starts]
        assert found == [bytes(flat.cpu().numpy()) for flat in flats]
    device.unregister()


def test_training_goes_on_from_what_was_saved_as_if_nothing_had_happened(
    machine: Machine, arenas: Path
) -> None:
    """Dropout shows whether the device's random numbers go on as well."""

    def make(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(256, 256), nn.Dropout(), nn.Linear(256, 64))
        model = layers.to(machine.kind)
        return model, torch.optim.AdamW(model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        inputs = torch.ones(64, 256, device=machine.kind)
        model(inputs).square().mean().backward()
        optimizer.step()

    model, optimizer = make(0)
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        daemon=FakeDaemon(arenas),
        settings=holdfast.Settings(start_wait_s=WAIT_S),
    )
    for step in range(1, 4):
        train(model, optimizer)
        handle = session.save(step)
        train(model, optimizer)  # the hook holds it back until the copies are done
        handle.committed.result(WAIT_S)
    session.close()
    other, again = make(1)
    resumed = holdfast.init(model=other, optimizer=again, daemon=FakeDaemon(arenas, epoch=2))
    assert resumed.restore() == 3
    train(other, again)
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(found), bits(wanted))
        for key, value in optimizer.state[wanted].items():
            assert again.state[found][key].device == value.device, key
            assert torch.equal(bits(again.state[found][key]), bits(value)), key
    resumed.close()


@pytest.mark.parametrize(
    "length", [0, 1, 7, BLOCK_BYTES - 1, BLOCK_BYTES + 9, 2500 * BLOCK_BYTES + 3]
)
def test_a_device_makes_the_sums_that_the_host_makes(machine: Machine, length: int) -> None:
    flat = random_bytes(Machine("cpu"), length)
    there = flat.to(machine.kind)
    assert block_sums(there).tolist() == block_sums(flat).tolist()
    assert block_sums(there[1:]).tolist() == block_sums(flat[1:]).tolist()
    if machine.is_cuda:
        assert digest_of([there]) == digest_of([block_sums(flat)])
