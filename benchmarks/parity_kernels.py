"""Speed of parity arithmetic: XOR, P + Q, two losses, replicas; `make bench NAME=parity`.

Everything is measured in one run, in turns, on the same buffers of one stride, as the daemon works,
so that other load on the machine affects all rows. Figures are bytes of payload per second of one
thread, as the median of the turns, without network and hashing. Writes build/bench/parity.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.layouts import PIECE_BYTES
from holdfast_daemon.parity.combining import STRIDE_BYTES
from holdfast_daemon.parity.multiplying import fill_zeros, multiply_into, xor_into

MEMBERS = 8
TARGET = Path("build/bench/parity.json")

Timed = tuple[int, Callable[[], None]]
"""Bytes of payload that a call produces or encodes, and the call."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=25, help="turns of all rows (default 25)")
    turns: int = parser.parse_args().turns
    speeds = measure(rows(), turns)
    bare = speeds["xor"]
    report = {
        "members": MEMBERS,
        "stride_bytes": STRIDE_BYTES,
        "turns": turns,
        "rows": {
            name: {"bytes_per_s": round(speed), "of_xor": round(speed / bare, 3)}
            for name, speed in speeds.items()
        },
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(report, indent=2) + "\n")
    for name, speed in speeds.items():
        sys.stdout.write(f"{name:28} {speed / 1e9:6.1f} GB/s  {speed / bare:5.2f} of XOR\n")
    sys.stdout.write(f"written to {TARGET}\n")
    return 0


def measure(timed: dict[str, Timed], turns: int) -> dict[str, float]:
    """Bytes per second of each row."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(turns):
        for name, (nbytes, call) in timed.items():
            begun = time.perf_counter()
            call()
            found[name].append(nbytes / (time.perf_counter() - begun))
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def rows() -> dict[str, Timed]:
    """Measured calls by row."""
    rng = np.random.default_rng(1)
    sources = [memoryview(rng.bytes(STRIDE_BYTES)) for _ in range(MEMBERS)]
    into = [memoryview(bytearray(STRIDE_BYTES)) for _ in range(2)]
    raim5, raim6 = Code(MEMBERS, MEMBERS - 1, 1), Code(MEMBERS, MEMBERS - 2, 2)

    def encode(code: Code) -> Timed:
        factors = [_factors(code, row) for row in range(code.rows)]

        def call() -> None:
            for block, of_row in zip(into, factors, strict=False):
                _combine(block, sources, of_row)

        return code.chunks * STRIDE_BYTES, call

    def decode(gone: int) -> Timed:
        lost = set(range(1, 1 + gone))
        blocks = frozenset(
            BlockId(owner, row) for owner in range(MEMBERS) for row in (0, 1) if owner not in lost
        )
        sizes = dict.fromkeys(set(range(MEMBERS)) - lost | {1}, raim6.chunks * STRIDE_BYTES)
        # The worst chunk: the largest number of other parts is missing.
        plans = raim6.recovery(1, sizes, blocks, PIECE_BYTES)
        plan = max(plans, key=lambda step: sum(f != 1 for _, f in step.blocks))
        of_plan = [f for _, f in plan.blocks] + [c.factor for c in plan.others]
        return STRIDE_BYTES, lambda: _combine(into[0], sources, of_plan)

    return {
        "xor": (STRIDE_BYTES, lambda: xor_into(into[0], sources[0])),
        "times 2": (
            STRIDE_BYTES,
            lambda: multiply_into(into[0], sources[0], 2, PIECE_BYTES),
        ),
        "times 183 (the densest)": (
            STRIDE_BYTES,
            lambda: multiply_into(into[0], sources[0], 183, PIECE_BYTES),
        ),
        "encode RAIM5 of 8": encode(raim5),
        "encode RAIM6 of 8, P + Q": encode(raim6),
        "rebuild, one lost of 8": decode(1),
        "rebuild, two lost of 8": decode(2),
        "replicate": (STRIDE_BYTES, lambda: _copy(into[0], sources[0])),
    }


def _factors(code: Code, row: int) -> list[int]:
    sizes = dict.fromkeys(range(code.n), code.chunks * STRIDE_BYTES)
    return [c.factor for c in code.contributions(BlockId(row, row), sizes, PIECE_BYTES)]


def _combine(into: memoryview, sources: list[memoryview], factors: list[int]) -> None:
    fill_zeros(into)
    for source, factor in zip(sources, factors, strict=False):
        multiply_into(into, source, factor, PIECE_BYTES)


def _copy(into: memoryview, source: memoryview) -> None:
    into[:] = source


if __name__ == "__main__":
    raise SystemExit(main())
