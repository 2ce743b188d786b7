"""Pinned memory: granted and released, or refused; and device memory that is refused.

A refusal costs time, and one line in the log. It never costs a snapshot, nor a byte of one.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import Machine, bits, random_bytes, room_for
from torch import nn
from torch.overrides import TorchFunctionMode

import holdfast
from holdfast._copying.arena import MappedArena
from holdfast._copying.engine import CopyEngine
from holdfast._copying.pinning import READ_ONLY_FLAGS, Buffers, HostRegistry, PinnedMapping
from holdfast._copying.strided import copy_of_span
from holdfast._digests import BLOCK_BYTES, digest_of
from holdfast._state.room import room_like
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import PartialExperts
from holdfast_core.snapshots.layouts import PIECE_BYTES, piece_digests

WAIT_S = 60.0
PAGE = mmap.PAGESIZE
PAGES = 64
ALREADY, UNKNOWN, REFUSED = 712, 713, 2


class Registry:
    """Plays the functions of CUDA's runtime: they return codes, and a refusal stays behind."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.limit_bytes = PAGES * PAGE
        self.left_behind = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int, /) -> int:
        assert flags in (0, READ_ONLY_FLAGS)
        overlaps = any(at < address + nbytes and address < at + n for at, n in self.held.items())
        code = ALREADY if overlaps else REFUSED if nbytes > self.limit_bytes else 0
        if not code:
            self.held[address] = nbytes
        return self._left(code)

    def cudaHostUnregister(self, address: int, /) -> int:
        return self._left(0 if self.held.pop(address, 0) else UNKNOWN)

    def consume(self) -> None:
        self.left_behind = 0

    def _left(self, code: int) -> int:
        self.left_behind = code or self.left_behind
        return code


def launch() -> None:
    """Launch a kernel; raises what a refused call left behind in this thread."""
    torch.full((4,), 2.0, device="cuda")


def swallow() -> None:
    with suppress(RuntimeError):
        launch()


@pytest.fixture
def pinning(machine: Machine, registry: Any) -> PinnedMapping:
    return PinnedMapping(registry, swallow if machine.is_cuda else registry.consume)


@pytest.fixture
def registry(machine: Machine) -> Any:
    return torch.cuda.cudart() if machine.is_cuda else Registry()


@pytest.fixture
def memory() -> Iterator[int]:
    """Address of pages that processes could share, as those of an arena."""
    with mmap.mmap(-1, PAGES * PAGE) as pages:
        view = torch.frombuffer(pages, dtype=torch.uint8)
        yield view.data_ptr()
        del view


def is_pinned(registry: HostRegistry, address: int) -> bool:
    if isinstance(registry, Registry):
        return address in registry.held
    arena = (ctypes.c_ubyte * PAGE).from_address(address)
    return torch.frombuffer(arena, dtype=torch.uint8).is_pinned()


@pytest.fixture
def overlapping(machine: Machine, registry: HostRegistry) -> None:
    """Skips where CUDA pins a mapping of which a page is pinned already."""
    with mmap.mmap(-1, 4 * PAGE) as pages:
        view = torch.frombuffer(pages, dtype=torch.uint8)
        address = view.data_ptr()
        assert int(registry.cudaHostRegister(address + PAGE, PAGE, 0)) == 0
        granted = int(registry.cudaHostRegister(address, 4 * PAGE, 0)) == 0
        if granted:
            registry.cudaHostUnregister(address)
        registry.cudaHostUnregister(address + PAGE)
        swallow() if machine.is_cuda else registry.consume()  # type: ignore[attr-defined]
        del view
    if granted:
        pytest.skip("CUDA pins pages twice here, so that it refuses nothing that a test can make")


def check_nothing_left_behind(registry: HostRegistry) -> None:
    if isinstance(registry, Registry):
        assert registry.left_behind == 0
    else:
        launch()


def test_an_arena_is_pinned_until_it_is_released(
    registry: HostRegistry, pinning: PinnedMapping, memory: int
) -> None:
    for _ in range(2):
        pinning.pin(memory, PAGES * PAGE)
        assert pinning.address == memory
        assert is_pinned(registry, memory)
        pinning.release()
        pinning.release()
        assert pinning.address == 0
        assert not is_pinned(registry, memory)
    check_nothing_left_behind(registry)


