"""What a snapshot of some experts takes, beside a full one: `partial_staged`, `partial_committed`.

The same state is saved by two processes in turn, each with a daemon of its own: one captures every
unit, the other one expert of each layer and everything else. The figures are the ratio of the times
over the ratio of the captured bytes: 1 is time in proportion to bytes. Each time is taken as so
many times a memcpy just before it, because the memory of a shared machine is not always as fast.

Experts are left out where all of them would take too long, so it is the bytes of some experts that
are to be `--bytes`, as far as memory goes: the state is four times as large, and its arena twelve.

    python -m benchmarks.partial --bytes N --out FILE
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.cluster import Cluster
from benchmarks.measure import Figure, Outcome, encode, ratio
from benchmarks.trainer import work
from benchmarks.trainer_worker import JOB, Saves
from holdfast_core.job_snapshots import PartialExperts, Policy, PolicyType
from holdfast_core.layouts import SLOTS_PER_ARENA
from holdfast_core.values import Redundancy

ROUNDS = 2
STATE = 4
"""How much larger the state is than what is captured with some experts."""

MEMORY_SHARE = 0.8
"""Of what is available."""

GIB = 1 << 30
FLOOR_BYTES = GIB // 2
POLICIES = (
    Policy(),
    Policy(type=PolicyType.PARTIAL_EXPERTS, partial_experts=PartialExperts(experts_per_layer=1)),
)


def measure(captured_bytes: int, directory: Path) -> Outcome:
    """Both rows; `directory` takes the workers' results."""
    room = int(MEMORY_SHARE * psutil.virtual_memory().available) - FLOOR_BYTES
    total_bytes = min(STATE * captured_bytes, room // (1 + SLOTS_PER_ARENA))
    floor = ("--floor-bytes", str(FLOOR_BYTES))
    pairs: list[list[Saves]] = []
    for turn in range(ROUNDS):
        pairs.append([])
        for policy in POLICIES:
            with Cluster(SLOTS_PER_ARENA * total_bytes * 5 // 4) as cluster:
                daemon = cluster.start("node-0")
                cluster.control.place(JOB, 1, [daemon.node], redundancy=Redundancy.NONE)
                out = directory / f"{policy.type.value}-{turn}.json"
                saves = work("save", daemon, total_bytes, out, Saves, policy, *floor)
                pairs[-1].append(saves)
    full, partial = pairs[-1]
    return Outcome(
        rows={f"partial_{name}": _figure(pairs, name) for name in ("staged", "committed")},
        facts={"full_bytes": full.captured_bytes, "partial_bytes": partial.captured_bytes},
    )


def _figure(pairs: list[list[Saves]], name: str) -> Figure:
    full, partial = pairs[-1]
    shares = [partial.captured_bytes / full.captured_bytes for full, partial in pairs]
    figure = ratio(
        [_over_floor(partial, name) for _, partial in pairs],
        [share * _over_floor(full, name) for share, (full, _) in zip(shares, pairs, strict=True)],
        "× its bytes",
        note=f"one expert of each layer: {shares[-1]:.0%} of {full.captured_bytes / GIB:.1f} GiB",
    )
    return replace(
        figure,
        seconds=statistics.median(getattr(partial, name)),
        floor_seconds=shares[-1] * statistics.median(getattr(full, name)),
    )


def _over_floor(saves: Saves, name: str) -> float:
    """Median of the times, in memcpys of `FLOOR_BYTES`."""
    times: list[float] = getattr(saves, name)
    return statistics.median(t / floor for t, floor in zip(times, saves.floors, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = measure(options.bytes, options.out.parent)
    options.out.write_bytes(encode(found))


if __name__ == "__main__":
    main()
