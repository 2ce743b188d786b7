"""A rank of `benchmarks.redundancy`: one of four plain data-parallel replicas, which saves all of
its state at every step.

python -m benchmarks.redundancy_worker --rank 0 --socket PATH --bytes N --out FILE
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import holdfast
from benchmarks.states import State

NODES = 4
STEPS = 12
STEPS_LEFT_OUT = 2
JOB = "redundancy"
WITHIN_S = 120.0


class Measured(msgspec.Struct, kw_only=True):
    """Results of one rank."""

    waited_s: float
    """Median time of a step for which training waited for the save: from the end of its computation
    until the tensors may change."""
    protected_s: float
    """Median time from a save until it was protected."""
    state_bytes: int
    """Bytes of the state, of which the ranks capture equal parts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compute", type=float, required=True, help="seconds of a step")
    parser.add_argument("--mirror", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=NODES)
    state = State(options.bytes)
    session = holdfast.init(
        model=state.model,
        optimizer=state.optimizer,
        topology=holdfast.Topology(dp=NODES),
        socket=options.socket,
        job=JOB,
        settings=holdfast.Settings(mirror_replicas=options.mirror, compare_replicas_every=0),
    )
    if session.restore() is not None:
        raise RuntimeError("a new job restored something")
    session.prepare()
    waited, protected = [], []
    for step in range(1, STEPS + 1):
        for tensor in state.tensors.values():
            tensor.neg_()  # all of the state changes
        dist.barrier()
        began_s = time.perf_counter()
        handle = session.save(step)
        ended: list[float] = []
        handle.protected.add_done_callback(partial(_note, ended))
        time.sleep(options.compute)  # as long as an accelerator would compute
        computed_s = time.perf_counter()
        state.optimizer.step()  # waits until the tensors may change
        waited.append(time.perf_counter() - computed_s)
        handle.protected.result(WITHIN_S)
        protected.append(ended[0] - began_s)
    dist.barrier()
    session.close()
    measured = Measured(
        waited_s=statistics.median(waited[STEPS_LEFT_OUT:]),
        protected_s=statistics.median(protected[STEPS_LEFT_OUT:]),
        state_bytes=state.nbytes,
    )
    options.out.write_bytes(msgspec.json.encode(measured))


def _note(times: list[float], _: Future[int]) -> None:
    times.append(time.perf_counter())


if __name__ == "__main__":
    main()
