"""A daemon was frozen, replaced, and goes on when everybody that it knew is gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import grpc
import pytest
from control_plane import ControlServer
from harness import RawCluster, RawJob
from operator_control import OperatorControl
from waiting import error_of, wait_for

from holdfast_core.errors import UnknownSessionError

MEMBER = 1


@pytest.fixture(params=[ControlServer, OperatorControl], ids=["another's", "operator's"])
def cluster(request: pytest.FixtureRequest) -> Iterator[RawCluster]:
    with RawCluster(control=request.param()) as running:
        yield running
        print(running.report())


def test_a_daemon_that_was_replaced_lets_go_of_the_job_although_no_peer_is_left_to_fence_it(
    cluster: RawCluster,
) -> None:
    job = RawJob(cluster, cluster.start_nodes(2))
    job.form()
    job.start_trainers()
    newest = job.train(2)
    frozen, ghost = job.daemon(MEMBER), job.trainers.pop(MEMBER)
    frozen.send_signal(signal.SIGSTOP)
    for member in (MEMBER, 0):
        if member != MEMBER:
            job.daemon(member).lose()
        (job.nodes[member],) = cluster.start_nodes(1)
        job.form()
        job.check_restored(job.start_trainers(), newest)
        newest = job.train()

    frozen.send_signal(signal.SIGCONT)
    if isinstance(cluster.control, ControlServer):
        job.publish_to(frozen.node)  # the operator's server does so by itself
    wait_for("the job to be let go", lambda: frozen.has_let_go(job.name))
    with pytest.raises(grpc.RpcError) as refused:
        ghost.grant(job.step + 1)
    assert isinstance(error_of(refused.value), UnknownSessionError)
    ghost.die()
    assert not list((frozen.root / "jobs").glob("*/arenas/*/arena"))
    job.train()

    # It comes back as a member, with nothing of the old timeline.
    job.nodes[MEMBER] = frozen.node
    newest = job.generation
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert restored[MEMBER][2] == "parity"
