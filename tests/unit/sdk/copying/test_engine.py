from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._copying import gathering
from holdfast._copying.bubbles import Bubbles
from holdfast._copying.devices import (
    GROUPS_AHEAD,
    CpuDevice,
    DeviceMove,
    Download,
    Fence,
    GroupCopy,
    PacedDownload,
)
from holdfast._copying.engine import (
    BLOCK_PIECES,
    GROUP_BLOCKS,
    GROUP_S,
    BadPieceError,
    CopyEngine,
    CopyPlan,
    blocks_at_once,
    plan_copy,
    with_device_moves,
)
from holdfast._copying.gathering import ALIGNING_GAP_MAX, GAP_BYTES_MAX, Gather, gather
from holdfast._copying.placed import Flags, Placed
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import (
    PIECE_BYTES,
    SLOTS_MIN,
    TENSOR_ALIGNMENT,
    Layout,
    piece_digests,
    round_up,
)

PIECE = 64
HUNG_S = 30.0
Part = tuple[int, int, torch.Tensor]


class PlayedDownload:
    """Copies that are made when someone waits for their group."""

    def __init__(self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview) -> None:
        self._groups, self._slot = groups, slot
        self._copied: set[int] = set()
        self._lock = threading.Lock()

    def wait(self, group: int) -> None:
        with self._lock:
            if group not in self._copied:
                _write(self._groups[group], self._slot)
                self._copied.add(group)

    def hurry(self) -> None:
        """Do what it can, which is nothing."""

    def is_over(self) -> bool:
        return len(self._copied) == len(self._groups)


class Arrived:
    """Copies that were made as they began."""

    def wait(self) -> None: ...

    def is_over(self) -> bool:
        return True


class How(Enum):
    """How a device copies."""

    PACED = "as many groups as are waited for, or all"

    FAST = "is done before anything is hashed"
    SLOW = "has a group when it is waited for"
    UNPINNED = "block by block, in the threads that hash"


class PlayedDevice(CpuDevice):
    """Plays a device on host memory."""

    def __init__(self, how: How) -> None:
        self._how = how
        self.begun: list[int] = []
        """Groups that it has copied."""

    def download(
        self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
    ) -> Download | None:
        if self._how is How.UNPINNED:
            return None
        if self._how is How.PACED:

            def begin(group: int) -> GroupCopy:
                _write(groups[group], slot)
                self.begun.append(group)
                return Arrived()

            return PacedDownload(len(groups), begin)
        download = PlayedDownload(groups, slot)
        for group in range(len(groups)) if self._how is How.FAST else ():
            download.wait(group)
        return download

    def fetch(self, moves: Sequence[DeviceMove], slot: memoryview, fence: Fence) -> None:
        _write(moves, slot)

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        for move in moves:
            move.flat.copy_(buffer[move.start - start : move.start - start + move.nbytes])


def _write(moves: Sequence[DeviceMove], slot: memoryview) -> None:
    target = torch.frombuffer(slot, dtype=torch.uint8)
    for move in moves:
        target[move.start : move.start + move.nbytes].copy_(move.flat)


KINDS = ((1, How.FAST), (2, How.PACED), (2, How.SLOW), (1, How.UNPINNED))
"""Numbers of threads, and how the device copies."""


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1].name}")
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    threads, how = request.param
    made = CopyEngine(threads, PlayedDevice(how))
    yield made
    made.close()


def parts_of(lengths: Sequence[int], seed: int, *, apart: bool = False) -> list[Part]:
    """Tensors of these lengths, one after the other with a gap after each; `apart`, none shares a
    piece with another."""
    generator = torch.Generator().manual_seed(seed)
    parts, at = [], 0
    for length in lengths:
        flat = torch.randint(256, (length,), dtype=torch.uint8, generator=generator)
        parts.append((at, 0, flat))
        at += length + length % 3
        at = round_up(at, PIECE) if apart else at
    return parts


