"""Two ranks find out how far apart their snapshots are to be, and are killed after that."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RawCluster, RawJob
from ranks import run_ranks
from replica_ranks import ReplicaRank
from waiting import WAIT_S

import holdfast

A_DAY = 86400.0 / 10
"""A recovery every ten seconds, so that snapshots are tenths of a second apart."""
WIDTH = 256
MEASURED_S = 60.0
"""Far above what the ranks take to find their interval."""


class Rank(ReplicaRank):
    """One rank in a process of its own, in a session with its node's daemon."""

    def __init__(self, rank: int, sockets: list[Path], job: str, notes: Path, run: str) -> None:
        settings = holdfast.Settings(
            recoveries_per_day=A_DAY, start_wait_s=WAIT_S, report_interval_s=0
        )
        store = notes / f"store-{run}"
        super().__init__(rank, sockets, job, store, settings, width=WIDTH, gradient=1e-3)
        self.notes = notes / f"{run}-{rank}.json"
        self.step = self.session.restore() or 0
        self.restored = self.step
        self.handles: list[holdfast.SaveHandle] = []

    def train(self) -> holdfast.SaveHandle:
        """A step, which ends on all ranks at once."""
        self.step += 1
        dist.barrier()
        self.handles.append(self.save(self.step))
        return self.handles[-1]

    def train_until_apart(self) -> None:
        """Until snapshots are apart on both ranks, and two more of them are protected."""
        until, protected = time.monotonic() + MEASURED_S, 0
        while True:
            handle = self.train()
            steps = self.session.counters.interval_steps
            if steps > 1 and handle.error is None:
                with suppress(holdfast.HoldfastError):
                    handle.protected.result(WAIT_S)
                    protected += 1
            agreed = torch.tensor([min(protected, 2)])
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            if int(agreed) == 2:
                break
            assert time.monotonic() < until, (steps, handle)
        committed = [h.step for h in self.handles if h.committed.done() and h.error is None]
        known = {"restored": self.restored, "interval": steps, "committed": committed}
        self.notes.write_text(json.dumps(known), encoding="utf-8")


def be_killed(rank: int, sockets: list[Path], job: str, notes: Path) -> None:
    me = Rank(rank, sockets, job, notes, "first")
    me.train_until_apart()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank: int, sockets: list[Path], job: str, notes: Path) -> None:
    me = Rank(rank, sockets, job, notes, "second")
    me.train_until_apart()
    me.end()


def read(notes: Path, run: str, rank: int) -> tuple[int, int, list[int]]:
    found = json.loads((notes / f"{run}-{rank}.json").read_text(encoding="utf-8"))
    return found["restored"], found["interval"], found["committed"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_agree_on_an_interval_and_are_recovered_from_its_snapshots(
    cluster: RawCluster, tmp_path: Path
) -> None:
    job = RawJob(cluster, cluster.start_nodes(2))
    daemons = [job.daemon(member) for member in range(2)]
    sockets = [daemon.socket for daemon in daemons]
    job.form()
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(be_killed, (sockets, job.name, tmp_path), 2)
    _, interval, committed = read(tmp_path, "first", 0)
    assert read(tmp_path, "first", 1)[1] == interval > 1
    apart = [step for step in committed if step > committed[-1] - 1.5 * interval]
    assert apart[-1] - apart[0] == interval
    assert {daemon.job(job.name)["protected"] for daemon in daemons} == {f"1.{committed[-1]}"}
    job.form()
    run_ranks(go_on, (sockets, job.name, tmp_path), 2)
    for rank in range(2):
        restored, again, later = read(tmp_path, "second", rank)
        assert restored == committed[-1]
        assert again > 1
        assert later[0] == restored + 1  # it measures anew
