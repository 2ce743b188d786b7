"""Bytes per second hashed, on the device and by number of threads, against reading memory.

- `hashed_on_device`: pieces on a device that computes their digests, with the copy engine's tables,
  against the sum of the same words; `hashed_on_device_rate` is its rate alone;
- `hashed_threads_N`: by threads of the processor. The floor looks for a byte that does not occur,
  with libc's `memchr`: nothing reads memory faster on a processor. Both go through the copy
  engine's threads and its blocks of pieces.

    python -m benchmarks.gpu.hashing --out FILE.json
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from benchmarks.floors import SharedBuffer
from benchmarks.gpu.copying import random_bytes
from benchmarks.gpu.results import Goal, Results, in_turn, run
from benchmarks.gpu.room import MIB, cores, state_bytes
from holdfast._copying.device_hashes import DeviceHasher, DevicePieces, triton_kernel
from holdfast._copying.devices import CpuDevice, DeviceMove
from holdfast._copying.engine import BLOCK_PIECES, CopyEngine
from holdfast_core.snapshots.layouts import PIECE_BYTES

BYTES_MAX = 4096 * MIB
"""Several times what a processor's caches hold."""

PREPARE_S, LIMIT_S = 16.0, 35.0
"""An arena's bytes would take `PREPARE_S` to write; one buffer takes a quarter of it."""

BLOCK_BYTES = BLOCK_PIECES * PIECE_BYTES
ABSENT = 0xFF
AT_MEMORYS_RATE = Goal(limit=1000.0, least=True)
"""In GB/s: thousands of them, on any device for training, are the rate of its memory."""

_libc = ctypes.CDLL(None)
_libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memchr.restype = ctypes.c_void_p


def measure(results: Results) -> None:
    """Measure `hashed_on_device`, and `hashed_threads_N` for powers of two up to the number of
    cores."""
    nbytes = state_bytes(results, prepare_s=PREPARE_S, most=BYTES_MAX, small=16 * MIB)
    if results.on_gpu:
        results.attempt("hashed_on_device", partial(_on_device, results, nbytes))
    else:
        results.skip("hashed_on_device", "needs a CUDA device")
    buffer = SharedBuffer(nbytes)
    filled = np.frombuffer(buffer.mapping, dtype=np.uint8)
    pattern = np.random.default_rng(0).integers(0, ABSENT, BLOCK_BYTES, dtype=np.uint8)
    for first in range(0, nbytes, BLOCK_BYTES):
        filled[first : first + BLOCK_BYTES] = pattern
    threads = 1
    while threads <= cores():
        engine = CopyEngine(threads, CpuDevice())
        name = f"hashed_threads_{threads}"
        results.attempt(name, partial(_compare, results, name, engine, buffer))
        engine.close()
        threads *= 2


def _on_device(results: Results, nbytes: int) -> None:
    count = nbytes // PIECE_BYTES
    flat = random_bytes(count * PIECE_BYTES, results.device)
    pieces, hasher = (
        DevicePieces([DeviceMove(0, flat.numel(), flat)], piece_bytes=PIECE_BYTES),
        DeviceHasher(triton_kernel),
    )
    hasher.prepare([flat.device], PIECE_BYTES)
    digests = np.zeros(count, dtype=np.uint64)

    def hashed() -> None:
        hasher.begin(pieces, count, None).write(digests)

    pairs = in_turn(
        hashed, lambda: flat.view(torch.int64).sum(), results.device, results.repetitions
    )
    results.state("hashing", hasher.state)
    first = xxh3_64_intdigest(flat[:PIECE_BYTES].cpu().numpy().data)
    if digests[0] != first:
        raise RuntimeError(f"the digest of piece 0 is {digests[0]:x} instead of {first:x}")
    results.rates("hashed_on_device", flat.numel(), pairs, "words summed on the device")
    rates = [flat.numel() / 1e9 / ours for ours, _ in pairs]
    results.plain("hashed_on_device_rate", rates, "GB/s", AT_MEMORYS_RATE)


def _compare(results: Results, name: str, engine: CopyEngine, buffer: SharedBuffer) -> None:
    view = memoryview(buffer.mapping)
    blocks = buffer.nbytes // BLOCK_BYTES

    def hash_block(index: int) -> None:
        for at in range(index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES, PIECE_BYTES):
            xxh3_64_intdigest(view[at : at + PIECE_BYTES])

    def read_block(index: int) -> None:
        for at in range(index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES, PIECE_BYTES):
            if _libc.memchr(buffer.address + at, ABSENT, PIECE_BYTES) is not None:
                raise RuntimeError("the byte that ends the search occurs")

    pairs = in_turn(
        lambda: engine.each(hash_block, blocks),
        lambda: engine.each(read_block, blocks),
        results.device,
        results.repetitions,
    )
    results.rates(name, buffer.nbytes, pairs, "memory read by as many threads")


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.hashing", str(__doc__), measure, limit_s=LIMIT_S))
