"""Digests that devices compute. Host memory plays the devices; the kernel itself runs in Triton's
interpreter."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_kernel import HERE, HostDevice, HostKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from holdfast._copying.device_hashes import (
    SEGMENTS_MAX,
    STRIPE_BYTES,
    DeviceHasher,
    DevicePieces,
    Kernel,
    PiecesOnDevice,
    SegmentTable,
)
from holdfast._copying.devices import DeviceMove, Download, Fence, GroupCopy
from holdfast._copying.engine import CopyEngine, CopyPlan, plan_copy, with_device_moves
from holdfast._copying.mirror import fill
from holdfast._copying.placed import Placed
from holdfast_core.snapshots.layouts import Layout, piece_digests, round_up

PIECE = 2048
Part = tuple[int, int, torch.Tensor]
OUTPUT: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def interprets() -> bool:
    """Whether the interpreter of this Triton can run loops. Older ones take arrays of one number
    for numbers, which numpy 2.5 and later refuse."""
    old_triton = Version(metadata.version("triton")) < Version("3.9")
    return not (old_triton and Version(np.__version__) >= Version("2.5"))


def hasher_of(make_kernel: Callable[[torch.device, int], Kernel] = HostKernel) -> DeviceHasher:
    hasher = DeviceHasher(make_kernel)
    hasher.prepare([HERE], PIECE)
    return hasher


def random_flat(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def plan_of(parts: Sequence[Part], here: Sequence[Part] = (), gathered: int = 0) -> CopyPlan:
    """The plan for `parts` as if they were on a device, and for `here` in host memory."""
    moves = [DeviceMove(start, flat.numel(), flat) for start, _, flat in parts if flat.numel()]
    return with_device_moves(plan_copy(here, (), PIECE), moves, gathered)


def placed(offset: int) -> Placed:
    """A slot for tensors of `offset` bytes, with other bytes in it already."""
    layout = Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=offset,
        extras_capacity=PIECE,
        piece_bytes=PIECE,
    )
    raw = (ctypes.c_ubyte * layout.arena_bytes(3))()
    ctypes.memset(raw, 0xA5, len(raw))
    arena = memoryview(raw).cast("B")
    return Placed(arena=arena, address=ctypes.addressof(raw), layout=layout, slot=1)


def captured(
    plan: CopyPlan, end: int, hasher: DeviceHasher, skip: Sequence[bool] | None = None
) -> tuple[list[int], list[int], int]:
    """Digests of a capture, those of the bytes in its slot, and the bytes that a device hashed."""
    engine, target = CopyEngine(1, HostDevice(), hasher), placed(end)
    flags = None if skip is None else np.array(skip, dtype=bool)
    digests = engine.finish(target, b"", engine.capture(plan, target, None, flags))
    expected = piece_digests(target.read(0, end), PIECE)
    whole = np.frombuffer(digests, "<u8").tolist(), np.frombuffer(expected, "<u8").tolist()
    return *whole, engine.hashed_on_device_bytes


lengths = st.one_of(
    st.integers(0, 5 * PIECE // STRIPE_BYTES).map(lambda n: n * STRIPE_BYTES),
    st.integers(0, 3 * PIECE),
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(lengths, st.booleans(), st.booleans()), max_size=12),
    st.sampled_from((0, 300, PIECE)),
    st.booleans(),
    st.integers(0, 99),
)
def test_digests_are_those_of_the_bytes_in_the_slot(
    tensors: list[tuple[int, bool, bool]], gathered: int, apart: bool, seed: int
) -> None:
    theirs, ours, skip, at = list[Part](), list[Part](), list[bool](), 0
    for number, (nbytes, on_device, skipped) in enumerate(tensors):
        (theirs if on_device else ours).append((at, 0, random_flat(nbytes, seed + number)))
        # Only tensors that share no piece with others can be skipped.
        at = round_up(at + nbytes, PIECE if apart else STRIPE_BYTES)
        skip += [apart and skipped] * (at // PIECE - len(skip))
    plan = plan_of(theirs, ours, gathered)
    found, expected, _ = captured(plan, at, hasher_of(), skip)
    skip += [False] * (len(found) - len(skip))
    assert found == [0 if left else d for d, left in zip(expected, skip, strict=True)]


def test_a_device_hashes_whole_pieces_and_those_of_several_of_its_tensors() -> None:
    lengths = [3 * PIECE, PIECE // 2, PIECE // 4, PIECE // 4, PIECE]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts = [(at, 0, random_flat(n, at)) for at, n in zip(starts, lengths, strict=True)]
    found, expected, nbytes = captured(plan_of(parts), sum(lengths), hasher_of())
    assert found == expected
    assert nbytes == sum(lengths)


def test_threads_hash_pieces_with_other_bytes() -> None:
    odd, host, many = 0, 2 * PIECE, 4 * PIECE
    tiny = [many + at for at in range(0, PIECE, STRIPE_BYTES)]
    assert len(tiny) > SEGMENTS_MAX
    shifted = random_flat(PIECE + 1, 3)[1:]  # not aligned to words
    parts = [
        (odd, 0, random_flat(PIECE - 1, 1)),
        (PIECE, 0, random_flat(PIECE, 2)),
        (host, 0, random_flat(PIECE // 2, 4)),
        (3 * PIECE, 0, shifted),
        *((at, 0, random_flat(STRIPE_BYTES, at)) for at in tiny),
    ]
    here = [(host + PIECE // 2, 0, random_flat(PIECE // 2, 5))]
    found, expected, nbytes = captured(plan_of(parts, here), 5 * PIECE, hasher_of())
    assert found == expected
    assert nbytes == PIECE  # the second piece


def test_gathered_tensors_are_hashed_where_they_are_gathered() -> None:
    length = 3 * STRIPE_BYTES - 5  # with gaps, and across the ends of pieces
    parts = [(at, 0, random_flat(length, at)) for at in range(0, 2 * PIECE, 3 * STRIPE_BYTES)]
    plan = plan_of(parts, gathered=PIECE)
    assert len(plan.gather.tensors) == len(parts)
    found, expected, nbytes = captured(plan, parts[-1][0] + length, hasher_of())
    assert found == expected
    assert nbytes == 2 * PIECE


def test_a_kernel_that_is_wrong_hashes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(HostKernel):
        def __call__(self, table: SegmentTable, rows: torch.Tensor) -> torch.Tensor:
            found = super().__call__(table, rows)
            found[0] ^= 1
            return found

    hasher = hasher_of(Wrong)
    parts = [(0, 0, random_flat(4 * PIECE, 1))]
    found, expected, nbytes = captured(plan_of(parts), 4 * PIECE, hasher)
    assert (found, nbytes) == (expected, 0)
    why = "RuntimeError: it computed wrong checksums for 1 of 5 known pieces"
    assert hasher.state == f"threads for cpu ({why})"
    captured(plan_of(parts), 4 * PIECE, hasher)
    assert caplog.text.count(why) == 1


def test_without_a_kernel_threads_hash(caplog: pytest.LogCaptureFixture) -> None:
    def missing(device: torch.device, piece_bytes: int) -> Kernel:
        raise ModuleNotFoundError("No module named 'triton'")

    hasher = hasher_of(missing)
    parts = [(0, 0, random_flat(2 * PIECE, 1))]
    found, expected, nbytes = captured(plan_of(parts), 2 * PIECE, hasher)
    assert (found, nbytes) == (expected, 0)
    assert hasher.state == "threads for cpu (ModuleNotFoundError: No module named 'triton')"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_kernel_that_fails_later_is_used_no_more() -> None:
    class Failing(HostKernel):
        calls = 0

        def __call__(self, table: SegmentTable, rows: torch.Tensor) -> torch.Tensor:
            Failing.calls += 1
            if Failing.calls == 3:
                raise torch.OutOfMemoryError("no memory is left\non this device")
            return super().__call__(table, rows)

    hasher, parts = hasher_of(Failing), [(0, 0, random_flat(2 * PIECE, 1))]
    plan = plan_of(parts)
    assert [captured(plan, 2 * PIECE, hasher)[2] for _ in range(3)] == [2 * PIECE, 0, 0]
    assert Failing.calls == 3  # the test of the device, and two captures
    assert hasher.state == "threads for cpu (OutOfMemoryError: no memory is left)"


def test_pieces_that_cannot_be_found_are_hashed_by_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find(self: DevicePieces) -> Iterator[PiecesOnDevice]:
        raise RuntimeError("no address")

    hasher, plan = hasher_of(), plan_of([(0, 0, random_flat(2 * PIECE, 1))])
    monkeypatch.setattr(DevicePieces, "_find", find)
    for _ in range(2):
        found, expected, nbytes = captured(plan, 2 * PIECE, hasher)
        assert (found, nbytes) == (expected, 0)
    assert caplog.text.count("no address") == 1


def test_after_hashes_that_failed_on_the_device_threads_hash() -> None:
    class Failed:
        def wait(self) -> None:
            raise RuntimeError("launch failed")

        def is_over(self) -> bool:
            raise RuntimeError("launch failed")

    class Broken(HostDevice):
        def arrival(self) -> GroupCopy:
            return Failed()

    hasher, plan = hasher_of(), plan_of([(0, 0, random_flat(2 * PIECE, 1))])
    with pytest.raises(RuntimeError, match="launch failed"):
        CopyEngine(1, Broken(), hasher).capture(plan, placed(2 * PIECE), None)
    found, expected, nbytes = captured(plan, 2 * PIECE, hasher)
    assert (found, nbytes) == (expected, 0)
    assert hasher.state == "threads for cpu (RuntimeError: launch failed)"


def test_when_tensors_may_change_nothing_is_left_to_do_on_the_device() -> None:
    """Training may capture a CUDA graph then, which any work on the device would break."""

    class Watched(HostDevice):
        used = 0

        def after(self, fence: Fence) -> AbstractContextManager[None]:
            self.used += 1
            return super().after(fence)

    device, seen = Watched(), list[int]()
    plan, target = plan_of([(0, 0, random_flat(2 * PIECE, 1))]), placed(2 * PIECE)
    engine = CopyEngine(1, device, hasher_of())
    engine.capture(plan, target, None, copied=lambda: seen.append(device.used))
    assert engine.hashed_on_device_bytes == 2 * PIECE
    assert seen == [device.used]


def test_a_mirror_is_copied_without_hashing() -> None:
    class Counting(HostKernel):
        calls = 0

        def __call__(self, table: SegmentTable, rows: torch.Tensor) -> torch.Tensor:
            Counting.calls += 1
            return super().__call__(table, rows)

    flat, target = random_flat(100 * PIECE, 1), placed(100 * PIECE)
    engine = CopyEngine(1, HostDevice(), hasher_of(Counting))
    assert fill(target, plan_of([(0, 0, flat)]), engine, None, lambda: False) == 100
    assert target.read(0, 100 * PIECE) == flat.numpy().tobytes()
    assert Counting.calls == 1  # the test of the device


def test_threads_hash_until_a_device_is_tested() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(device: torch.device, piece_bytes: int) -> Kernel:
        begun.set()
        assert go_on.wait(30)
        return HostKernel(device, piece_bytes)

    hasher, plan = DeviceHasher(slow), plan_of([(0, 0, random_flat(2 * PIECE, 1))])
    found, expected, nbytes = captured(plan, 2 * PIECE, hasher)
    assert (found, nbytes, hasher.state) == (expected, 0, "cpu is being tested")
    assert begun.wait(30)
    go_on.set()
    hasher.settle()
    found, expected, nbytes = captured(plan, 2 * PIECE, hasher)
    assert (found, nbytes, hasher.state) == (expected, 2 * PIECE, "cpu")


def test_a_tensor_that_has_got_other_memory_is_hashed_by_threads() -> None:
    flat = random_flat(2 * PIECE, 1)
    plan, hasher = plan_of([(0, 0, flat)]), hasher_of()
    before = captured(plan, 2 * PIECE, hasher)
    flat.untyped_storage().resize_(4 * PIECE)  # moves it, as offloading does
    flat.fill_(7)
    after = captured(plan, 2 * PIECE, hasher)
    assert before[0] == before[1] != after[0] == after[1]
    assert (before[2], after[2]) == (2 * PIECE, 0)


def test_tensors_are_held_until_they_are_hashed() -> None:
    class Hashes:
        over = False

        def wait(self) -> None:
            self.over = True

        def is_over(self) -> bool:
            return self.over

    class Copied:
        def wait(self, group: int) -> None: ...

        def hurry(self) -> None: ...

        def is_over(self) -> bool:
            return True

    class SlowlyHashing(HostDevice):
        hashes = Hashes()

        def arrival(self) -> GroupCopy:
            return self.hashes

        def download(
            self, groups: Sequence[Sequence[DeviceMove]], slot: memoryview, fence: Fence
        ) -> Download:
            for moves in groups:
                self.fetch(moves, slot, fence)
            return Copied()

    device, seen = SlowlyHashing(), list[bool]()
    engine = CopyEngine(1, device, hasher_of())
    plan, target = plan_of([(0, 0, random_flat(40 * PIECE, 1))]), placed(40 * PIECE)
    engine.capture(plan, target, None, copied=lambda: seen.append(device.hashes.over))
    assert seen == [True]


def test_a_session_in_host_memory_imports_no_triton() -> None:
    script = (
        "import sys, torch, holdfast\n"
        "from holdfast._copying.device_hashes import hasher_of_process\n"
        "hasher_of_process().prepare((), 1024)\n"
        "assert not any(n == 'triton' or n.startswith('triton.') for n in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


INTERPRETED = f"""
import torch
from holdfast._copying.device_hashes import DeviceHasher, triton_kernel
from test_device_hashes import HERE, captured, plan_of, random_flat
hasher = DeviceHasher(triton_kernel)
for piece_bytes in (1024, {PIECE}):
    for _ in range(8):  # each waits for a limited time, and interpreting is slow
        hasher.prepare([HERE], piece_bytes)
        if hasher.trusts(HERE, piece_bytes):
            break