def placed(offset: int, nbytes: int, slot: int = 1, places: bytes = b"") -> Placed:
    """Room for a payload whose extras begin at `offset`, in a file that tests may look at."""
    layout = Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=offset,
        extras_capacity=nbytes - offset,
        piece_bytes=PIECE,
    )
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, layout.arena_bytes(3))
    raw = (ctypes.c_ubyte * layout.arena_bytes(3)).from_buffer(mmap.mmap(descriptor, 0))
    weakref.finalize(raw, os.close, descriptor)
    return Placed(
        arena=memoryview(raw).cast("B"),
        address=ctypes.addressof(raw),
        layout=layout,
        slot=slot,
        places=places,
        descriptor=descriptor,
    )


def test_nothing_of_a_capture_is_left_to_the_collector_of_cycles(engine: CopyEngine) -> None:
    class Told:
        def __call__(self) -> None:
            pass

    parts, told = parts_of([3 * PIECE], 1), Told()
    target, known = placed(4 * PIECE, 5 * PIECE), weakref.ref(told)
    gc.disable()
    try:
        engine.capture(on_device(parts), target, None, hurry=told)  # type: ignore[arg-type]
        del told
        assert known() is None
    finally:
        gc.enable()


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(0, 40 * PIECE), max_size=8),
    st.binary(max_size=3 * PIECE),
    st.integers(0, 99),
    st.sampled_from((None, 0, 3 * PIECE)),
    st.booleans(),
)
def test_what_is_captured_is_hashed_and_comes_back(
    engine: CopyEngine,
    lengths: list[int],
    extras: bytes,
    seed: int,
    gathered: int | None,
    scattered: bool,
) -> None:
    parts = parts_of(lengths, seed, apart=scattered)
    plan = plan_copy(parts, (), PIECE)
    if gathered is not None:
        plan = on_device(parts, gathered_bytes_max=gathered)
    offset = max((start + flat.numel() for start, _, flat in parts), default=0)
    end = offset + len(extras)
    places = bytearray()
    if scattered:  # a tensor lies in one slot, the next one in another
        places = bytearray(random.Random(seed).choices(range(3), k=-(-end // PIECE)))
        for start, _, flat in (part for part in parts if part[2].numel()):
            first, last = start // PIECE, (start + flat.numel() - 1) // PIECE
            places[first : last + 1] = bytes([places[first]]) * (last + 1 - first)
    target = placed(offset, end + PIECE, places=bytes(places))
    wanted = [flat.clone() for _, _, flat in parts]
    digests = captured(engine, plan, target, extras, copied=lambda: change(parts))
    payload = target.read(0, end)
    assert digests == piece_digests(payload, PIECE)
    pairs = zip(parts, wanted, strict=True)
    assert all(payload[at : at + f.numel()] == f.numpy().tobytes() for (at, _, _), f in pairs)
    assert payload[offset:] == extras
    engine.restore(plan, replace(target, arena=target.arena.toreadonly()), end, digests)
    assert all(torch.equal(flat, was) for (_, _, flat), was in zip(parts, wanted, strict=True))


def test_an_arena_that_was_cut_is_noticed_while_it_is_restored(engine: CopyEngine) -> None:
    parts = parts_of([40 * PIECE], 1)
    plan, target = plan_copy(parts, (), PIECE), placed(40 * PIECE, 41 * PIECE)
    digests = captured(engine, plan, target)
    os.ftruncate(target.descriptor, target.start(0) + 39 * PIECE + 1)
    with pytest.raises(CorruptError, match="was cut short"):
        engine.restore(plan, target, 40 * PIECE, digests)


def captured(
    engine: CopyEngine,
    plan: CopyPlan,
    target: Placed,
    extras: bytes = b"",
    skip: Flags | None = None,
    copied: Callable[[], None] = lambda: None,
) -> bytes:
    calls = itertools.count()

    def counted() -> None:
        next(calls)
        copied()

    digests = engine.capture(plan, target, None, skip, copied=counted)
    assert next(calls) == 1
    return engine.finish(target, extras, digests)


def change(parts: Sequence[Part]) -> None:
    """Change all tensors, as training does."""
    for _, _, flat in parts:
        flat.fill_(0x5A)


def on_device(
    parts: Sequence[Part], here: Sequence[Part] = (), gathered_bytes_max: int = 0
) -> CopyPlan:
    """The plan for `parts` as if their tensors were on a device, and for `here` in host memory."""
    moves = [DeviceMove(start, flat.numel(), flat) for start, _, flat in parts if flat.numel()]
    return with_device_moves(plan_copy(here, (), PIECE), moves, gathered_bytes_max)


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(0, 3 * PIECE), st.booleans()), max_size=40),
    st.integers(0, 2 * PIECE),
    st.booleans(),
    st.integers(0, 99),
)
def test_gathered_tensors_and_those_between_them_are_captured_and_come_back(
    engine: CopyEngine, tensors: list[tuple[int, bool]], limit: int, apart: bool, seed: int
) -> None:
    parts = parts_of([length for length, _ in tensors], seed, apart=apart)
    theirs = [part for part, (_, device) in zip(parts, tensors, strict=True) if device]
    ours = [part for part, (_, device) in zip(parts, tensors, strict=True) if not device]
    plan = on_device(theirs, ours, limit)
    end = max((start + flat.numel() for start, _, flat in parts), default=0)
    target = placed(end, end + PIECE)
    wanted = [flat.clone() for _, _, flat in parts]
    digests = captured(engine, plan, target, copied=lambda: change(parts))
    payload = target.read(0, end)
    assert digests == piece_digests(payload, PIECE)
    pairs = zip(parts, wanted, strict=True)
    assert all(payload[at : at + f.numel()] == f.numpy().tobytes() for (at, _, _), f in pairs)
    engine.restore(plan, target, end, digests)
    assert all(torch.equal(flat, was) for (_, _, flat), was in zip(parts, wanted, strict=True))


