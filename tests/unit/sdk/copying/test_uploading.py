"""Restores that devices copy and verify by themselves. Host memory plays the devices."""

from __future__ import annotations

import ctypes
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from host_kernel import HERE, HostDevice, HostKernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
import holdfast._init
from holdfast._copying import uploading
from holdfast._copying.device_hashes import STRIPE_BYTES, DeviceHasher, Kernel, SegmentTable
from holdfast._copying.devices import DeviceMove, Fence, GroupCopy, Uploader, UploadRange
from holdfast._copying.engine import (
    BLOCK_PIECES,
    BadPieceError,
    CopyEngine,
    CopyPlan,
    plan_copy,
    with_device_moves,
)
from holdfast._copying.placed import Placed
from holdfast._restoring import restore
from holdfast._session import protected
from holdfast.testing import FakeDaemon
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import PAGE_BYTES, PIECE_BYTES, Layout, piece_digests, round_up

PIECE = 1024
BLOCK = PIECE * BLOCK_PIECES
assert BLOCK % PAGE_BYTES == 0, "ranges begin with pages"
SLOTS = 3
WAIT_S = 20.0
Part = tuple[int, int, torch.Tensor]


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "RANGE_BYTES", 2 * BLOCK)


class Unpinned(HostDevice):
    """Refuses to pin all but the first `granted` ranges."""

    def __init__(self, granted: int) -> None:
        self.granted = granted
        self.open = False

    @contextmanager
    def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
        left = self.granted
        with super().uploading(address, fence) as upload:

            def some(of_arena: UploadRange) -> bool:
                nonlocal left
                left -= 1
                return left >= 0 and upload(of_arena)

            self.open = True
            try:
                yield some
            finally:
                self.open = False


