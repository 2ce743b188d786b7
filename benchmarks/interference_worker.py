"""A rank of `benchmarks.interference`: computes, exchanges gradients meanwhile, saves each step.

python -m benchmarks.interference_worker --rank 0 --root DIR --out FILE ...
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import grpc
import torch
import torch.distributed as dist

from benchmarks.held_daemon import Exchange
from benchmarks.interference import JOB
from benchmarks.raw_trainer import RawTrainer

RANKS = 2
BUCKETS = 4
"""Number of parts of the gradients; each is exchanged as soon as it is computed."""

BACKWARD = 2 / 3
"""Portion of the computation in which gradients appear, one bucket after the other."""


class Saves:
    """Saves at every step, each with different bytes from the one before. A save is skipped if the
    last one is still under way or no slot is free: training never waits."""

    def __init__(self, rank: int, root: Path, payload_bytes: int) -> None:
        self._payloads = [bytearray(os.urandom(payload_bytes)) for _ in range(2)]
        self._trainer = RawTrainer(root / "daemon.sock", JOB, rank, RANKS)
        self._trainer.hello(1)
        self._trainer.restore()
        self._trainer.open(payload_bytes, root / "arena.sock")
        self._saving = threading.Thread()

    def save(self, step: int) -> None:
        if not self._saving.is_alive():
            self._saving = threading.Thread(target=self._save, args=(step,))
            self._saving.start()

    def _save(self, step: int) -> None:
        with suppress(RuntimeError, grpc.RpcError):  # protection is behind: no slot is free
            self._trainer.fill(step, self._payloads[step % 2])
            self._trainer.commit()

    def protected(self) -> int:
        """Number of generations protected so far."""
        if self._saving.ident is not None:
            self._saving.join()
        return len(self._trainer.protected_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--payload", type=int, required=True)
    parser.add_argument("--gradients", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--saves", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=RANKS)
    buckets = [torch.ones(options.gradients // BUCKETS // 4) for _ in range(BUCKETS)]
    exchange = Exchange(options.root)
    saves = Saves(options.rank, options.root, options.payload) if options.saves else None
    times = []
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        time.sleep((1 - BACKWARD) * options.compute)
        exchange.under_way = True
        works = []
        for bucket in buckets:
            time.sleep(BACKWARD * options.compute / BUCKETS)
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()
        exchange.under_way = False
        for bucket in buckets:
            bucket.fill_(1)
        if saves is not None:
            saves.save(step)
        times.append(time.perf_counter() - began)
    protected = saves.protected() if saves is not None else 0
    options.out.write_text(json.dumps({"times": times, "protected": protected}))
    dist.barrier()


if __name__ == "__main__":
    main()