def test_small_tensors_of_every_kind_are_gathered_bit_for_bit(engine: CopyEngine) -> None:
    torch.manual_seed(0)
    nan = torch.tensor([float("nan"), -0.0])
    spread = torch.randn(6, 4).t()
    live = [
        torch.randn(7, dtype=torch.bfloat16),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.tensor(3.5),
        nan,
        torch.tensor([True, False, True]),
        torch.randint(-9, 9, (3,), dtype=torch.int64),
        spread,
    ]
    staging = torch.empty(4, 6)
    holders = [*live[:-1], staging]
    parts: list[Part] = []
    at = 0
    for tensor in holders:
        flat = tensor.reshape(-1).view(torch.uint8)
        parts.append((at, 0, flat))
        at += flat.numel() + 5
    plan = replace(on_device(parts, gathered_bytes_max=PIECE), staged=((staging, spread),))
    assert len(plan.gather.tensors) > len(plan.device_moves[0])
    target = placed(at, at + PIECE)
    was = [tensor.contiguous().reshape(-1).view(torch.uint8).clone() for tensor in live]
    digests = captured(engine, plan, target)
    for tensor in holders:
        tensor.reshape(-1).view(torch.uint8).fill_(0x5A)
    engine.restore(plan, target, at, digests)
    found = [tensor.reshape(-1).view(torch.uint8) for tensor in holders]
    assert all(torch.equal(a, b) for a, b in zip(found, was, strict=True))


def test_gathered_tensors_of_an_expert_that_is_skipped_stay_as_they_are(engine: CopyEngine) -> None:
    lengths = [20, 20, 24]
    flats = [torch.full((n,), 1 + i, dtype=torch.uint8) for i in range(3) for n in lengths]
    starts = [PIECE * i + at for i in range(3) for at in (0, 20, 40)]
    parts = [(at, 0, flat) for at, flat in zip(starts, flats, strict=True)]
    plan = on_device(parts, gathered_bytes_max=PIECE)
    assert [move.nbytes for move in plan.device_moves[0]] == [3 * PIECE]
    target = placed(3 * PIECE, 4 * PIECE)
    target.write(0, b"\x55" * 3 * PIECE)
    captured(engine, plan, target, skip=np.array([False, True, False]))
    assert target.read(0, 3 * PIECE) == b"\x01" * PIECE + b"\x55" * PIECE + b"\x03" * PIECE


