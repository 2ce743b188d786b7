"""What an agent says of a failed worker reaches the control loop through a real daemon."""

from __future__ import annotations

import grpc
import pytest
from harness import RawCluster, RawJob
from waiting import wait_for

from holdfast_operator.control.heartbeats import job_view
from holdfast_protos import trainer_pb2

REFUSED = "is not on node"


def exit_code(cluster: RawCluster, job: RawJob, rank: int) -> int | None:
    """As the control loop sees it; 0 while the daemon is not in the job's epoch."""
    state = cluster.control.state(job.nodes[0], job.name)
    if state is None or state.epoch != job.epoch:
        return 0
    return job_view(state).ranks[rank].exit_code


def report(job: RawJob, rank: int, code: int) -> None:
    job.daemon(0).stub().WorkerExited(
        trainer_pb2.WorkerExitedRequest(job=job.name, epoch=job.epoch, rank=rank, exit_code=code),
        timeout=10.0,
    )


def test_an_exit_code_is_in_the_heartbeats_of_its_epoch_only(cluster: RawCluster) -> None:
    job = RawJob(cluster, cluster.start_nodes(2))
    job.form()
    job.make_trainer(0).join(job.epoch)
    report(job, 0, 137)
    wait_for("the exit code", lambda: exit_code(cluster, job, 0) == 137)
    job.form()
    wait_for("the next epoch", lambda: exit_code(cluster, job, 0) is None)


def test_a_daemon_takes_no_exit_code_of_a_rank_elsewhere(cluster: RawCluster) -> None:
    job = RawJob(cluster, cluster.start_nodes(2))
    job.form()
    job.make_trainer(0).join(job.epoch)
    with pytest.raises(grpc.RpcError) as refused:
        report(job, 1, 3)
    assert isinstance(refused.value, grpc.Call)
    assert REFUSED in (refused.value.details() or "")