class Losing(HostDevice):
    """Flips a bit of a tensor after each of the first `losses` copies."""

    def __init__(self, flat: torch.Tensor, losses: int) -> None:
        self._flat, self._losses = flat, losses

    def _lose(self) -> None:
        if self._losses:
            self._losses -= 1
            self._flat[len(self._flat) // 2] ^= 1

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        super().upload(moves, buffer, start, fence)
        self._lose()

    @contextmanager
    def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
        with super().uploading(address, fence) as upload:

            def lossy(of_arena: UploadRange) -> bool:
                done = upload(of_arena)
                self._lose()
                return done

            yield lossy


@dataclass
class Snapshot:
    """A snapshot of tensors, some of them as if they were on a device."""

    plan: CopyPlan
    parts: Sequence[Part]
    source: Placed
    nbytes: int
    digests: bytes
    wanted: Sequence[torch.Tensor]

    def restore(
        self,
        hasher: DeviceHasher | None,
        device: HostDevice | None = None,
        threads: int = 1,
    ) -> int:
        """Restore it into cleared tensors; return the bytes that a device has verified."""
        for _, _, flat in self.parts:
            flat.zero_()
        engine = CopyEngine(threads, device or HostDevice(), hasher)
        try:
            engine.restore(self.plan, self.source, self.nbytes, self.digests)
        finally:
            engine.close()
        return engine.verified_on_device_bytes

    @property
    def is_right(self) -> bool:
        pairs = zip(self.parts, self.wanted, strict=True)
        return all(torch.equal(flat, wanted) for (_, _, flat), wanted in pairs)

    def damage(self, offset: int) -> None:
        """Flip a bit of the payload in the arena."""
        at = self.source.start(offset // PIECE) + offset
        byte = ctypes.c_ubyte.from_address(self.source.address + at)
        byte.value ^= 1


def snapshot_of(
    there: Sequence[Part], here: Sequence[Part] = (), gathered: int = 0, places: bytes = b""
) -> Snapshot:
    """A snapshot of the tensors `there`, on a device, and `here`, in host memory; some extras
    follow them."""
    parts = [*there, *here]
    offset = max((start + flat.numel() for start, _, flat in parts), default=0)
    end = offset + 77
    layout = Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=offset,
        extras_capacity=PIECE,
        piece_bytes=PIECE,
    )
    raw = (ctypes.c_ubyte * (layout.arena_bytes(SLOTS) + PAGE_BYTES))()
    address = round_up(ctypes.addressof(raw), PAGE_BYTES)
    arena = memoryview(raw).cast("B")[address - ctypes.addressof(raw) :]
    ctypes.memset(address, 0xA5, layout.arena_bytes(SLOTS))
    source = Placed(arena=arena, address=address, layout=layout, slot=1, places=places)
    for start, _, flat in parts:
        source.write(start, flat.numpy().tobytes())
    moves = [DeviceMove(start, flat.numel(), flat) for start, _, flat in there if flat.numel()]
    plan = with_device_moves(plan_copy(here, (), PIECE), moves, gathered)
    digests = piece_digests(source.read(0, end), PIECE)
    wanted = [flat.clone() for _, _, flat in parts]
    reading = replace(source, arena=arena.toreadonly())
    return Snapshot(plan, parts, reading, end, digests, wanted)


def flat_of(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def trusted(make_kernel: Callable[[torch.device, int], Kernel] = HostKernel) -> DeviceHasher:
    hasher = DeviceHasher(make_kernel)
    hasher.prepare([HERE], PIECE)
    assert hasher.trusts(HERE, PIECE)
    return hasher


def missing(device: torch.device, piece_bytes: int) -> Kernel:
    raise ModuleNotFoundError("No module named 'triton'")


class AfterTest(HostKernel):
    """Does something at the call behind the test of the device."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        super().__init__(device, piece_bytes)
        self._calls = 0

    def __call__(self, table: SegmentTable, rows: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        found = super().__call__(table, rows)
        return found if self._calls == 1 else self.later(found)

    def later(self, found: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


lengths = st.one_of(
    st.integers(0, 40 * PIECE // STRIPE_BYTES).map(lambda n: n * STRIPE_BYTES),
    st.integers(0, 3 * PIECE),
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(lengths, st.booleans()), max_size=12),
    st.sampled_from((0, 300, PIECE)),
    st.booleans(),
    st.sampled_from((0, 1, 2, 99)),
    st.sampled_from((HostKernel, missing)),
    st.integers(1, 2),
    st.integers(0, 99),
)
def test_every_byte_comes_back_whoever_copies_and_verifies_it(
    tensors: list[tuple[int, bool]],
    gathered: int,
    scattered: bool,
    granted: int,
    make_kernel: Callable[[torch.device, int], Kernel],
    threads: int,
    seed: int,
) -> None:
    theirs, ours, at = list[Part](), list[Part](), 0
    places = bytearray()
    for number, (nbytes, on_device) in enumerate(tensors):
        (theirs if on_device else ours).append((at, 0, flat_of(nbytes, seed + number)))
        at = round_up(at + nbytes, PIECE if scattered else STRIPE_BYTES)
        if scattered:
            slot = random.Random(seed + number).randrange(SLOTS)
            places += bytes([slot]) * (at // PIECE - len(places))
    snapshot = snapshot_of(theirs, ours, gathered, bytes(places) + bytes(4) if scattered else b"")
    hasher = DeviceHasher(make_kernel)
    hasher.prepare([HERE], PIECE)
    nbytes = snapshot.restore(hasher, Unpinned(granted), threads)
    assert snapshot.is_right
    assert not nbytes or (granted and make_kernel is HostKernel)
    # A damaged byte is found, wherever it lies.
    damaged = random.Random(seed).randrange(snapshot.nbytes)
    snapshot.damage(damaged)
    with pytest.raises(BadPieceError) as caught:
        snapshot.restore(hasher, Unpinned(granted), threads)
    assert caught.value.piece == damaged // PIECE


def test_a_device_verifies_what_it_holds_and_threads_the_rest() -> None:
    host = 40 * PIECE
    there = [(0, 0, flat_of(40 * PIECE, 1)), (host + 64, 0, flat_of(2 * PIECE - 64, 2))]
    snapshot = snapshot_of(there, [(host, 0, flat_of(64, 3))])
    assert snapshot.restore(trusted()) == 41 * PIECE
    assert snapshot.is_right
    assert snapshot.restore(None) == 0
    assert snapshot.is_right


@pytest.mark.parametrize("offset", [0, 33 * PIECE + 5, 40 * PIECE - 1, 40 * PIECE + 100])
def test_a_bad_piece_is_named_by_the_device_and_nothing_stays_pinned(offset: int) -> None:
    """The last one lies in two tensors."""
    second = 40 * PIECE + 512
    there = [(0, 0, flat_of(second, 1)), (second, 0, flat_of(PIECE + 512, 2))]
    snapshot, device = snapshot_of(there), Unpinned(99)
    snapshot.damage(offset)
    hasher = trusted()
    with pytest.raises(BadPieceError) as caught:
        snapshot.restore(hasher, device)
    assert caught.value.piece == offset // PIECE
    assert not device.open
    assert hasher.trusts(HERE, PIECE)
    # Once the arena is right again, so are the tensors.
    snapshot.damage(offset)
    assert snapshot.restore(hasher, device) == 42 * PIECE
    assert snapshot.is_right


def test_what_is_refused_goes_through_buffers() -> None:
    snapshot = snapshot_of([(0, 0, flat_of(5 * 2 * BLOCK, 1))])
    for granted in (0, 1, 3):
        assert snapshot.restore(trusted(), Unpinned(granted)) == granted * 2 * BLOCK
        assert snapshot.is_right


def test_bytes_that_a_copy_has_lost_are_copied_again(caplog: pytest.LogCaptureFixture) -> None:
    flat, hasher = flat_of(2 * BLOCK, 1), trusted()
    snapshot = snapshot_of([(0, 0, flat)])
    assert snapshot.restore(hasher, Losing(flat, 1)) == 2 * BLOCK
    assert snapshot.is_right
    assert "cpu holds other bytes than were copied to it, in 1 pieces" in caplog.text
    assert hasher.trusts(HERE, PIECE)


def test_a_device_that_loses_bytes_again_and_again_is_refused() -> None:
    flat = flat_of(2 * BLOCK, 1)
    snapshot = snapshot_of([(0, 0, flat)])
    with pytest.raises(CorruptError, match="cpu holds other bytes than were copied to it, again"):
        snapshot.restore(trusted(), Losing(flat, 3))


class LosingAt(HostDevice):
    """Flips bits of tensors: one after the first copy out of the arena, another after each copy
    through a buffer."""

    def __init__(self, first: Callable[[], None], then: Callable[[], None]) -> None:
        self._first, self._then = [first], then

    def upload(
        self, moves: Sequence[DeviceMove], buffer: torch.Tensor, start: int, fence: Fence
    ) -> None:
        super().upload(moves, buffer, start, fence)
        self._then()

    @contextmanager
    def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
        with super().uploading(address, fence) as upload:

            def lossy(of_arena: UploadRange) -> bool:
                done = upload(of_arena)
                while self._first:
                    self._first.pop()()
                return done

            yield lossy


def flip(flat: torch.Tensor, at: int) -> None:
    flat[at] ^= 1


@pytest.mark.parametrize("piece", [3, 7])
def test_all_that_is_copied_again_is_compared(piece: int) -> None:
    """Piece 3 was verified on the device; then piece 7, in the same block, had lost a byte."""
    flat = flat_of(2 * BLOCK, 1)
    snapshot = snapshot_of([(0, 0, flat)])
    device = LosingAt(lambda: flip(flat, 7 * PIECE + 1), lambda: flip(flat, piece * PIECE + 9))
    with pytest.raises(CorruptError, match="cpu holds other bytes than were copied to it, again"):
        snapshot.restore(trusted(), device)


def test_when_a_byte_was_lost_pieces_that_threads_have_verified_are_compared_too() -> None:
    """The last piece has a byte in host memory, so the device could not verify it."""
    flat = flat_of(3 * BLOCK - 1, 1)
    snapshot = snapshot_of([(0, 0, flat)], [(3 * BLOCK - 1, 0, flat_of(1, 2))])

    class AtTheEnd(HostDevice):
        """Loses bytes after the last range."""

        @contextmanager
        def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
            with super().uploading(address, fence) as upload:
                done = 0

                def lossy(of_arena: UploadRange) -> bool:
                    nonlocal done
                    copied = upload(of_arena)
                    done += 1
                    if done == 2:
                        flip(flat, 7 * PIECE + 1)
                        flip(flat, 3 * BLOCK - PIECE + 5)
                    return copied

                yield lossy

    assert snapshot.restore(trusted(), AtTheEnd()) == (3 * BLOCK_PIECES - 1) * PIECE
    assert snapshot.is_right


def test_a_kernel_is_found_out_also_when_another_piece_has_lost_bytes() -> None:
    class Wrong(AfterTest):
        def later(self, found: torch.Tensor) -> torch.Tensor:
            found[20] ^= 1
            return found

    flat, hasher = flat_of(2 * BLOCK, 1), trusted(Wrong)
    snapshot = snapshot_of([(0, 0, flat)])
    snapshot.restore(hasher, Losing(flat, 1))
    assert snapshot.is_right
    why = "threads for cpu (RuntimeError: its digest of piece 20 is not that of the bytes)"
    assert hasher.state == why


def test_gathered_bytes_that_a_copy_has_lost_never_reach_their_tensors() -> None:
    stride = 3 * STRIPE_BYTES  # with gaps, and across the ends of pieces
    there = [(at, 0, flat_of(stride - 5, at)) for at in range(0, 12 * PIECE, stride)]
    snapshot = snapshot_of(there, gathered=PIECE)
    assert len(snapshot.plan.gather.tensors) == len(there)
    move = snapshot.plan.device_moves[0][0]
    assert len(snapshot.plan.device_moves[0]) == 1
    # The last piece is not full.
    assert snapshot.restore(trusted(), Losing(move.flat, 1)) == 11 * PIECE
    assert snapshot.is_right
    with pytest.raises(CorruptError):
        snapshot.restore(trusted(), Losing(move.flat, 3))
    assert not any(flat.any() for _, _, flat in snapshot.parts)


def test_a_kernel_that_has_become_wrong_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(AfterTest):
        def later(self, found: torch.Tensor) -> torch.Tensor:
            found[7] ^= 1
            return found

    snapshot, hasher = snapshot_of([(0, 0, flat_of(40 * PIECE, 1))]), trusted(Wrong)
    snapshot.restore(hasher)
    assert snapshot.is_right
    why = "threads for cpu (RuntimeError: its digest of piece 7 is not that of the bytes)"
    assert hasher.state == why
    assert snapshot.restore(hasher) == 0
    assert snapshot.is_right


@pytest.mark.parametrize("threads", [1, 2])
def test_if_a_kernel_fails_threads_verify(threads: int) -> None:
    class Failing(AfterTest):
        def later(self, found: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory is left")

    snapshot = snapshot_of([(0, 0, flat_of(40 * PIECE, 1))])
    hasher = trusted(Failing)
    assert snapshot.restore(hasher, threads=threads) == 0
    assert snapshot.is_right
    assert hasher.state == "threads for cpu (OutOfMemoryError: no memory is left)"
    snapshot.damage(39 * PIECE)
    with pytest.raises(BadPieceError):
        snapshot.restore(trusted(Failing), threads=threads)


def test_after_work_that_failed_on_the_device_threads_verify() -> None:
    class Failed:
        def wait(self) -> None:
            raise RuntimeError("launch failed")

        def is_over(self) -> bool:
            raise RuntimeError("launch failed")

    class Broken(Unpinned):
        def arrival(self) -> GroupCopy:
            return Failed()

    snapshot, hasher, device = snapshot_of([(0, 0, flat_of(PIECE, 1))]), trusted(), Broken(99)
    with pytest.raises(RuntimeError, match="launch failed"):
        snapshot.restore(hasher, device)
    assert not device.open
    assert hasher.state == "threads for cpu (RuntimeError: launch failed)"


def test_threads_verify_until_a_device_is_tested() -> None:
    go_on = threading.Event()

    def slow(device: torch.device, piece_bytes: int) -> Kernel:
        assert go_on.wait(30)
        return HostKernel(device, piece_bytes)

    class TestedMeanwhile(HostDevice):
        """The test ends while the second range is being pinned."""

        @contextmanager
        def uploading(self, address: int, fence: Fence) -> Iterator[Uploader]:
            with super().uploading(address, fence) as upload:

                def later(of_arena: UploadRange) -> bool:
                    if len(begun) == 1:
                        go_on.set()
                        hasher.settle()
                    begun.append(of_arena)
                    return upload(of_arena)

                yield later

    hasher, begun = DeviceHasher(slow), list[UploadRange]()
    snapshot = snapshot_of([(0, 0, flat_of(4 * BLOCK, 1))])
    CopyEngine(1, HostDevice(), hasher).begin_test(PIECE)
    assert hasher.state == "cpu is being tested"
    assert snapshot.restore(hasher) == 0
    assert snapshot.is_right
    assert snapshot.restore(hasher, TestedMeanwhile()) == 4 * BLOCK
    assert snapshot.is_right


@pytest.mark.parametrize("tensor_bytes", [2 * BLOCK, 2 * STRIPE_BYTES])
def test_moves_are_cut_where_the_daemon_has_placed_their_pieces_in_several_slots(
    tensor_bytes: int,
) -> None:
    """They are of one tensor or of gathered ones; digests decide whether the bytes are right."""
    flats = flat_of(2 * BLOCK, 1).split(tensor_bytes)
    there = [(index * tensor_bytes, 0, flat) for index, flat in enumerate(flats)]
    snapshot = snapshot_of(there, gathered=PIECE, places=bytes(2 * BLOCK_PIECES + 1))
    assert len(snapshot.plan.device_moves[0]) == 1
    slots = bytes([0] * 5 + [2] * (2 * BLOCK_PIECES - 4))
    raw = memoryview(
        (ctypes.c_ubyte * len(snapshot.source.arena)).from_address(snapshot.source.address)
    ).cast("B")
    moved = replace(snapshot.source, arena=raw, places=slots)
    moved.write(0, snapshot.source.read(0, snapshot.nbytes))
    split = replace(snapshot, source=moved)
    assert split.restore(trusted()) == 2 * BLOCK
    assert split.is_right
    split.damage(BLOCK - 1)
    with pytest.raises(BadPieceError):
        split.restore(trusted())


def test_a_payload_that_ends_before_its_tensors_is_not_copied_by_a_device() -> None:
    flat = flat_of(2 * BLOCK, 1)
    snapshot = replace(snapshot_of([(0, 0, flat)]), nbytes=BLOCK)
    assert snapshot.restore(trusted()) == 0
    assert not flat[BLOCK:].any()


def test_restores_of_one_kind_of_memory_ask_no_device(caplog: pytest.LogCaptureFixture) -> None:
    def none(device: torch.device, piece_bytes: int) -> Kernel:
        raise AssertionError("no device holds a tensor")

    caplog.set_level(logging.WARNING)
    snapshot = snapshot_of([], [(0, 0, flat_of(3 * PIECE, 1))])
    assert snapshot.restore(DeviceHasher(none)) == 0
    assert snapshot.is_right
    assert not caplog.records


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets sessions restore into tensors as if they were on a device."""

    def plan_as_on_device(ranges: Sequence[Part], staged: Sequence[Any], size: int) -> CopyPlan:
        moves = [
            DeviceMove(start, flat.numel(), flat) for start, _, flat in sorted_by_start(ranges)
        ]
        return with_device_moves(plan_copy((), staged, size), moves, 0)

    def sorted_by_start(ranges: Sequence[Part]) -> list[Part]:
        return sorted((one for one in ranges if one[2].numel()), key=lambda one: one[0])

    hasher = DeviceHasher(HostKernel)
    hasher.prepare([HERE], PIECE_BYTES)
    monkeypatch.setattr(restore, "plan_copy", plan_as_on_device)
    monkeypatch.setattr(holdfast._init, "device_of", lambda tensors: HostDevice())
    monkeypatch.setattr(protected, "hasher_of_process", lambda: hasher)


@pytest.mark.usefixtures("on_devices")
def test_a_session_restores_by_the_device_and_refuses_what_the_device_finds_damaged(
    tmp_path: Path,
) -> None:
    def session_of(epoch: int, seed: int) -> tuple[nn.Linear, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(513, 1021)
        optimizer = torch.optim.SGD(model.parameters())
        daemon = FakeDaemon(tmp_path, epoch=epoch)
        tuned = holdfast.Settings(device_checksums=True)
        return model, holdfast.init(model=model, optimizer=optimizer, daemon=daemon, settings=tuned)

    model, session = session_of(1, 1)
    session.save(3).committed.result(WAIT_S)
    session.close()
    other, session = session_of(2, 2)
    assert session.restore() == 3
    assert torch.equal(other.weight, model.weight)
    assert session._engine.verified_on_device_bytes == 513 * 1021 * 4 // PIECE_BYTES * PIECE_BYTES
    session.close()
    # Damage the middle of each arena that is there.
    weights = model.weight.detach().numpy().tobytes()[:4096]
    for arena in tmp_path.rglob("*"):
        content = arena.read_bytes() if arena.is_file() else b""
        if weights in content:
            at = content.index(weights)
            arena.write_bytes(content[: at + 9] + bytes([content[at + 9] ^ 1]) + content[at + 10 :])
    _, session = session_of(3, 3)
    with pytest.raises(CorruptError, match=r"piece 0 does not match its checksum; it holds .*"):
        session.restore()
    session.close()
