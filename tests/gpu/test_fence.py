"""A snapshot is of one moment, whatever the device still has to do and whatever training does next.

Each guard is taken away once as well: then the bytes must come out wrong, or the tests above it
would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from machines import Machine, bits, random_bytes, room_for, slot_range
from torch import nn

import holdfast
from holdfast._copying.engine import CopyEngine, plan_copy
from holdfast._copying.placed import Placed
from holdfast.testing import FakeDaemon
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PIECE_BYTES, decode_layout, piece_digests

WAIT_S = 60.0
NBYTES = 20 * PIECE_BYTES
OLD, NEW = 3, 7


@pytest.fixture
def engine(machine: Machine) -> Iterator[CopyEngine]:
    made = CopyEngine(2, machine.copier())
    yield made
    machine.finish()
    made.close()


@pytest.fixture(params=["pinned", "through a buffer"])
def target(request: pytest.FixtureRequest, engine: CopyEngine) -> Iterator[Placed]:
    made = room_for(NBYTES)
    if request.param == "pinned":
        engine._device.register(*slot_range(made))
    yield made
    engine._device.unregister()


def filled(machine: Machine, value: int) -> torch.Tensor:
    made = torch.full((NBYTES,), value, dtype=torch.uint8, device=machine.kind)
    if machine.is_cuda:
        torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("fenced", [True, False])
def test_a_capture_has_what_was_queued_before_its_fence(
    machine: Machine, engine: CopyEngine, target: Placed, fenced: bool
) -> None:
    flat = filled(machine, OLD)
    plan = machine.plan([(0, 0, flat)])
    engine.capture(plan, target, engine._device.fence())  # loads all kernels, which may wait
    with machine.beside():  # whichever stream is the current one
        machine.later(lambda: flat.fill_(NEW))
        fence = engine._device.fence() if fenced else None
    engine.capture(plan, target, fence)
    assert target.read(0, NBYTES) == bytes([NEW if fenced else OLD]) * NBYTES


@pytest.mark.parametrize("fenced", [True, False])
def test_what_passes_through_staging_is_of_the_fence_as_well(
    machine: Machine, engine: CopyEngine, target: Placed, fenced: bool
) -> None:
    live = filled(machine, OLD).view(64, -1).t()  # not contiguous
    staging = torch.empty_like(live, memory_format=torch.contiguous_format)
    plan = machine.plan([(0, 0, staging.reshape(-1))], [(staging, live)])
    live.fill_(OLD)
    engine.capture(plan, target, engine._device.fence())  # loads all kernels, which may wait
    machine.later(lambda: live.fill_(NEW))
    engine.capture(plan, target, engine._device.fence() if fenced else None)
    assert target.read(0, NBYTES) == bytes([NEW if fenced else OLD]) * NBYTES


def test_what_was_queued_before_a_restore_does_not_overwrite_it(
    machine: Machine, engine: CopyEngine, target: Placed
) -> None:
    """Kernels that initialise a model may still be queued when it is restored."""
    wanted = random_bytes(Machine("cpu"), NBYTES)
    target.write(0, bytes(wanted.numpy()))
    flat = filled(machine, OLD)
    machine.later(lambda: flat.fill_(NEW))
    digests = piece_digests(target.read(0, NBYTES), PIECE_BYTES)
    engine.restore(machine.plan([(0, 0, flat)]), target, NBYTES, digests)
    machine.finish()
    assert torch.equal(flat.cpu(), wanted)


def test_a_restore_that_did_not_wait_would_be_overwritten(
    machine: Machine, engine: CopyEngine
) -> None:
    flat = filled(machine, OLD)
    (moves,) = machine.plan([(0, 0, flat[: 4 * PIECE_BYTES])]).device_moves
    buffer = engine._device.buffer(4 * PIECE_BYTES).zero_()
    machine.later(lambda: flat.fill_(NEW))
    engine._device.upload(moves, buffer, 0, None)
    machine.finish()
    assert bool((flat == NEW).all())


class Model(nn.Module):
    """A weight, and a buffer as forward passes change it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1 << 20,), float(OLD), device=machine.kind))
        self.register_buffer("mean", torch.full((1 << 16,), float(OLD), device=machine.kind))