lengths = [2 * {PIECE} + 512, {PIECE} - 512 - 192, 128, 64, 100]
starts = [sum(lengths[:i]) for i in range(len(lengths))]
parts = [(at, 0, random_flat(n, at)) for at, n in zip(starts, lengths)]
found, expected, nbytes = captured(plan_of(parts), sum(lengths), hasher)
assert found == expected, (found, expected)
assert nbytes == 3 * {PIECE}, nbytes
print(hasher.state)
"""


@needs_triton
@pytest.mark.timeout(400)
def test_the_kernel_computes_the_digests_of_the_library() -> None:
    if not interprets():
        pytest.skip("the interpreter of this Triton needs numpy < 2.5; a device needs neither")
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    patient = OUTPUT | {"timeout": 300}
    done = subprocess.run(command, check=False, **patient, env=environment)
    assert (done.stdout, done.returncode) == ("cpu; cpu\n", 0), done.stderr


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from holdfast._copying.xxh3_kernel import _hash_pieces_kernel as kernel
types = {"rows": "*i64", "firsts": "*i64", "begins": "*i64", "bases": "*i64", "keys": "*i64"}
types |= {"digests": "*i64", "blocks": "i32"}
source = ASTSource(kernel, signature=types, constexprs={})
options = {"num_warps": 1, "enable_fp_fusion": False}
print("cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm)
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_kernel_compiles_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, check=False, **OUTPUT, env=environment)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
