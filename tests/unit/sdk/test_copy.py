from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._copy import (
    BLOCK_PIECES,
    BadPieceError,
    CopyEngine,
    CopyPlan,
    _by_block,
    plan_copy,
)
from holdfast._devices import CpuDevice, DeviceMove, Fence
from holdfast_core.layouts import piece_digests

PIECE = 64
Part = tuple[int, int, torch.Tensor]


class SlowDevice(CpuDevice):
    """Plays a device on host memory: copies happen only when someone waits for their block."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.fences: list[Fence] = []

    def fence(self) -> Fence:
        return len(self.fences)

    def download(
        self, blocks: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Sequence[Callable[[], None]]:
        self.fences.append(fence)
        target = torch.frombuffer(slot, dtype=torch.uint8)

        def wait(index: int) -> None:
            for move in blocks[index]:
                target[move.start : move.start + move.nbytes].copy_(move.flat)
            self.waited.append(index)

        return [partial(wait, index) for index in range(len(blocks))]

    def upload(self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int) -> None:
        for move in moves:
            move.flat.copy_(buffer[move.start - start : move.start - start + move.nbytes])


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    made = CopyEngine(request.param, SlowDevice())
    yield made
    made.close()


def parts_of(lengths: Sequence[int], seed: int) -> list[Part]:
    """Tensors of these lengths, one after the other with a gap after each."""
    generator = torch.Generator().manual_seed(seed)
    parts, at = [], 0
    for length in lengths:
        flat = torch.randint(256, (length,), dtype=torch.uint8, generator=generator)
        parts.append((at, 0, flat))
        at += length + length % 3
    return parts


def slot_of(nbytes: int) -> tuple[int, memoryview]:
    raw = (ctypes.c_ubyte * nbytes)()
    return ctypes.addressof(raw), memoryview(raw).cast("B")


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(0, 40 * PIECE), max_size=8),
    st.binary(max_size=3 * PIECE),
    st.integers(0, 99),
    st.booleans(),
)
def test_what_is_captured_is_hashed_and_comes_back(
    engine: CopyEngine, lengths: list[int], extras: bytes, seed: int, device: bool
) -> None:
    parts = parts_of(lengths, seed)
    plan = plan_copy(parts, (), PIECE)
    if device:
        plan = on_device(parts)
    offset = max((start + flat.numel() for start, _, flat in parts), default=0)
    address, slot = slot_of(offset + len(extras) + PIECE)
    digests = engine.capture(plan, address, slot, extras, offset, None)
    payload = slot[: offset + len(extras)]
    assert digests == piece_digests(payload, PIECE)
    assert all(bytes(slot[at : at + f.numel()]) == f.numpy().tobytes() for at, _, f in parts)
    assert bytes(slot[offset : offset + len(extras)]) == extras

    wanted = [flat.clone() for _, _, flat in parts]
    for _, _, flat in parts:
        flat.zero_()
    engine.restore(plan, address, payload.toreadonly(), digests)
    assert all(torch.equal(flat, was) for (_, _, flat), was in zip(parts, wanted, strict=True))


def on_device(parts: Sequence[Part]) -> CopyPlan:
    """The plan for `parts` as if their tensors were on a device."""
    plan = plan_copy((), (), PIECE)
    moves = [DeviceMove(start, flat.numel(), flat) for start, _, flat in parts if flat.numel()]
    return replace(plan, device_moves=_by_block(moves, PIECE * BLOCK_PIECES))


def test_a_piece_that_does_not_match_is_named(engine: CopyEngine) -> None:
    parts = parts_of([50 * PIECE], 1)
    plan = plan_copy(parts, (), PIECE)
    address, slot = slot_of(60 * PIECE)
    digests = engine.capture(plan, address, slot, b"", 50 * PIECE, None)
    slot[33 * PIECE + 5] ^= 1
    parts[0][2].zero_()
    with pytest.raises(BadPieceError) as caught:
        engine.restore(plan, address, slot[: 50 * PIECE], digests)
    assert caught.value.piece == 33


def test_neighbours_in_slot_and_memory_are_copied_at_once() -> None:
    flat = torch.zeros(8 * PIECE, dtype=torch.uint8)
    parts = [(i * 16, 0, flat[i * 16 : (i + 1) * 16]) for i in range(32)]
    plan = plan_copy(parts, (), PIECE)
    assert [len(moves) for moves in plan.host_moves] == [1] * 8
    assert plan.tensor_bytes == 8 * PIECE


def test_a_failure_on_any_thread_is_raised(engine: CopyEngine) -> None:
    def work(index: int) -> None:
        if index == 7:
            raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        engine.each(work, 20)
    done: list[int] = []
    engine.each(done.append, 20)
    assert sorted(done) == list(range(20))


def test_tensors_that_are_not_contiguous_pass_through_their_staging(engine: CopyEngine) -> None:
    live = torch.arange(12.0).reshape(3, 4).t()
    staging = torch.empty(4, 3)
    plan = plan_copy([(0, 0, staging.reshape(-1).view(torch.uint8))], [(staging, live)], PIECE)
    address, slot = slot_of(PIECE)
    engine.capture(plan, address, slot, b"", 48, None)
    assert torch.equal(torch.frombuffer(slot, dtype=torch.float32, count=12).reshape(4, 3), live)
