"""Bytes between the device and an arena, against pinned copies of the same bytes.

An arena is three slots of a file in memory that a real daemon allocated. The floor is one copy of
all bytes from or to pinned memory, in one piece. For tensors of several sizes:

- `arena_copy_*`: the device's copies into the arena, nothing else;
- `staged_*_threads_N`: a snapshot's bytes, copied and hashed with N threads;
- `staged_*_hashed_on_device`: the same with two threads, hashed on the device;
- `first_use`: the daemon allocates the arena, and it is mapped and pinned, against an allocation of
  as many pinned bytes by torch.

    python -m benchmarks.gpu.copying --out FILE.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from benchmarks.gpu.arenas import OpenArena, opened_arena
from benchmarks.gpu.results import Goal, Results, in_turn, run
from benchmarks.gpu.room import GIB, MIB, cores, state_bytes
from benchmarks.measure import timed
from holdfast._copying.device_hashes import DeviceHasher, triton_kernel
from holdfast._copying.engine import BLOCK_PIECES, CopyEngine, CopyPlan, blocks_at_once, plan_copy
from holdfast._copying.gathering import GATHERED_BYTES_MAX
from holdfast_core.snapshots.layouts import PIECE_BYTES

BLOCK_BYTES = BLOCK_PIECES * PIECE_BYTES
STATE_BYTES_MAX = 4 * GIB
PREPARE_S, LIMIT_S = 8.0, 50.0
TENSOR_BYTES = {"64MiB": 64 * MIB, "1GiB": GIB, "1MiB": MIB, "64KiB": 64 * 1024}
SMALL_TENSOR_BYTES = {"1MiB": MIB, "64KiB": 64 * 1024}
TENSORS_MAX = 4096
FEW_THREADS, MANY_THREADS = 2, 8

COPIED = Goal(limit=0.95, least=True)


def measure(results: Results) -> None:
    """Measure all figures."""
    nbytes = state_bytes(results, prepare_s=PREPARE_S, most=STATE_BYTES_MAX, small=4 * MIB)
    state = random_bytes(nbytes, results.device)
    held: list[torch.Tensor] = []
    pin = results.on_gpu
    pinned_s = timed(lambda: held.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)))
    pinned = held.pop()
    pinned.zero_()
    with opened_arena(nbytes, results.device) as arena:
        results.durations("first_use", [(arena.opened_s, pinned_s)], "first pinned allocation")
        sizes = SMALL_TENSOR_BYTES if results.small else TENSOR_BYTES
        for name, size in sizes.items():
            part = slice(0, min(size * TENSORS_MAX, nbytes))
            of_part = arena.part(state[part].numel())
            _copies(results, name, of_part, apart(state[part], size), pinned[part])
        for name, size in sizes.items():
            part = slice(0, min(size * TENSORS_MAX, nbytes))
            of_part = arena.part(state[part].numel())
            for threads in sorted({FEW_THREADS, min(cores(), MANY_THREADS)}):
                tensors, name_of = apart(state[part], size), f"{name}_threads_{threads}"
                _snapshots(results, name_of, of_part, tensors, threads, pinned[part])
            if results.on_gpu:
                tensors, name_of = apart(state[part], size), f"{name}_hashed_on_device"
                hasher = DeviceHasher(triton_kernel)
                _snapshots(
                    results, name_of, of_part, tensors, FEW_THREADS, pinned[part], hasher=hasher
                )


def random_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Make uint8 [nbytes] on `device`; on zeros, hardware may be faster than on real data."""
    words = torch.empty(nbytes // 8, dtype=torch.int64, device=device)
    return words.random_(-(2**62), 2**62).view(torch.uint8)


def plan_of(
    tensors: Sequence[torch.Tensor], gathered_bytes_max: int = GATHERED_BYTES_MAX
) -> CopyPlan:
    """Plan the copies of `tensors`, uint8 and aligned, one after the other in the slot. They must
    outlive the plan."""
    ends = list(accumulate(tensor.numel() for tensor in tensors))
    ranges = [(end - t.numel(), 0, t) for end, t in zip(ends, tensors, strict=True)]
    return plan_copy(ranges, (), PIECE_BYTES, gathered_bytes_max)


def apart(state: torch.Tensor, tensor_bytes: int) -> list[torch.Tensor]:
    """Divide `state` into tensors of `tensor_bytes` that lie apart from each other, as a model's
    do."""
    return [part.clone() for part in state.split(min(tensor_bytes, state.numel()))]


def _copies(
    results: Results,
    name: str,
    arena: OpenArena,
    tensors: Sequence[torch.Tensor],
    pinned: torch.Tensor,
) -> None:
    figure = f"arena_copy_{name}"
    if not results.on_gpu:
        results.skip(figure, "needs a CUDA device")
        return
    plan, whole = plan_of(tensors), torch.cat([*tensors])

    def ours() -> None:
        groups = plan.device_groups.of(blocks_at_once(arena.device.bytes_s, BLOCK_BYTES))
        fence = arena.device.fence()
        with torch.no_grad(), arena.device.after(fence):
            plan.gather.collect()
        download = arena.device.download(groups, arena.placed.view_of_slot, fence)
        if download is None:
            raise RuntimeError("CUDA does not pin the arena")
        download.hurry()
        for number in range(len(groups)):
            download.wait(number)

    def compare() -> None:
        floor = _copied(pinned, whole)
        pairs = in_turn(ours, floor, results.device, results.repetitions)
        _check(arena, pinned)
        results.rates(figure, pinned.numel(), pairs, "pinned copy", COPIED)
        results.state("fastest_group_bytes_s", arena.device.bytes_s)

    results.attempt(figure, compare)


def _snapshots(
    results: Results,
    name: str,
    arena: OpenArena,
    tensors: Sequence[torch.Tensor],
    threads: int,
    pinned: torch.Tensor,
    *,
    hasher: DeviceHasher | None = None,
) -> None:
    plan, whole = plan_of(tensors), torch.cat([*tensors])
    digests: list[bytes] = []
    with engine_of(threads, arena, hasher) as engine:
        engine.prepare(PIECE_BYTES)

        def stage() -> None:
            captured = engine.capture(plan, arena.placed, arena.device.fence())
            digests[:] = [engine.finish(arena.placed, b"", captured)]

        def staged() -> None:
            floor = _copied(pinned, whole)
            pairs = in_turn(stage, floor, results.device, results.repetitions)
            _check(arena, pinned)
            results.rates(f"staged_{name}", pinned.numel(), pairs, "pinned copy")

        results.attempt(f"staged_{name}", staged)


@contextmanager
def engine_of(
    threads: int, arena: OpenArena, hasher: DeviceHasher | None = None
) -> Iterator[CopyEngine]:
    engine = CopyEngine(threads, arena.device, hasher)
    try:
        yield engine
    finally:
        engine.close()


def _copied(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _check(arena: OpenArena, pinned: torch.Tensor) -> None:
    """Raise RuntimeError unless the slot has the bytes of the floor, which is done."""
    slot = torch.frombuffer(arena.placed.view(0, pinned.numel()), dtype=torch.uint8)
    if not torch.equal(slot, pinned):
        raise RuntimeError("the arena has other bytes than the device")


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.copying", str(__doc__), measure, limit_s=LIMIT_S))