def test_what_this_process_may_only_read_is_pinned_as_well(
    machine: Machine, registry: Any, arenas: Path
) -> None:
    file = arenas / "arena"
    file.write_bytes(bytes(PAGES * PAGE))
    arena = MappedArena(os.open(file, os.O_RDONLY), PAGES * PAGE, writable=False)
    consume = swallow if machine.is_cuda else registry.consume
    pinning = PinnedMapping(registry, consume, READ_ONLY_FLAGS)
    pinning.pin(arena.address + PAGE, (PAGES - 1) * PAGE)
    assert pinning.address == arena.address + PAGE
    assert is_pinned(registry, arena.address + PAGE)
    pinning.release()
    arena.close()
    check_nothing_left_behind(registry)


def test_an_arena_takes_the_place_of_a_mapping_that_was_never_released(
    registry: HostRegistry, pinning: PinnedMapping, memory: int
) -> None:
    """Copies would go to the pages of the mapping before."""
    assert int(registry.cudaHostRegister(memory, 2 * PAGE, 0)) == 0
    pinning.pin(memory, PAGES * PAGE)
    assert pinning.address == memory
    pinning.release()
    check_nothing_left_behind(registry)


@pytest.mark.usefixtures("overlapping")
def test_a_refusal_is_logged_once_and_leaves_no_error_behind(
    registry: HostRegistry, pinning: PinnedMapping, memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert int(registry.cudaHostRegister(memory + 8 * PAGE, PAGE, 0)) == 0
    for _ in range(2):
        pinning.pin(memory, PAGES * PAGE)
        assert pinning.address == 0
        check_nothing_left_behind(registry)
    pinning.release()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CUDA does not pin" in caplog.text
    assert int(registry.cudaHostUnregister(memory + 8 * PAGE)) == 0
    pinning.pin(memory, PAGES * PAGE)
    assert pinning.address == memory
    pinning.release()


def test_buffers_are_pinned_where_cuda_grants_it_and_plain_where_it_does_not(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    granted = torch.cuda.is_available()
    if granted != machine.is_cuda:
        pytest.skip("CUDA grants buffers here, whatever the tensors are on")
    buffers = Buffers()
    made = [buffers.allocate(PAGE) for _ in range(2)]
    assert [one.numel() for one in made] == [PAGE, PAGE]
    assert all(granted and one.is_pinned() for one in made) == granted
    assert len(caplog.records) == (0 if granted else 1)


class Occupying(FakeDaemon):
    """Hands out arenas of which CUDA has registered a page already."""

    registry: HostRegistry
    occupied = 0

    def claim(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        arena = super().claim(token, nbytes, timeout_s)
        self.occupied = arena.address + PAGE
        assert int(self.registry.cudaHostRegister(self.occupied, PAGE, 0)) == 0
        return arena


class Model(nn.Module):
    """A contiguous weight, and one that is not."""

    def __init__(self, machine: Machine, seed: int, rows: int = 64) -> None:
        super().__init__()
        flat = random_bytes(machine, rows * 4096, seed).view(torch.int32) % 1000
        self.weight = nn.Parameter(flat.float())
        turned = (flat.reshape(rows, 1024) + 1).float().t()
        self.turned = nn.Parameter(turned)


def check_restored(model: nn.Module, machine: Machine, directory: Path, rows: int = 64) -> None:
    """Restore into another model, and compare it with `model`."""
    other = Model(machine, 5, rows)
    optimizer = torch.optim.SGD(other.parameters())
    daemon = FakeDaemon(directory, epoch=2)
    session = holdfast.init(model=other, optimizer=optimizer, daemon=daemon)
    assert session.restore() == 2
    session.close()
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(found), bits(wanted))


@pytest.mark.usefixtures("overlapping")
def test_snapshots_into_an_arena_that_cuda_does_not_pin_have_the_right_bytes(
    machine: Machine, registry: HostRegistry, arenas: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, model = Occupying(arenas), Model(machine, 1)
    daemon.registry = registry
    optimizer = torch.optim.SGD(model.parameters())
    session = holdfast.init(model=model, optimizer=optimizer, daemon=daemon)
    for step in (1, 2):
        session.save(step).committed.result(WAIT_S)
    assert int(registry.cudaHostUnregister(daemon.occupied)) == 0
    session.close()
    check_restored(model, machine, arenas)
    assert caplog.text.count("CUDA does not pin") == (1 if machine.is_cuda else 0)


class Full(TorchFunctionMode):
    """Plays a device without memory: new tensors beside others are refused."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.empty_like, torch.zeros_like):
            raise torch.OutOfMemoryError("no memory left")
        return func(*args, **(kwargs or {}))


@contextmanager
def full_cuda() -> Iterator[None]:
    """Let CUDA's allocator refuse every new segment of memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def full(machine: Machine) -> AbstractContextManager[object]:
    return full_cuda() if machine.is_cuda else Full()


def test_a_save_on_a_full_device_is_made_in_host_memory(
    machine: Machine, arenas: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = 4096 if machine.is_cuda else 64
    model = Model(machine, 1, rows)
    session = holdfast.init(
        model=model, optimizer=torch.optim.SGD(model.parameters()), daemon=FakeDaemon(arenas)
    )
    with full(machine):
        for step in (1, 2):
            session.save(step).committed.result(WAIT_S)
    session.close()
    assert caplog.text.count("has no memory left") == 1
    check_restored(model, machine, arenas, rows)


def test_a_full_device_has_the_digests_that_it_has_with_memory(machine: Machine) -> None:
    flat = random_bytes(machine, 3000 * BLOCK_BYTES + 5)
    turned = flat[: 2000 * BLOCK_BYTES].view(-1, 1000).t()
    wanted = [digest_of([flat]), digest_of([turned])]
    assert digest_of([flat[1:]]) != wanted[0]
    with full(machine):
        assert [digest_of([flat]), digest_of([turned])] == wanted


def test_room_on_a_full_device_is_in_host_memory(machine: Machine) -> None:
    live = random_bytes(machine, 64 << 20).view(torch.float16).reshape(1024, -1).t()
    with full(machine):
        room = room_like(live)
    assert room.device == torch.device("cpu")
    assert (room.shape, room.dtype, room.is_contiguous()) == (live.shape, live.dtype, True)


@pytest.mark.parametrize(
    "form",
    [
        lambda base: base.t(),
        lambda base: base[3:, 5:20],
        lambda base: base[::3, ::2],
        lambda base: base[0, 0],
        lambda base: base[:0],
        lambda base: base[:, :1].expand(-1, 7),
        lambda base: base,
    ],
)
def test_what_a_tensor_spans_is_copied_with_its_strides(
    machine: Machine, form: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = form(random_bytes(machine, 4096).view(torch.bfloat16).reshape(32, 64))
    with full_cuda() if machine.is_cuda else torch.no_grad():
        copied = copy_of_span(tensor, torch.device("cpu"))
    assert copied.device == torch.device("cpu")
    assert copied.stride() == tensor.stride() or not tensor.numel()
    assert torch.equal(bits(copied), bits(tensor))


class Experts(nn.Module):
    """Stacked experts whose gradients a snapshot may carry."""

    def __init__(self, machine: Machine, width: int) -> None:
        super().__init__()
        weights = {"w": nn.Parameter(torch.ones(4, width, width, device=machine.kind))}
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": nn.ParameterDict(weights)})])


def test_gradients_that_do_not_fit_on_a_device_are_carried_in_host_memory(
    machine: Machine, arenas: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Experts(machine, 1024 if machine.is_cuda else 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PartialExperts(experts_per_layer=4, recompute=True)
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        daemon=FakeDaemon(arenas),
        settings=holdfast.Settings(policy=policy),
    )
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    with full(machine):
        for step in (1, 2, 3):
            session.save(step).committed.result(WAIT_S)
            optimizer.step()
    session.close()
    assert caplog.text.count("has no memory left") == 1


def test_a_buffer_takes_any_block(machine: Machine) -> None:
    """The buffer of a copying thread grows with the blocks that it copies."""
    engine = CopyEngine(1, machine.copier())
    for nbytes in (5, 3 * PIECE_BYTES, 40 * PIECE_BYTES + 1):
        flat, target = random_bytes(machine, nbytes), room_for(nbytes)
        digests = engine.capture(machine.plan([(0, 0, flat)]), target, engine._device.fence())
        payload = bytes(flat.cpu().numpy())
        assert target.read(0, nbytes) == payload
        assert engine.finish(target, b"", digests) == piece_digests(payload, PIECE_BYTES)
    engine.close()


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="holdfast")
