"""Pods of another controller have changed places: members stay with their memory, and every rank is
given what lies on its node, on real daemons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness import RawCluster, RawJob
from waiting import WAIT_S, wait_for

from holdfast_core.errors import UnreachableError
from holdfast_core.snapshots.layouts import decode_manifest
from holdfast_core.snapshots.membership import Membership
from holdfast_protos import codec, control_pb2, trainer_pb2

ORDER = (1, 2, 0)
"""Member of each pod, by its number."""


def turned(job: RawJob) -> Membership:
    """The next membership, whose pods have changed places."""
    before = replace(job.membership(), epoch=job.epoch - 1)
    return replace(
        job.membership(), external=True, since=job.epoch, order=ORDER, past=(before.world,)
    )


def begin(job: RawJob) -> None:
    message = control_pb2.ControlMessage(membership=codec.membership_to_proto(turned(job)))
    for node in job.nodes:
        job.cluster.control.send(node, message)
    for member in range(job.size):
        wait_for(
            f"member {member} to be in epoch {job.epoch}",
            lambda member=member: job.daemon(member).job(job.name).get("epoch") == job.epoch,  # type: ignore[misc]
        )


def given(job: RawJob) -> dict[int, set[int]]:
    """World rank → the ranks whose snapshots it is to read."""
    found = {}
    for number, member in enumerate(ORDER):
        request = trainer_pb2.RestoreRequest(job=job.name, rank=number, epoch=job.epoch)
        *_, last = job.daemon(member).stub().Restore(request, timeout=WAIT_S)
        decision: Any = last.decision
        assert decision.captured_by == job.size, decision
        found[number] = {decode_manifest(each.manifest).rank for each in decision.snapshots}
    return found


@pytest.fixture
def job(cluster: RawCluster) -> RawJob:
    """A job of three members with a protected step, whose processes have ended."""
    made = RawJob(cluster, cluster.start_nodes(3))
    made.form()
    made.start_trainers()
    made.train(2)
    made.stop_trainers()
    made.epoch += 1
    return made


def test_each_rank_reads_what_its_node_holds(job: RawJob) -> None:
    begin(job)
    assert given(job) == {0: {1}, 1: {2}, 2: {0}}


def test_what_a_lost_node_held_is_rebuilt_where_its_member_is_now(job: RawJob) -> None:
    job.daemon(1).kill()
    job.nodes[1] = job.cluster.start_nodes(1)[0]
    begin(job)
    assert given(job) == {0: {1}, 1: {2}, 2: {0}}


def test_a_world_names_itself_to_the_daemons_of_its_nodes(job: RawJob) -> None:
    begin(job)

    def hello(number: int, world: str) -> int:
        request = trainer_pb2.HelloRequest(
            protocol_version=codec.PROTOCOL_VERSION, job=job.name, rank=number, world=world
        )
        try:
            reply = job.daemon(ORDER[number]).stub().Hello(request, timeout=WAIT_S)
        except Exception as error:
            found = codec.error_from_metadata(error.trailing_metadata(), "")  # type: ignore[attr-defined]
            assert isinstance(found, UnreachableError), error
            return 0
        assert reply.external
        return int(reply.epoch)

    first = ORDER.index(0)  # the leader's rank
    assert hello(0, "w1") == 0
    assert hello(first, "w1") == job.epoch
    for number in range(job.size):
        wait_for(f"rank {number} to enter", lambda number=number: hello(number, "w1"))  # type: ignore[misc]
    assert hello(1, "w2") == 0
    beats, node = job.cluster.control.beats, job.nodes[ORDER[1]]
    wait_for(
        "the control loop to learn of it",
        lambda: any(each.job == job.name and each.agent_waiting for each in beats[node].jobs),
    )
