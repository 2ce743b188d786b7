"""Two ranks hold the same model; then they no longer do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RawCluster, RawJob
from ranks import run_ranks
from replica_ranks import ReplicaRank
from waiting import WAIT_S

import holdfast
from holdfast_core.errors import ReplicasDivergedError

EVERY = 2
WIDTH = 512


class Rank(ReplicaRank):
    """One rank in a process of its own, in a session with its node's daemon."""

    def __init__(self, rank: int, sockets: list[Path], job: str, store: Path) -> None:
        settings = holdfast.Settings(
            compare_replicas_every=EVERY, start_wait_s=WAIT_S, report_interval_s=0
        )
        super().__init__(rank, sockets, job, store, settings, width=WIDTH, gradient=0.1)

    def nudge(self) -> None:
        """Change one weight, on rank 1 alone."""
        if self.rank == 1:
            with torch.no_grad():
                self.model.get_parameter("2.weight")[3, 4] += 0.5

    def mend(self) -> None:
        dist.broadcast(self.model.get_parameter("2.weight").data, src=0)

    def refused(self, step: int) -> str:
        """Why the snapshot of `step` is not taken."""
        error = self.save(step).committed.exception(WAIT_S)
        assert isinstance(error, ReplicasDivergedError), error
        assert self.session.problem is error
        return str(error)


def diverge(rank: int, sockets: list[Path], job: str, store: Path) -> None:
    me = Rank(rank, sockets, job, store)
    assert me.session.restore() is None
    for step in (1, 2):
        me.save(step).protected.result(WAIT_S)
    me.nudge()
    me.save(3).protected.result(WAIT_S)  # not compared
    why = me.refused(4)
    assert "unit layer2/dense: ranks [0, 1]" in why, why
    assert "at step 4 " in why and "equal at step 2" in why, why
    assert me.refused(5) == why
    me.end()


def mend(rank: int, sockets: list[Path], job: str, store: Path) -> None:
    me = Rank(rank, sockets, job, store)
    assert me.session.restore() == 3
    for step in (10, 11):
        me.save(step).protected.result(WAIT_S)
    me.nudge()
    me.save(12).protected.result(WAIT_S)
    me.refused(13)
    me.mend()
    me.refused(14)  # not compared
    for step in (15, 16):
        me.save(step).protected.result(WAIT_S)
    assert me.session.problem is None
    me.end()


@pytest.mark.timeout(120)
def test_of_replicas_that_diverged_nothing_is_protected_and_the_job_names_them(
    cluster: RawCluster, tmp_path: Path
) -> None:
    job = RawJob(cluster, cluster.start_nodes(2))
    daemons = [job.daemon(member) for member in range(2)]
    sockets = [daemon.socket for daemon in daemons]
    job.form()
    run_ranks(diverge, (sockets, job.name, tmp_path / "store"), 2)
    for daemon in daemons:
        found = daemon.job(job.name)
        assert {slot["generation"] for slot in found["slots"]} <= {"1.2", "1.3", None}
        assert found["protected"] == "1.3", "saved before the comparison"
        assert "unit layer2/dense: ranks [0, 1]" in found["problem"]
    job.form()
    run_ranks(mend, (sockets, job.name, tmp_path / "later"), 2)
    for daemon in daemons:
        found = daemon.job(job.name)
        assert found["protected"] == "2.16"
        assert not found["problem"]
