"""Two ranks find out how long their sparse windows are to be, and are killed after that."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash
from harness import RawCluster, RawJob
from ranks import run_ranks
from replica_ranks import ReplicaRank
from waiting import WAIT_S

import holdfast
from holdfast_core.experts.window_lengths import WINDOW_START
from holdfast_core.job.snapshots import SparseWindows

WIDTH, LAYERS = 64, 8
MEASURED_S = 90.0
"""Far above what the ranks take to find a length. A step takes a millisecond, and protection many,
so that windows become longer than they are at first."""


class Rank(ReplicaRank):
    """One rank in a process of its own, in a session with its node's daemon."""

    def __init__(self, rank: int, sockets: list[Path], job: str, notes: Path, run: str) -> None:
        torch.use_deterministic_algorithms(True)
        settings = holdfast.Settings(
            policy=SparseWindows(window="auto"), start_wait_s=WAIT_S, report_interval_s=0
        )
        store = notes / f"store-{run}"
        super().__init__(
            rank, sockets, job, store, settings, width=WIDTH, gradient=1e-3, layers=LAYERS
        )
        self.notes = notes / f"{run}-{rank}.json"
        self.step = self.session.restore() or 0
        self.digests: dict[int, int] = {}
        """Step → digest of the state after it."""

    def train(self) -> holdfast.SaveHandle:
        """A step, which ends on all ranks at once."""
        self.step += 1
        dist.barrier()
        handle = self.save(self.step)
        hashed = xxhash.xxh3_64()
        for p in self.model.parameters():
            for _, tensor in sorted({**self.optimizer.state[p], "": p}.items()):
                hashed.update(tensor.detach().numpy().tobytes())
        self.digests[self.step] = hashed.intdigest()
        return handle

    def train_until_longer(self) -> None:
        """Until windows are longer than at first, and one of these is protected."""
        until, longer = time.monotonic() + MEASURED_S, []
        while True:
            handle = self.train()
            if self.session.counters.window_steps > WINDOW_START:
                longer.append(handle)
            done = any(one.protected.done() and one.protected.exception() is None for one in longer)
            agreed = torch.tensor([int(done)])
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            if int(agreed):
                break
            assert time.monotonic() < until, (self.session.counters, handle)
        self.write()

    def write(self) -> None:
        self.notes.write_text(json.dumps(self.digests), encoding="utf-8")


def be_killed(rank: int, sockets: list[Path], job: str, notes: Path) -> None:
    me = Rank(rank, sockets, job, notes, "first")
    me.train_until_longer()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank: int, sockets: list[Path], job: str, notes: Path, last: int) -> None:
    me = Rank(rank, sockets, job, notes, "second")
    while me.step < last:
        me.train()
    me.write()
    me.end()


def digests(notes: Path, run: str, rank: int) -> dict[int, int]:
    text = (notes / f"{run}-{rank}.json").read_text(encoding="utf-8")
    return {int(step): digest for step, digest in json.loads(text).items()}


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_window_whose_length_ranks_have_agreed_on_is_recovered(
    cluster: RawCluster, tmp_path: Path
) -> None:
    job = RawJob(cluster, cluster.start_nodes(2))
    daemons = [job.daemon(member) for member in range(2)]
    sockets = [daemon.socket for daemon in daemons]
    job.form()
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(be_killed, (sockets, job.name, tmp_path), 2)
    [protected] = {daemon.job(job.name)["protected"] for daemon in daemons}
    before = digests(tmp_path, "first", 0)
    line, last = int(protected.removeprefix("1.")), max(before)
    job.form()
    run_ranks(go_on, (sockets, job.name, tmp_path, last), 2)
    for rank in range(2):
        after = digests(tmp_path, "second", rank)
        assert line - min(after) + 2 > WINDOW_START, "it repeats a longer window, after its first"
        assert {step: after[step] for step in range(line, last + 1)} == {
            step: before[step] for step in range(line, last + 1)
        }