class Training:
    """A model with a session, and a look at what it saved."""

    def __init__(self, machine: Machine, directory: Path) -> None:
        self.machine, self.daemon = machine, FakeDaemon(directory)
        self.model = Model(machine)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            daemon=self.daemon,
            settings=holdfast.Settings(start_wait_s=WAIT_S),
        )
        self.session.prepare()

    def step(self) -> None:
        """Subtract NEW from the weight."""
        self.model.weight.grad = torch.full_like(self.model.weight, float(NEW))
        self.optimizer.step()

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        """Tensors of the committed snapshot of `step`, by name, float32."""
        held = self.daemon.sealed()[Generation(1, step)]
        layout = decode_layout((held.home / "layout.json").read_bytes())
        start = held.piece_map.slot * layout.slot_bytes
        with (held.home / "arena").open("rb") as arena:
            found = {}
            for entry in layout.entries:
                arena.seek(start + entry.offset)
                raw = bytearray(arena.read(entry.nbytes))
                found[entry.tensor] = torch.frombuffer(raw, dtype=torch.float32)
        return found


@pytest.fixture
def training(machine: Machine, arenas: Path) -> Iterator[Training]:
    made = Training(machine, arenas)
    yield made
    made.session.close()


@pytest.mark.parametrize("stream", ["the same stream", "another stream"])
def test_a_step_right_after_a_save_is_not_in_it(
    machine: Machine, training: Training, stream: str
) -> None:
    wanted = bits(training.model.weight)
    if machine.is_cuda:  # so that the copy cannot have begun when the step is called
        machine.later(lambda: None)
    handle = training.session.save(1)
    if stream == "another stream":
        with machine.beside():
            training.step()
    else:
        training.step()
    handle.committed.result(WAIT_S)
    machine.finish()
    assert torch.equal(bits(training.saved(1)["weight"]), wanted)
    assert torch.equal(training.model.weight.cpu(), torch.full((1 << 20,), float(OLD - NEW)))


def test_a_buffer_that_a_forward_pass_changes_right_after_a_save_is_saved_as_it_was(
    training: Training,
) -> None:
    granting = training.daemon.hold("grant")
    handle = training.session.save(1)
    mean = training.model.get_buffer("mean")
    wanted = bits(mean)
    mean.add_(NEW)
    granting.set()
    handle.committed.result(WAIT_S)
    assert torch.equal(bits(training.saved(1)["mean(buffer)"]), wanted)


def through_torch(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(NEW)


def past_torch(weight: torch.Tensor) -> None:
    weight.data.add_(NEW)


@pytest.mark.parametrize("change", [through_torch, past_torch])
def test_a_change_that_nothing_holds_back_drops_the_save(
    machine: Machine, training: Training, change: Callable[[torch.Tensor], None]
) -> None:
    """Unless it is on a device, and passes torch's counters: then the snapshot has other bytes,
    which is what the hook on the optimizer is for."""
    wanted = bits(training.model.weight)
    granting = training.daemon.hold("grant")
    handle = training.session.save(1)
    with machine.beside():
        change(training.model.weight)
    machine.finish()
    granting.set()
    error = handle.committed.exception(WAIT_S)
    if machine.is_cuda and change is past_torch:
        assert error is None
        assert not torch.equal(bits(training.saved(1)["weight"]), wanted)
    else:
        assert isinstance(error, SnapshotSkippedError), error
        assert "changed in place" in str(error)


def test_a_plan_of_tensors_in_host_memory_needs_no_fence(machine: Machine) -> None:
    flat = random_bytes(Machine("cpu"), 1000)
    engine, target = CopyEngine(1, machine.copier()), room_for(1000)
    engine.capture(plan_copy([(0, 0, flat)], (), PIECE_BYTES), target, None)
    engine.close()
    assert target.read(0, 1000) == bytes(flat.numpy())
