"""Longer training steps with a snapshot in each, against the same steps without.

The step is that of a Mixture-of-Experts model (`benchmarks.gpu.moe`) with a state as large as this
node's memory has room for, and it accumulates the gradients of so many micro-batches that it takes
`STEP_S_PER_GIB`. Steps that save a state of 1 GiB take as long as those that save the large one.
Blocks of steps with and without snapshots take turns, in one process, with a real daemon. A block
with snapshots contains whole copies: the optimizer waits for each of them.

- `step_threads_N`: with N threads that copy, while the device hashes; `ratio` is in percent;
- `step_hashing_threads_N`: with N threads that also hash;
- `step_1gib_…`: the same with the state of 1 GiB;
- `step_skipped_…`: saves that were skipped or failed, which would make a step look cheap.

    python -m benchmarks.gpu.step --out FILE.json
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from functools import partial

import holdfast
from benchmarks.cluster import Daemon
from benchmarks.gpu.arenas import JOB, one_daemon
from benchmarks.gpu.moe import Training, shape_for
from benchmarks.gpu.results import Goal, Results, in_turn, run, settle
from benchmarks.gpu.room import GIB, MIB, cores, state_bytes
from benchmarks.measure import timed

STATE_BYTES_MAX, LITTLE_BYTES = 8 * GIB, GIB
PREPARE_S, LIMIT_S = 10.0, 175.0
STEP_S_PER_GIB = 0.1
"""Duration of a step for each GiB of state: 8 s for a device of 80 GB that is full of it."""

STEPS = 3
"""Steps of one block."""

BLOCKS = 4
THREADS = ((2, True), (2, False), (8, False), (1, True))
"""Numbers of threads, and whether the device hashes."""
LITTLE_THREADS = THREADS[:2]
WITHIN_S = 60.0
LONGER, LITTLE_LONGER = Goal(limit=1.0), Goal(limit=0.2)
NONE_SKIPPED = Goal(limit=0.0)


def measure(results: Results) -> None:
    """Measure all figures."""
    if not (results.on_gpu or results.small):
        results.skip("step_threads_2", "needs a CUDA device: one step takes a processor minutes")
        return
    most = state_bytes(results, prepare_s=PREPARE_S, most=STATE_BYTES_MAX, small=MIB)
    step_s = STEP_S_PER_GIB * most / GIB
    _measure(results, "", most, step_s, THREADS, LONGER)
    if most > LITTLE_BYTES or results.small:
        little = min(most, LITTLE_BYTES)
        _measure(results, "1gib_", little, step_s, LITTLE_THREADS, LITTLE_LONGER)


def _measure(
    results: Results,
    prefix: str,
    nbytes: int,
    step_s: float,
    threads_of: Sequence[tuple[int, bool]],
    goal: Goal,
) -> None:
    """Measure the figures of a state of at most `nbytes`, in steps that take `step_s`."""
    shape = shape_for(nbytes, small=results.small)
    training = Training(shape, results.device)
    if not results.small:
        _calibrate(results, training, step_s)
    results.state(f"{prefix}state_bytes", training.state_bytes)
    results.state(f"{prefix}tokens_per_step", training.micro_batches * shape.tokens)
    kinds = list(dict.fromkeys((min(threads, cores()), there) for threads, there in threads_of))
    with one_daemon(training.state_bytes) as daemon:
        saved = 0
        for threads, there in kinds:
            name = f"{prefix}{'' if there else 'hashing_'}threads_{threads}"
            tuned = holdfast.Settings(copy_threads=threads, device_checksums=there)
            blocks = 2 if results.small else BLOCKS
            compare = partial(_compare, results, training, daemon, name, tuned, blocks, saved, goal)
            # Set-up takes as long as some blocks do.
            results.attempt(f"step_{name}", compare, 2 * (blocks + 4) * STEPS * step_s)
            saved += (blocks + 1) * STEPS


def _calibrate(results: Results, training: Training, wanted_s: float) -> None:
    """Choose the number of micro-batches that makes a step take `wanted_s`."""

    def seconds(micro_batches: int) -> float:
        training.micro_batches = micro_batches

        def step() -> None:
            training.step()
            settle(results.device)

        return min(timed(step) for _ in range(4))

    one_s, two_s = seconds(1), seconds(2)
    more = (wanted_s - one_s) / max(two_s - one_s, 1e-3)
    training.micro_batches = max(round(1 + more), 1)


def _compare(
    results: Results,
    training: Training,
    daemon: Daemon,
    name: str,
    settings: holdfast.Settings,
    blocks: int,
    saved: int,
    goal: Goal,
) -> None:
    """Compare steps with and without snapshots; those before ended with step `saved`."""
    session = holdfast.init(
        model=training.model,
        optimizer=training.optimizer,
        socket=daemon.socket,
        job=JOB,
        rank=0,
        settings=settings,
    )
    saves: list[holdfast.SaveHandle] = []

    def without() -> None:
        for _ in range(STEPS):
            training.step()

    def with_saves() -> None:
        for _ in range(STEPS):
            saves.append(session.save(saved + len(saves) + 1))
            training.step()

    with session:
        if not saved:
            session.restore()
        session.prepare()
        pairs = in_turn(with_saves, without, results.device, blocks, warm_ups=1)
        futures.wait([save.committed for save in saves], WITHIN_S)
    pairs = [(ours / STEPS, floor / STEPS) for ours, floor in pairs]
    results.state(f"step_{name}_hashed_on_device_bytes", session.counters.hashed_on_device_bytes)
    results.longer(f"step_{name}", pairs, "the step without snapshots", goal)
    failures = [save.committed.exception(0) for save in saves]
    errors = [str(failure) for failure in failures if failure is not None]
    results.plain(f"step_skipped_{name}", [len(errors)], "saves", NONE_SKIPPED)
    if errors:
        results.state(f"step_skipped_{name}", errors[0])


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.step", str(__doc__), measure, limit_s=LIMIT_S))
