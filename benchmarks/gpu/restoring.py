"""Restores out of a mapping that was just made, against one copy of the same bytes to the device.

The floor is a copy from memory that was pinned long before. For tensors of several sizes:

- `restored_*_directly`: the device copies out of the arena and verifies what has arrived;
  `restored_*_directly_rate` is its rate alone;
- `restored_*_threads_N`: N threads copy through buffers and verify, which is the default.

What the parts cost alone, for all bytes:

- `pinned_in_ranges`, `pinned_at_once`: the mapping is pinned, as a direct restore does or as a
  whole, and released; `pinned_small_pages`: the same in ranges, with pages of 4 KiB;
- `uploaded`: pinned in ranges, and copied by the device;
- `buffered_threads_N`: N threads read the arena's file into their pinned buffers;
- `hashed_from_buffers_threads_N`: and hash it.

    python -m benchmarks.gpu.restoring --out FILE.json
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial

import torch
from xxhash import xxh3_64_intdigest

from benchmarks.gpu.arenas import OpenArena, opened_arena
from benchmarks.gpu.copying import (
    FEW_THREADS,
    MANY_THREADS,
    apart,
    engine_of,
    plan_of,
    random_bytes,
)
from benchmarks.gpu.results import Goal, Pair, Results, in_turn, run
from benchmarks.gpu.room import GIB, MIB, cores, state_bytes
from holdfast._copying.arena import MappedArena
from holdfast._copying.device_hashes import DeviceHasher, triton_kernel
from holdfast._copying.devices import Device, UploadRange
from holdfast._copying.engine import BLOCK_PIECES, CopyEngine
from holdfast._copying.placed import Placed
from holdfast._copying.uploading import RANGE_BYTES, Uploads
from holdfast_core.snapshots.layouts import PIECE_BYTES, piece_count

STATE_BYTES_MAX = 4 * GIB
PREPARE_S, LIMIT_S = 8.0, 60.0
TENSOR_BYTES = {"64MiB": 64 * MIB, "1GiB": GIB, "1MiB": MIB, "64KiB": 64 * 1024}
SMALL_TENSOR_BYTES = {"1MiB": MIB}
TENSORS_MAX = 4096
BLOCK_BYTES = BLOCK_PIECES * PIECE_BYTES
FLOOR = "pinned copy back"

AT_THE_LINKS_RATE = Goal(limit=40.0, least=True)
"""In GB/s, of the 55 that the link of an H100 has."""


def measure(results: Results) -> None:
    """Measure all figures."""
    nbytes = state_bytes(results, prepare_s=PREPARE_S, most=STATE_BYTES_MAX, small=4 * MIB)
    state = random_bytes(nbytes, results.device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=results.on_gpu)
    pinned.copy_(state)
    counts = sorted({FEW_THREADS, min(cores(), MANY_THREADS)})
    with opened_arena(nbytes, results.device) as arena:
        sizes = SMALL_TENSOR_BYTES if results.small else TENSOR_BYTES
        for number, (name, size) in enumerate(sizes.items()):
            part = slice(0, min(size * TENSORS_MAX, nbytes))
            _restores(results, name, size, arena, state[part], pinned[part], counts)
            if number == 0:
                _parts(results, arena, state, pinned, counts)


def _restores(
    results: Results,
    name: str,
    size: int,
    arena: OpenArena,
    state: torch.Tensor,
    pinned: torch.Tensor,
    counts: list[int],
) -> None:
    of_part, tensors = arena.part(state.numel()), apart(state, size)
    plan = plan_of(tensors)
    with engine_of(FEW_THREADS, of_part) as engine:
        captured = engine.capture(plan, of_part.placed, of_part.device.fence())
        digests = engine.finish(of_part.placed, b"", captured)
    whole = torch.empty_like(state)

    def restored(figure: str, threads: int, hasher: DeviceHasher | None) -> list[Pair]:
        for tensor in tensors:
            tensor.zero_()
        with engine_of(threads, of_part, hasher) as engine, of_part.readers() as reader:
            engine.prepare(PIECE_BYTES)
            floor = partial(whole.copy_, pinned, non_blocking=True)

            def back() -> None:
                engine.restore(plan, reader(), state.numel(), digests)

            pairs = in_turn(back, floor, results.device, results.repetitions)
            if hasher is not None:
                results.state(f"{figure}_hashing", hasher.state)
                results.state(f"{figure}_verified_bytes", engine.verified_on_device_bytes)
        for tensor, wanted in zip(tensors, state.split(min(size, state.numel())), strict=True):
            if not torch.equal(tensor, wanted):
                raise RuntimeError("the tensors have other bytes than they had")
        results.rates(figure, state.numel(), pairs, FLOOR)
        return pairs

    def directly() -> None:
        figure = f"restored_{name}_directly"
        pairs = restored(figure, FEW_THREADS, DeviceHasher(triton_kernel))
        rates = [state.numel() / 1e9 / ours for ours, _ in pairs]
        results.plain(f"{figure}_rate", rates, "GB/s", AT_THE_LINKS_RATE)

    if results.on_gpu:
        results.attempt(f"restored_{name}_directly", directly)
    else:
        results.skip(f"restored_{name}_directly", "needs a CUDA device")
    for threads in counts:
        figure = f"restored_{name}_threads_{threads}"
        results.attempt(figure, partial(restored, figure, threads, None))


def _parts(
    results: Results,
    arena: OpenArena,
    state: torch.Tensor,
    pinned: torch.Tensor,
    counts: list[int],
) -> None:
    nbytes, device, placed = state.numel(), arena.device, arena.placed
    low = placed.slot * placed.layout.slot_bytes
    target = torch.empty_like(state)
    floor = partial(target.copy_, pinned, non_blocking=True)

    def compared(figure: str, ours: Callable[[], object]) -> None:
        pairs = in_turn(ours, floor, results.device, results.repetitions)
        results.rates(figure, nbytes, pairs, FLOOR)

    def with_readers(figure: str, ours: Callable[[Placed], object]) -> Callable[[], None]:
        def compare() -> None:
            with arena.readers() as reader:
                compared(figure, lambda: ours(reader()))

        return compare

    def upload_all(source: Placed) -> None:
        moves = plan_of([target]).device_moves
        uploads = Uploads(moves, source, piece_count(nbytes, PIECE_BYTES), BLOCK_BYTES)
        with device.uploading(source.address, device.fence()) as upload:
            if not all(upload(of_arena) for of_arena in uploads.ranges()):
                raise RuntimeError("CUDA does not pin memory that may only be read")

    on_device: dict[str, Callable[[Placed], object]] = {
        "pinned_in_ranges": lambda source: _pin(device, source.address + low, nbytes, RANGE_BYTES),
        "pinned_at_once": lambda source: _pin(device, source.address + low, nbytes, nbytes),
        "uploaded": upload_all,
    }
    for figure, ours in on_device.items():
        if results.on_gpu:
            results.attempt(figure, with_readers(figure, ours))
        else:
            results.skip(figure, "needs a CUDA device")
    if results.on_gpu:
        small = partial(_small_pages, device, nbytes, partial(compared, "pinned_small_pages"))
        results.attempt("pinned_small_pages", small)
    for threads in counts:
        for figure, hashed in (("buffered", False), ("hashed_from_buffers", True)):
            name = f"{figure}_threads_{threads}"
            with engine_of(threads, arena) as engine:
                ours = partial(_buffered, engine, arena, nbytes, hashed)
                results.attempt(name, with_readers(name, ours))


def _pin(device: Device, address: int, nbytes: int, range_bytes: int) -> None:
    """Pin memory that may only be read, range by range, and release it."""
    with device.uploading(address, device.fence()) as upload:
        for at in range(0, nbytes, range_bytes):
            if not upload(UploadRange(at, min(range_bytes, nbytes - at), ())):
                raise RuntimeError("CUDA does not pin memory that may only be read")


def _small_pages(
    device: Device, nbytes: int, compare: Callable[[Callable[[], object]], None]
) -> None:
    """Pin a new mapping of `nbytes` in pages of 4 KiB, which the kernel's own tmpfs has unless an
    administrator has changed that."""
    descriptor = os.memfd_create("small-pages")
    os.posix_fallocate(descriptor, 0, nbytes)
    mapped: list[MappedArena] = []

    def fresh() -> None:
        mapped.append(MappedArena(os.dup(descriptor), nbytes, writable=False))
        _pin(device, mapped[-1].address, nbytes, RANGE_BYTES)

    try:
        compare(fresh)
    finally:
        os.close(descriptor)
        for arena in mapped:
            arena.close()


def _buffered(
    engine: CopyEngine, arena: OpenArena, nbytes: int, hashed: bool, source: Placed
) -> None:
    """Read the bytes of the slot into a pinned buffer of each thread, block by block, as a restore
    by threads does."""
    buffers = threading.local()

    def block(index: int) -> None:
        if not hasattr(buffers, "tensor"):
            buffers.tensor = arena.device.buffer(BLOCK_BYTES)
        target = buffers.tensor.data_ptr()
        for at in range(0, BLOCK_BYTES, PIECE_BYTES):
            source.read_into(target + at, index * BLOCK_BYTES + at, PIECE_BYTES)
            if hashed:
                xxh3_64_intdigest((ctypes.c_ubyte * PIECE_BYTES).from_address(target + at))

    engine.each(block, nbytes // BLOCK_BYTES)


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.restoring", str(__doc__), measure, limit_s=LIMIT_S))