def test_small_tensors_are_copied_in_as_few_pieces_as_large_ones(engine: CopyEngine) -> None:
    group_bytes = PIECE * BLOCK_PIECES * GROUP_BLOCKS
    length, end = PIECE // 4, 5 * group_bytes // 2
    parts = [(at, 0, torch.full((length,), 1, dtype=torch.uint8)) for at in range(0, end, length)]
    plan = on_device(parts, gathered_bytes_max=length)
    groups = plan.device_groups.of(GROUP_BLOCKS)
    copies = [[(move.start, move.nbytes) for move in moves] for moves in groups]
    assert copies == [
        [(0, group_bytes)],
        [(group_bytes, group_bytes)],
        [(2 * group_bytes, group_bytes // 2)],
    ]
    target = placed(end, end + PIECE)
    captured(engine, plan, target)
    assert target.read(0, end) == b"\x01" * end


def test_what_has_no_room_is_copied_tensor_by_tensor(
    engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, count = TENSOR_ALIGNMENT, 50
    monkeypatch.setattr(gathering, "ROOM_BYTES_MAX", 20 * length + 1)
    parts = [(length * i, 0, torch.full((length,), 1 + i, dtype=torch.uint8)) for i in range(count)]
    plan, end = on_device(parts, gathered_bytes_max=length), count * length
    assert len(plan.gather.tensors) == 20
    moves = [move.nbytes for of_block in plan.device_moves for move in of_block]
    assert sum(moves[:-30]) == 20 * length
    assert moves[-30:] == [length] * 30
    target = placed(end, end + PIECE)
    digests = captured(engine, plan, target, copied=lambda: change(parts))
    wanted = b"".join(bytes([1 + i]) * length for i in range(count))
    assert target.read(0, end) == wanted
    engine.restore(plan, target, end, digests)
    assert b"".join(flat.numpy().tobytes() for _, _, flat in parts) == wanted


def test_only_blocks_that_are_copied_are_in_groups() -> None:
    """A mirror is copied part by part, each of which leaves out all other pieces."""
    count = 9 * BLOCK_PIECES
    parts = parts_of([count * PIECE], 1)
    sizes: list[list[int]] = []

    class Watched(PlayedDevice):
        def download(
            self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
        ) -> Download | None:
            sizes.append([len(moves) for moves in groups])
            return super().download(groups, slot, fence)

    target, skip = placed(count * PIECE, (count + 1) * PIECE), np.ones(count, dtype=bool)
    for block in (1, 2, 4, 6, 8):
        skip[BLOCK_PIECES * block + 3] = False
    captured(CopyEngine(1, Watched(How.PACED)), on_device(parts), target, skip=skip)
    assert sizes == [[GROUP_BLOCKS, 5 - GROUP_BLOCKS]]
    copied = [target.read(at * PIECE, PIECE) != bytes(PIECE) for at in range(count)]
    assert copied == (~skip).tolist()


@pytest.mark.parametrize("behind", [False, True])
def test_a_small_tensor_is_copied_with_whichever_of_its_blocks_is_copied(
    engine: CopyEngine, behind: bool
) -> None:
    """Its bytes in the other block are left out."""
    count, half = 2 * BLOCK_PIECES, PIECE // 2
    border, end = BLOCK_PIECES * PIECE, count * PIECE
    parts = [
        (at, 0, torch.full((PIECE,), 1 + at // PIECE, dtype=torch.uint8))
        for at in range(half, end - half, PIECE)
    ]
    plan, target = on_device(parts, gathered_bytes_max=PIECE), placed(end, end + PIECE)
    skip = (np.arange(count) < BLOCK_PIECES) == behind
    digests = captured(engine, plan, target, skip=skip)
    across = bytes([BLOCK_PIECES]) * half
    wanted = bytes(half) + across if behind else across + bytes(half)
    assert target.read(border - half, PIECE) == wanted
    copied = range(border, end) if behind else range(border)
    assert digests[8 * copied.start // PIECE : 8 * copied.stop // PIECE] == piece_digests(
        target.read(copied.start, len(copied)), PIECE
    )


def test_a_run_ends_at_a_large_tensor_and_at_a_wide_gap() -> None:
    def runs(
        *places: tuple[int, int], gap: int = GAP_BYTES_MAX
    ) -> tuple[list[tuple[int, int]], Gather]:
        flats = [(start, torch.zeros(nbytes, dtype=torch.uint8)) for start, nbytes in places]
        moves = [DeviceMove(start, flat.numel(), flat) for start, flat in flats]
        found, gathered = gather(moves, 100, gap)
        return [(move.start, move.nbytes) for move in found], gathered

    assert runs((0, 50), (64, 50), (128, 50))[0] == [(0, 178)]
    assert runs((0, 50), (64, 101), (192, 50))[0] == [(0, 50), (64, 101), (192, 50)]
    assert runs((0, 50), (1600, 50), (1664, 50))[0] == [(0, 50), (1600, 114)]
    aligned = runs((0, 50), (64, 50), (192, 50), (256, 64), (320, 9), gap=ALIGNING_GAP_MAX)
    assert aligned[0] == [(0, 114), (192, 137)]
    assert runs((0, 50))[1] == Gather()


def test_a_piece_that_does_not_match_is_named(engine: CopyEngine) -> None:
    parts = parts_of([50 * PIECE], 1)
    plan = plan_copy(parts, (), PIECE)
    target = placed(50 * PIECE, 60 * PIECE)
    digests = captured(engine, plan, target)
    target.view(33 * PIECE + 5, 1)[0] ^= 1
    parts[0][2].zero_()
    with pytest.raises(BadPieceError) as caught:
        engine.restore(plan, target, 50 * PIECE, digests)
    assert caught.value.piece == 33


def test_what_is_skipped_stays_as_it_is(engine: CopyEngine) -> None:
    parts = parts_of([4 * PIECE, 3 * PIECE, 5 * PIECE], 4, apart=True)
    for plan in (plan_copy(parts, (), PIECE), on_device(parts)):
        at, _, skipped = parts[1]
        end = parts[2][0] + parts[2][2].numel()
        target = placed(end, end + PIECE)
        target.write(0, b"\x55" * end)
        pieces = range(at // PIECE, at // PIECE + 3)
        skip = np.zeros(end // PIECE, dtype=bool)
        skip[pieces.start : pieces.stop] = True
        digests = captured(engine, plan, target, skip=skip)
        assert target.read(at, skipped.numel()) == b"\x55" * skipped.numel()
        assert digests[8 * pieces.start : 8 * pieces.stop] == bytes(3 * 8)
        for at, _, flat in (parts[0], parts[2]):
            assert target.read(at, flat.numel()) == flat.numpy().tobytes()


def test_pieces_that_no_save_has_written_are_the_same_in_all_snapshots(engine: CopyEngine) -> None:
    """They hold what a longer window has left there, which nobody needs, nor shall protect."""
    target = placed(3 * PIECE, 4 * PIECE)
    target.write(0, bytes(range(3 * PIECE)))
    digests, written = np.array([7, 0, 0], dtype="<u8"), np.array([True, False, False])
    engine.hash_rest(target, digests, written)
    assert target.read(0, 3 * PIECE) == bytes(range(PIECE)) + bytes(2 * PIECE)
    assert digests[1:].tobytes() == piece_digests(bytes(2 * PIECE), PIECE)
    assert digests[0] == 7


def test_tensors_may_change_before_everything_is_hashed() -> None:
    """What lies in the slot is hashed, not the tensors: so the last piece is changed there."""
    parts = parts_of([60 * PIECE], 6)
    plan, target = on_device(parts), placed(60 * PIECE, 61 * PIECE)
    engine = CopyEngine(1, PlayedDevice(How.FAST))
    digests = captured(engine, plan, target, copied=lambda: target.write(59 * PIECE, b"late"))
    assert target.read(59 * PIECE, 4) == b"late"
    assert digests == piece_digests(target.read(0, 60 * PIECE), PIECE)


def test_nobody_waits_for_the_device_once_tensors_may_change() -> None:
    """Training may record a CUDA graph then, which a thread that waits would spoil."""
    parts, over = parts_of([60 * PIECE], 6), threading.Event()
    waits: list[bool] = []

    class Watched(PlayedDevice):
        def download(
            self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
        ) -> Download | None:
            download = PlayedDownload(groups, slot)
            wait = download.wait

            def watched(group: int) -> None:
                waits.append(over.is_set())
                wait(group)

            download.wait = watched  # type: ignore[method-assign]
            return download

    plan, target = on_device(parts), placed(60 * PIECE, 61 * PIECE)
    digests = captured(CopyEngine(1, Watched(How.SLOW)), plan, target, copied=over.set)
    assert waits == [False]
    assert digests == piece_digests(target.read(0, 60 * PIECE), PIECE)


def test_a_device_copies_all_that_is_left_when_training_needs_the_tensors() -> None:
    count = 20 * BLOCK_PIECES * GROUP_BLOCKS
    parts = parts_of([count * PIECE], 6)
    plan, target = on_device(parts), placed(count * PIECE, (count + 1) * PIECE)
    device = PlayedDevice(How.PACED)
    looks, begun = itertools.count(), dict[str, int]()

    def hurry() -> bool:
        begun["before"] = len(device.begun) if len(device.begun) < 20 else begun["before"]
        return next(looks) == 2 * GROUP_BLOCKS  # after the second group

    def copied() -> None:
        begun["copied"] = len(device.begun)
        target.write((count - 1) * PIECE, b"late")

    digests = CopyEngine(1, device).capture(plan, target, None, copied=copied, hurry=hurry)
    assert begun == {"before": 2 + GROUPS_AHEAD, "copied": 20}
    assert device.begun == list(range(20))
    assert digests.tobytes() == piece_digests(target.read(0, count * PIECE), PIECE)
    assert target.read((count - 1) * PIECE, 4) == b"late"  # hashed afterwards


GB = 10**9


@pytest.mark.parametrize(
    ("link", "bytes_s", "blocks"),
    [
        ("before anything is measured", 0, 4),
        ("PCIe 3", 12 * GB, 1),
        ("PCIe 4", 25 * GB, 2),
        ("PCIe 5, slowest of an H200", 49 * GB, 4),
        ("PCIe 5, fastest of an H200", 55 * GB, 4),
        ("NVLink-C2C", 380 * GB, 32),
        ("a clock that is wrong", 1e30, 64),
        ("a link that hardly moves", 1, 1),
    ],
)
def test_a_group_takes_a_link_as_long_as_any_other_link(
    link: str, bytes_s: float, blocks: int
) -> None:
    assert blocks_at_once(bytes_s, BLOCK_PIECES * PIECE_BYTES) == blocks, link


def test_groups_are_of_another_size_once_the_rate_is_known() -> None:
    count = 20 * BLOCK_PIECES
    parts = parts_of([count * PIECE], 6)
    plan, target = on_device(parts), placed(count * PIECE, (count + 1) * PIECE)
    device, skip = PlayedDevice(How.PACED), np.zeros(count, dtype=bool)
    engine, numbers = CopyEngine(2, device), list[int]()
    for rate in (0.0, BLOCK_PIECES * PIECE / GROUP_S, 10 * BLOCK_PIECES * PIECE / GROUP_S):
        device.bytes_s = rate
        for skipped in (None, skip):
            device.begun.clear()
            digests = captured(engine, plan, target, skip=skipped)
            assert digests == piece_digests(target.read(0, count * PIECE), PIECE)
            target.write(0, bytes(count * PIECE))
            numbers.append(len(device.begun))
    engine.close()
    assert numbers == [5, 5, 20, 20, 3, 3]


def test_an_error_in_what_follows_the_copies_ends_the_capture(engine: CopyEngine) -> None:
    def fail() -> None:
        raise ValueError("changed in place")

    parts = parts_of([60 * PIECE], 6)
    target = placed(60 * PIECE, 61 * PIECE)
    with pytest.raises(ValueError, match="changed in place"):
        engine.capture(on_device(parts), target, None, copied=fail)
    assert captured(engine, on_device(parts), target) == piece_digests(
        target.read(0, 60 * PIECE), PIECE
    )


def test_what_follows_the_copies_may_use_the_engine(engine: CopyEngine) -> None:
    parts, done = parts_of([60 * PIECE], 6), set[int]()
    target = placed(60 * PIECE, 61 * PIECE)
    captured(engine, on_device(parts), target, copied=lambda: engine.each(done.add, 50))
    assert done == set(range(50))


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("hurried", [False, True])
def test_the_same_bytes_are_copied_when_some_wait_for_bubbles(
    engine: CopyEngine, hurried: bool, device: bool
) -> None:
    parts = parts_of([50 * PIECE, 20 * PIECE], 5)
    plan = on_device(parts) if device else plan_copy(parts, (), PIECE)
    end = parts[1][0] + parts[1][2].numel()
    ticks = itertools.count()
    bubbles = Bubbles(2, lambda: float(next(ticks)))
    for turn in range(2):  # the first measures
        bubbles.begin()
        target = placed(end, end + PIECE)
        copying = partial(engine.capture, plan, target, None, bubbles=bubbles)
        thread = threading.Thread(target=copying)
        thread.start()
        if hurried:
            bubbles.end()
        elif turn:
            assert bubbles.schedule(end).bubble_bytes > 0
        with bubbles.bubble():
            thread.join(HUNG_S)
        bubbles.end()
        assert not thread.is_alive()
        assert all(target.read(at, f.numel()) == f.numpy().tobytes() for at, _, f in parts)


def test_neighbours_in_slot_and_memory_are_copied_at_once() -> None:
    flat = torch.zeros(8 * PIECE, dtype=torch.uint8)
    parts = [(i * 16, 0, flat[i * 16 : (i + 1) * 16]) for i in range(32)]
    plan = plan_copy(parts, (), PIECE)
    assert [len(moves) for moves in plan.host_moves] == [1] * 8
    assert sum(size for moves in plan.host_moves for _, _, size in moves) == 8 * PIECE


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
    target = placed(48, PIECE)
    captured(engine, plan, target)
    assert torch.equal(
        torch.frombuffer(target.view(0, 48), dtype=torch.float32, count=12).reshape(4, 3), live
    )


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 3 * BLOCK_PIECES), st.data())
def test_any_pieces_can_be_skipped(engine: CopyEngine, whole: int, data: st.DataObject) -> None:
    flat = torch.arange(whole * PIECE + 5).mul(7).remainder(255).add(1).to(torch.uint8)
    plan = plan_copy([(0, 0, flat)], (), PIECE)
    known = data.draw(st.integers(0, whole))
    skip = np.array(data.draw(st.lists(st.booleans(), min_size=known, max_size=known)), dtype=bool)
    target = placed(flat.numel(), flat.numel() + PIECE)
    digests = np.frombuffer(captured(engine, plan, target, skip=skip), dtype="<u8")
    payload = target.read(0, flat.numel())
    expected = np.frombuffer(piece_digests(payload, PIECE), dtype="<u8").copy()
    expected[:known][skip] = 0
    assert np.array_equal(digests, expected)
    for piece in range(whole + 1):
        part = flat[piece * PIECE : (piece + 1) * PIECE].numpy().tobytes()
        left = piece < known and skip[piece]
        assert payload[piece * PIECE : (piece + 1) * PIECE] == (bytes(len(part)) if left else part)


@pytest.mark.parametrize(
    ("slot", "places"), [(-1, b""), (3, b""), (300, b""), (0, b"\x00\x03"), (0, b"\xff\x01")]
)
def test_places_beyond_the_arena_are_refused(slot: int, places: bytes) -> None:
    with pytest.raises(CorruptError, match="do not fit into an arena"):
        placed(2 * PIECE, 2 * PIECE, slot=slot, places=places)


def test_an_arena_that_is_too_small_is_refused() -> None:
    good = placed(2 * PIECE, 2 * PIECE)
    with pytest.raises(CorruptError, match="do not fit into an arena"):
        replace(good, arena=good.arena[: SLOTS_MIN * good.layout.slot_bytes - 1])


def test_bytes_of_an_arena_that_was_cut_are_not_read() -> None:
    target = placed(4 * PIECE, 5 * PIECE)
    os.ftruncate(target.descriptor, target.start(0) + 4 * PIECE)
    with pytest.raises(CorruptError, match="was cut short"):
        target.read(4 * PIECE, 100)
