"""Cost of persisting in a training loop: `persist_overhead`, `persist_overhead_busy`, its floor.

`examples/train_moe.py` runs once, with a snapshot after every step. Blocks of its steps take turns:
in some nothing is persisted, in some every fifth snapshot is written to a durable tier on tmpfs,
and in some this process writes as many bytes by `os.write`, `fsync` and rename at the same steps.
So other load on the machine affects all three. The example runs with a spare core, like a daemon
that reserves one, and again with a rank on every core, where writing bytes always takes time from a
rank: there the plain writes are the floor.

    python -m benchmarks.persist_loop --out FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Cluster
from benchmarks.floors import SHARED_MEMORY, SharedBuffer
from benchmarks.measure import Figure, Outcome, encode, median_percent
from benchmarks.overhead import BUDGET_BYTES, example
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy, Tier
from holdfast_storage.sets import SetStore

JOB = "persist-loop"
KINDS = ("nothing", "persisted", "bare")
ROUNDS = 9
BLOCK = 15
"""Number of steps of a block."""

EVERY = 5
"""Number of steps from one set to the next."""

FIRST = 25
"""Number of steps before the first block: allocation, the arena, warm-up, a first set."""

NEVER_S = 1e9
POLL_S = 0.005
WITHIN_S = 60.0
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Loop:
    """Observations of one run of the example."""

    means: dict[str, list[float]]
    """Mean seconds of a step in each round, by kind."""
    set_bytes: int


def measure() -> Outcome:
    """Measure all three rows, in percent of a step."""
    cores = len(os.sched_getaffinity(0))
    spare, busy = _run(max(1, cores // 2)), _run(cores)
    return Outcome(
        rows={
            "persist_overhead": _figure(spare, "persisted"),
            "persist_overhead_busy": _figure(busy, "persisted"),
            "persist_overhead_bare": _figure(busy, "bare"),
        }
    )


def _run(ranks: int) -> Loop:
    with (
        Cluster(BUDGET_BYTES) as cluster,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory,
    ):
        daemon = cluster.start("node-0")
        tier = Path(directory) / "tier"
        cluster.control.place(
            JOB,
            1,
            [daemon.node],
            redundancy=Redundancy.NONE,
            nproc_per_node=ranks,
            tier=Tier(uri=str(tier), every_s=NEVER_S, keep=2),
        )
        steps = FIRST + ROUNDS * len(KINDS) * BLOCK
        known = {"HOLDFAST_SOCKET": str(daemon.socket), "HOLDFAST_JOB": JOB}
        with _training(ranks, steps, known, Path(directory) / "log.jsonl") as times:
            return _watch(cluster, SetStore(str(tier), JOB), Path(directory), times)


@contextmanager
def _training(
    ranks: int, steps: int, known: dict[str, str], log: Path
) -> Iterator[Iterator[tuple[int, float]]]:
    """Run the example as a process; yield (step, time of its end) as it runs."""
    command, environment = example(ranks, steps, log)
    process = subprocess.Popen(
        command, env=environment | known, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )

    def follow() -> Iterator[tuple[int, float]]:
        last, until = 0, time.monotonic() + WITHIN_S
        while last < steps:
            lines = log.read_text().split("\n")[last:-1] if log.exists() else []
            for line in map(json.loads, lines):
                last, until = last + 1, time.monotonic() + WITHIN_S
                yield line["step"], line["time"]
            if time.monotonic() > until:
                raise TimeoutError(f"no step after {last} in {WITHIN_S:g} s")
            time.sleep(POLL_S)

    try:
        yield follow()
        _, errors = process.communicate(timeout=WITHIN_S)
        if process.returncode != 0:
            raise RuntimeError(f"the example trainer failed:\n{errors.decode()[-4000:]}")
    finally:
        process.kill()
        process.wait()


def _watch(
    cluster: Cluster, store: SetStore, directory: Path, times: Iterator[tuple[int, float]]
) -> Loop:
    """At each step, do what its block requires."""
    ended: dict[int, float] = {}
    writer: BareWriter | None = None
    for step, at in times:
        ended[step] = at
        if step < FIRST:
            if step == EVERY:
                cluster.control.persist(JOB)
            continue
        if writer is None:
            writer = BareWriter(directory, _bytes_of(store))
        block, within = divmod(step - FIRST, BLOCK)
        kind = _kind(block)
        if within == 0 and block and _kind(block - 1) == "persisted":
            _check(store, Generation(1, step - BLOCK))
        if within % EVERY == 0 and kind == "persisted":
            cluster.control.persist(JOB)
        elif within % EVERY == 0 and kind == "bare":
            writer.write()
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for block in range(ROUNDS * len(KINDS)):
        first = FIRST + block * BLOCK
        means[_kind(block)].append((ended[first + BLOCK] - ended[first]) / BLOCK)
    assert writer is not None
    return Loop(means, writer.nbytes)


def _kind(block: int) -> str:
    """Kind of a block. Each kind is equally often first, second and third in its round."""
    round_, place = divmod(block, len(KINDS))
    return KINDS[(place + round_) % len(KINDS)]


def _bytes_of(store: SetStore) -> int:
    """Size of the set that was requested first."""
    until = time.monotonic() + WITHIN_S
    while not (sets := store.complete()):
        if time.monotonic() > until:
            raise TimeoutError(f"nothing was persisted in {WITHIN_S:g} s")
        time.sleep(POLL_S)
    return sum(file.bytes for file in sets[0].files)


def _check(store: SetStore, since: Generation) -> None:
    """Check that sets were written: a block without one would look cheap."""
    newest = store.complete()[0].generation
    if newest < since:
        raise RuntimeError(f"nothing was persisted from {since} on; the newest set is {newest}")


class BareWriter:
    """Writes of as many bytes as a set has, each to a new file that replaces the one before."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer = SharedBuffer(nbytes)
        self._path = directory / "bare"

    def write(self) -> None:
        partial = self._path.with_suffix(".partial")
        with partial.open("wb", buffering=0) as file:
            todo = memoryview(self._buffer.mapping)
            while todo:
                todo = todo[file.write(todo) :]
            os.fsync(file.fileno())
        partial.rename(self._path)


def _figure(loop: Loop, kind: str) -> Figure:
    """Percent by which steps in blocks of `kind` are longer than in blocks without writes; the note
    gives the difference among the latter."""
    nothing, those = loop.means["nothing"], loop.means[kind]
    percents = [100 * (one / other - 1) for one, other in zip(those, nothing, strict=True)]
    noise = [100 * abs(after / before - 1) for before, after in itertools.pairwise(nothing)]
    note = (
        f"{loop.set_bytes / MEBIBYTE:.0f} MiB every {EVERY} steps; blocks without differ by "
        f"{statistics.median(noise):.1f} %"
    )
    return median_percent(percents, those, statistics.median(nothing), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_bytes(encode(measure()))


if __name__ == "__main__":
    main()
